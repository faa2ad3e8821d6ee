"""What a gateway is told of cached blocks is what is cached, through evictions, flushes and the loss of an executor."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from scheduler_svc.block_watch import BlockChanges
from scheduler_svc.core.prefix import prefix_hashes, root_hash
from scheduler_svc.core.sequence import Sampling
from scheduler_svc.engine import Engine
from scheduler_svc.requests import GenerationRequest
from tests.processes import Service, cleaned_up, start_executor
from tests.system.engines import engine_over, samples_ids
from tests.system.requests import Call, mixed_calls

BLOCK_SIZE = 16
POOL = ["--num-blocks", "200", "--max-rows", "16", "--tokens-per-step", "256"]
SOON_S = 20


class Known:
    """What one watcher has been told, taken in as it comes; each change must make sense after those before."""

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes | None] = {}
        self.ids: dict[bytes, list[int]] = {}
        self.num_removed = 0

    def take(self, changes: BlockChanges) -> None:
        self.num_removed += len(changes.removed)
        for digest in changes.removed:
            del self.ids[digest], self.parents[digest]
        for digest, block in changes.stored.items():
            assert digest not in self.ids, "told twice"
            self.parents[digest] = block.parent
            self.ids[digest] = memoryview(block.token_bytes).cast("i").tolist()

    def chain(self, digest: bytes | None) -> list[int] | None:
        """All tokens up to the block's end; None where a block before it is not known, as one that was evicted."""
        ids: list[int] = []
        while digest is not None:
            if digest not in self.ids:
                return None
            ids = self.ids[digest] + ids
            digest = self.parents[digest]
        return ids


@asynccontextmanager
async def watching(engine: Engine) -> AsyncIterator[Known]:
    known = Known()

    async def watch() -> None:
        async with aclosing(engine.watch_cached_blocks()) as changes:
            async for change in changes:
                known.take(change)

    async with asyncio.TaskGroup() as tasks:
        num_watchers = len(engine.fleet.cache_watch._watchers)
        task = tasks.create_task(watch())
        try:
            while len(engine.fleet.cache_watch._watchers) == num_watchers:
                await asyncio.sleep(0)
            yield known
        finally:
            task.cancel()


def cached(engine: Engine, computed: list[list[int]]) -> set[bytes]:
    """Of these sequences' blocks, those that some executor has."""
    root = root_hash()
    hashes = {digest for ids in computed for digest in prefix_hashes(ids, BLOCK_SIZE, root)}
    caches = [scheduler.state.cache for scheduler in engine.fleet.schedulers]
    return {digest for digest in hashes if any(cache.holds(digest) for cache in caches)}


async def until_known(engine: Engine, known: Known, computed: list[list[int]]) -> None:
    async with asyncio.timeout(SOON_S):
        while set(known.ids) != cached(engine, computed):
            await asyncio.sleep(0.02)
    for digest in known.ids:
        chain = known.chain(digest)
        assert chain is None or prefix_hashes(chain, BLOCK_SIZE, root_hash())[-1] == digest


async def ask(engine: Engine, number: int, call: Call) -> list[int]:
    """Prompt and answer."""
    request = GenerationRequest(
        f"call-{number}",
        call.prompt,
        Sampling(temperature=call.temperature, seed=call.seed),
        max_tokens=call.max_tokens,
        cache_salt=call.cache_salt,
    )
    (ids,) = await samples_ids(engine, request)
    return call.prompt + ids


async def test_watchers_know_exactly_the_cached_blocks_without_a_salt(tmp_path: Path) -> None:
    with cleaned_up([]) as services:
        executors: list[Service] = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            executors.append(start_executor(tmp_path / name, "--simulate", *POOL))
            services.append(executors[-1])
        endpoints = ",".join(executor.wait_until_ready().address for executor in executors)
        calls = mixed_calls(120, random.Random(11))
        unsalted = [not call.cache_salt for call in calls]
        async with engine_over(endpoints, tmp_path / "cache") as engine:
            async with asyncio.timeout(SOON_S):
                while len(engine.fleet.models.named("").executors) < 2:
                    await asyncio.sleep(0.02)
            async with watching(engine) as known:
                whole = await asyncio.gather(*(ask(engine, number, call) for number, call in enumerate(calls)))
                computed = [ids for ids, counts in zip(whole, unsalted, strict=True) if counts]
                assert known.num_removed > 0, "the pools were meant to be too small"
                await until_known(engine, known, computed)
                assert known.ids
                async with watching(engine) as late:
                    await until_known(engine, late, computed)
                executors[0].kill()
                async with asyncio.timeout(SOON_S):
                    while len(list(engine.fleet.attached)) > 1:
                        await asyncio.sleep(0.02)
                await until_known(engine, known, computed)
                assert known.ids
                engine.flush_prefix_cache()
                await until_known(engine, known, computed)
                assert not known.ids
                again = await ask(engine, 1000, Call(list(range(300, 400)), 40, 0.0, 0, ""))
                await until_known(engine, known, [*computed, again])
                assert len(known.ids) >= 100 // BLOCK_SIZE


async def test_blocks_cached_before_anybody_watched_are_counted_and_not_told(tmp_path: Path) -> None:
    with cleaned_up([start_executor(tmp_path, "--simulate", *POOL)]) as (executor,):
        endpoint = executor.wait_until_ready().address
        async with engine_over(endpoint, tmp_path / "cache") as engine:
            await ask(engine, 0, Call(list(range(300, 348)), 1, 0.0, 0, ""))
            async with watching(engine) as known:
                whole = await ask(engine, 1, Call(list(range(400, 448)), 1, 0.0, 0, ""))
                await until_known(engine, known, [whole])
                assert (len(known.ids), engine.num_unknown_blocks) == (3, 3)
