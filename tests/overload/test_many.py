"""Many requests, some left by their clients and some ended by deadlines, at any moment: afterwards all is as before."""

import asyncio
import contextlib
import gc
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paged.client import Client, DeadlineExceededError, ResourceExhaustedError, Retries
from paged.v1 import inference_pb2
from scheduler_svc.answer import Answer
from scheduler_svc.api.server import ApiServer
from scheduler_svc.backlog import Place
from scheduler_svc.core.audit import audit
from scheduler_svc.core.beam_group import BeamGroup
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.engine import Engine
from scheduler_svc.reader import Reader
from scheduler_svc.samples import Samples
from scheduler_svc.settings import SchedulerSettings
from tests.processes import cleaned_up, start_executor
from tests.system.engines import engine_over, only_scheduler

CONCURRENCY = 48
FLAGS = ["--simulate", "--num-blocks", "150", "--max-rows", "24", "--tokens-per-step", "96"]
RECORDS = Answer | BeamGroup | Place | Reader | Samples | Sequence


@contextlib.asynccontextmanager
async def served(directory: Path) -> AsyncIterator[tuple[Engine, str]]:
    """All in this process but the executor, so that a test can look at what is kept."""
    with cleaned_up([start_executor(directory, *FLAGS)]) as (executor,):
        executor.wait_until_ready()
        async with engine_over(executor.address, directory, max_waiting_requests=64) as engine:
            server = ApiServer(engine, SchedulerSettings(listen_address="127.0.0.1:0"))
            try:
                yield engine, await server.start()
            finally:
                await server.stop(1.0)


async def ask(client: Client, chance: random.Random, ends: Counter[str]) -> None:
    fate = chance.choice(["finished", "left", "deadline"])
    asked: dict[str, object] = chance.choice(
        [{}, {}, {"n": 3}, {"best_of": 3}, {"beam": inference_pb2.BeamSearch(width=2)}, {"logprobs": 2}]
    )
    if "beam" not in asked:
        asked |= {"temperature": chance.choice([0.0, 1.0]), "ignore_eos": True}
    timeout_s = chance.uniform(0.001, 0.3) if fate == "deadline" else 60.0
    prompt = [300 + chance.randrange(4)] * chance.randrange(1, 120)
    leave_after = chance.randrange(4) if fate == "left" else 1 << 30
    stream = client.generate(prompt, max_tokens=chance.randrange(1, 60), timeout_s=timeout_s, **asked)
    try:
        async with contextlib.aclosing(stream) as messages:
            num_messages = 0
            async for _ in messages:
                num_messages += 1
                if num_messages > leave_after:
                    ends["left"] += 1
                    return
        ends["finished"] += 1
    except DeadlineExceededError:
        ends["deadline"] += 1
    except ResourceExhaustedError:
        ends["refused"] += 1


async def many(address: str, count: int, seed: int) -> Counter[str]:
    ends: Counter[str] = Counter()
    chance, left = random.Random(seed), iter(range(count))

    async def some(client: Client) -> None:
        for _ in left:
            await ask(client, chance, ends)

    async with Client(address, retries=Retries(max_attempts=1)) as client, asyncio.TaskGroup() as tasks:
        for _ in range(CONCURRENCY):
            tasks.create_task(some(client))
    return ends


async def settled(engine: Engine) -> None:
    async with asyncio.timeout(30):
        while engine.lives.samples or engine.load().running_sequences or engine.delivery._queue:
            await asyncio.sleep(0.01)


def kept() -> Counter[str]:
    gc.collect()
    return Counter(type(found).__name__ for found in gc.get_objects() if isinstance(found, RECORDS))


def resident_mb() -> float:
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) / 1024


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def nothing_stays(directory: Path, warm_up: int, count: int) -> tuple[Counter[str], float]:
    async with served(directory) as (engine, address):
        await many(address, warm_up, 0)
        await settled(engine)
        num_tasks, num_open, before_mb = len(asyncio.all_tasks()), num_descriptors(), resident_mb()
        ends = await many(address, count, 1)
        await settled(engine)
        async with asyncio.timeout(20):  # gRPC lets go of connections in its own time
            while len(asyncio.all_tasks()) > num_tasks or num_descriptors() > num_open:
                await asyncio.sleep(0.01)
        assert kept() == {}
        state = only_scheduler(engine).state
        audit(state)
        load = engine.load()
        assert (load.used_blocks, load.unread_bytes, load.waiting_sequences) == (0, 0, 0)
        assert load.finished_requests + load.cancelled_requests >= ends["finished"] + ends["left"]
        assert load.failed_requests == 0
        backlog, accounts = engine._backlog, engine.fleet.accounts
        assert (backlog._live, backlog._opening_tokens, backlog._num_opening) == ({}, {}, 0)
        assert (accounts.waiting_tokens, accounts.num_waiting_tokens) == ({}, 0)
        assert engine.lives._expiries._at == {}
        assert all(account.num_live == account.num_waiting == 0 for account in accounts._accounts.values())
        return ends, resident_mb() - before_mb


async def test_after_many_requests_nothing_of_them_is_kept(tmp_path: Path) -> None:
    ends, _ = await nothing_stays(tmp_path, 50, 500)
    assert min(ends["finished"], ends["left"], ends["deadline"]) > 20


@pytest.mark.slow
async def test_after_ten_thousand_requests_nothing_of_them_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends, grown_mb = await nothing_stays(tmp_path, 2000, 10_000)
    with capsys.disabled():
        print(f"ten thousand requests: {dict(ends)}, memory grown by {grown_mb:.1f} MB")
    assert min(ends["finished"], ends["left"], ends["deadline"]) > 400
    assert grown_mb < 16
