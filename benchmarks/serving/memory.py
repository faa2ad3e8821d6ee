"""What a scheduler's memory does while many long streams are open, and after they have ended."""

import asyncio
from pathlib import Path

from benchmarks.serving.streams import LoadProcess, served
from paged.client import Client
from paged.load.generator import Load
from paged.load.seen import Seen

STREAMS, TOKENS = 4096, 2000
ROUNDS = ("", "again_")
POLL_S, SETTLE_S = 0.2, 10.0


async def memory_mb(
    num_streams: int = STREAMS, num_tokens: int = TOKENS, *, share_calls: bool = False
) -> dict[str, float]:
    """Resident megabytes of the scheduler: after a first small load; at most while all streams are open, and after they
    have ended; the same of as many others once more, when the prefix cache is full of what was before; and with an
    emptied cache."""
    async with served(1, num_streams, tokens_per_row=num_tokens + 128) as system:
        pid = system.schedulers[0].pid
        await _read_all(Load(system.target, 64, output_tokens=(50, 50), once=True, share_calls=share_calls))
        found = {"start_mb": _resident_mb(pid)}
        async with Client(system.addresses[0]) as client:
            for number, name in enumerate(ROUNDS):
                load = Load(
                    system.target,
                    num_streams,
                    output_tokens=(num_tokens, num_tokens),
                    once=True,
                    share_calls=share_calls,
                    seed=number,
                )
                found[f"most_{name}mb"] = await _most_mb(pid, load)
                while (await client.load()).used_blocks:
                    await asyncio.sleep(POLL_S)
                await asyncio.sleep(SETTLE_S)
                found[f"after_{name}mb"] = _resident_mb(pid)
            num_cached = await client.flush_prefix_cache()
        await asyncio.sleep(SETTLE_S)
        return {**found, "without_cache_mb": _resident_mb(pid), "cached_blocks": num_cached}


async def _most_mb(pid: int, load: Load) -> float:
    """While the load is read."""
    most = _resident_mb(pid)
    async with LoadProcess.of(load) as generator:
        generator.begin()
        ending = asyncio.create_task(generator.end())
        while not ending.done():
            most = max(most, _resident_mb(pid))
            await asyncio.wait([ending], timeout=POLL_S)
    _check(ending.result())
    return most


async def _read_all(load: Load) -> None:
    async with LoadProcess.of(load) as generator:
        generator.begin()
        _check(await generator.end())


def _check(seen: Seen) -> None:
    if errors := seen.errors or seen.earlier_errors:
        raise RuntimeError(f"streams have failed: {errors}")


def _resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return round(int(status.split("VmRSS:")[1].split()[0]) / 1024, 1)
