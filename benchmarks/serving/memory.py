"""What a scheduler's memory does while many long streams are open, and after they have ended."""

import asyncio
from pathlib import Path

from benchmarks.serving.streams import LoadProcess, served
from paged.client import Client
from paged.load.generator import Load

STREAMS, TOKENS = 4096, 2000
POLL_S, SETTLE_S = 0.2, 10.0


async def memory_mb(num_streams: int = STREAMS, num_tokens: int = TOKENS) -> dict[str, float]:
    """Resident megabytes of the scheduler: after a first small load, at most while all streams are open, and after. The
    prefix cache remembers the blocks of what has ended, as it is meant to: without_cache_mb is once it is emptied."""
    async with served(1, num_streams, tokens_per_row=num_tokens + 128) as system:
        pid = system.schedulers[0].pid
        await _read_all(Load(system.target, 64, output_tokens=(50, 50), once=True))
        start = _resident_mb(pid)
        most = start

        async def follow() -> None:
            nonlocal most
            while True:
                most = max(most, _resident_mb(pid))
                await asyncio.sleep(POLL_S)

        following = asyncio.create_task(follow())
        await _read_all(Load(system.target, num_streams, output_tokens=(num_tokens, num_tokens), once=True))
        following.cancel()
        async with Client(system.addresses[0]) as client:
            while (await client.load()).used_blocks:
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(SETTLE_S)
            after = _resident_mb(pid)
            num_cached = await client.flush_prefix_cache()
        await asyncio.sleep(SETTLE_S)
        found = {"start_mb": start, "most_mb": most, "after_mb": after, "without_cache_mb": _resident_mb(pid)}
        return {**found, "cached_blocks": num_cached}


async def _read_all(load: Load) -> None:
    async with LoadProcess.of(load) as generator:
        generator.begin()
        seen = await generator.end()
    if errors := seen.errors or seen.earlier_errors:
        raise RuntimeError(f"streams have failed: {errors}")


def _resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return round(int(status.split("VmRSS:")[1].split()[0]) / 1024, 1)
