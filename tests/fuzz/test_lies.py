"""Lies of an executor, thousands of them: every kind of message, at every moment of a session. All is in one process,
and nothing is a stand-in: the engine and its sessions, sockets, an executor's loop, whose messages are changed as they
leave.

`test_scheduler.py` has fewer, told by a process of its own, and waits as long as services do.
"""

import asyncio
import contextlib
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, MutableMapping
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from executor_svc.router import Router, Sent
from executor_svc.service import Service
from executor_svc.settings import ExecutorSettings
from executor_svc.simulated.load import load_simulated
from executor_svc.simulated.text import simulated_continuation
from paged.v1 import executor_pb2 as pb
from scheduler_svc import driver
from scheduler_svc.core.audit import audit
from scheduler_svc.core.beam import EarlyStopping
from scheduler_svc.core.sequence import Sampling
from scheduler_svc.engine import Engine
from scheduler_svc.errors import PagedError
from scheduler_svc.link import session
from scheduler_svc.requests import BeamOptions, GenerationRequest
from tests.fuzz.messages import Fuzzer
from tests.system.engines import engine_over, samples_ids

SETTINGS = ExecutorSettings(
    simulate=True,
    simulate_vocab_size=500,
    simulate_max_model_len=96,
    num_blocks=64,
    max_rows=8,
    tokens_per_step=32,
    block_size=4,
)
KINDS = [field.name for field in pb.ToScheduler.DESCRIPTOR.fields]
CHANCE = 0.15  # of a message to be another one, or to have another one before it
NUM_ASKING = 8
# What the scheduler says where it has a fault of its own.
OWN_FAULTS = {"message_failed", "plan_failed", "result_failed", "lease_change_failed", "audit_failed"}


class LyingRouter(Router):
    """Of an executor that does all as it should, and says something else now and then."""

    fuzzer: Fuzzer
    lies = False
    num_lies = 0
    told: Counter[str]

    def send(self, peer: bytes, payload: bytes) -> Sent:
        chance = self.fuzzer.chance
        if not self.lies or chance.random() > CHANCE:
            return super().send(peer, payload)
        said = pb.ToScheduler.FromString(payload)
        self.num_lies += 1
        if chance.random() < 0.5:
            lie = self._invented(said)
            super().send(peer, self.fuzzer.bytes_of(lie))
            return super().send(peer, payload)
        lie = self.fuzzer.mutated(said)
        self.told[lie.WhichOneof("message") or "nothing"] += 1
        return super().send(peer, self.fuzzer.bytes_of(lie))

    def _invented(self, said: pb.ToScheduler) -> pb.ToScheduler:
        """Of any kind, and mostly of the session."""
        kind = self.fuzzer.chance.choice(KINDS)
        self.told[kind] += 1
        lie = pb.ToScheduler()
        field = getattr(lie, kind)
        field.CopyFrom(self.fuzzer.message(type(field)))
        true = getattr(said, said.WhichOneof("message") or "result")
        if "session" in field.DESCRIPTOR.fields_by_name and self.fuzzer.chance.random() < 0.9:
            field.epoch, field.session = getattr(true, "epoch", 0), getattr(true, "session", 0)
        return lie


class Executor:
    """In a thread of this process."""

    requested = False  # to stop

    def __init__(self, seed: int) -> None:
        self.router = LyingRouter("tcp://127.0.0.1:0", max_message_bytes=1 << 22, longest_wait_ms=20)
        self.router.fuzzer, self.router.told = Fuzzer(seed), Counter()
        self._service = Service(SETTINGS, load_simulated(SETTINGS), self.router, self)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Executor":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.requested = True
        self._thread.join()
        self.router.close()

    def _run(self) -> None:
        while not self.requested:
            assert self._service.turn(), "the runner has failed"


@pytest.fixture
def own_faults() -> Iterator[list[MutableMapping[str, object]]]:
    """Events that say so."""
    found: list[MutableMapping[str, object]] = []

    def keep(_: object, __: str, event: MutableMapping[str, object]) -> MutableMapping[str, object]:
        if event["event"] in OWN_FAULTS:
            found.append(event)
        raise structlog.DropEvent

    structlog.configure(processors=[structlog.processors.format_exc_info, keep], cache_logger_on_first_use=False)
    yield found
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def _nobody_waits_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between sessions, or for an executor whose answer was a lie: most of the time would go by in that."""
    monkeypatch.setattr(driver, "MIN_PAUSE_S", 0.001)
    monkeypatch.setattr(driver, "MAX_PAUSE_S", 0.005)
    monkeypatch.setattr(session, "ATTACH_SILENCE_S", 0.05)
    monkeypatch.setattr(session, "TOKENIZER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(session, "MAX_RESULT_TIMEOUT_S", 0.1)


async def ask_until(engine: Engine, executor: Executor, num_lies: int, number: int, outcomes: Counter[str]) -> None:
    asked = 0
    while executor.router.num_lies < num_lies:
        asked += 1
        prompt = [10 + (number * 131 + asked * 17 + i) % 400 for i in range(1 + asked % 40)]
        request = GenerationRequest(
            f"r{number}-{asked}",
            prompt,
            Sampling(temperature=0.0, logprobs=(None, 3)[asked % 2], prompt_logprobs=(None, None, 2)[asked % 3]),
            max_tokens=20,
            num_samples=1 + asked % 3,
        )
        if asked % 4 == 0:
            request = replace(request, sampling=Sampling(), beam=BeamOptions(3, 1.0, EarlyStopping.NO))
        try:
            async with asyncio.timeout(60):
                await samples_ids(engine, request)
            outcomes["answered"] += 1
        except PagedError as error:
            outcomes[type(error).__name__] += 1
            await asyncio.sleep(0.002)  # for others, while there is no executor


async def answer_of_a_sane_executor(engine: Engine) -> list[list[int]]:
    prompt = [300, 301, 302]
    async with asyncio.timeout(60):
        while True:  # it may have been told of another model
            with contextlib.suppress(PagedError):
                request = GenerationRequest("sane", prompt, Sampling(temperature=0.0), max_tokens=20, ignore_eos=True)
                ids = await samples_ids(engine, request)
                assert ids == [list(simulated_continuation(prompt, 20, vocab_size=SETTINGS.simulate_vocab_size))]
                return ids
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def lied_to(directory: Path, executor: Executor) -> AsyncIterator[Engine]:
    options = {"executor_wait_s": 1.0, "result_timeout_s": 0.05, "loss_window_s": 0.01}
    async with engine_over(executor.router.endpoint, directory, **options) as engine:
        yield engine


async def lies(directory: Path, seed: int, num_lies: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    with Executor(seed) as executor:
        async with lied_to(directory, executor) as engine:
            await answer_of_a_sane_executor(engine)
            before = len(asyncio.all_tasks()), num_descriptors()
            executor.router.lies = True
            async with asyncio.TaskGroup() as tasks:
                for number in range(NUM_ASKING):
                    tasks.create_task(ask_until(engine, executor, num_lies, number, outcomes))
            executor.router.lies = False
            await answer_of_a_sane_executor(engine)
            assert engine.lives.samples == {}
            assert engine.load().used_blocks == 0
            for scheduler in engine.fleet.schedulers:
                audit(scheduler.state)
            async with asyncio.timeout(60):  # sockets are closed behind our back
                while (len(asyncio.all_tasks()), num_descriptors()) > before:
                    await asyncio.sleep(0.02)
            outcomes["sessions lost"] = engine.fleet.num_losses
    assert set(executor.router.told) >= set(KINDS)
    outcomes["lies"] = executor.router.num_lies
    return outcomes


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_lies_cost_sessions_and_nothing_else(
    tmp_path: Path, own_faults: list[MutableMapping[str, object]]
) -> None:
    outcomes = await lies(tmp_path, 1, 300)
    assert own_faults == []
    assert outcomes["answered"]
    assert outcomes["sessions lost"] > 20


@pytest.mark.slow
async def test_lies_cost_sessions_and_nothing_else_for_long(
    tmp_path: Path, own_faults: list[MutableMapping[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = await lies(tmp_path, 2, 10_000)
    with capsys.disabled():
        print(f"fuzzing, lies to the scheduler: {outcomes['lies']}, {dict(outcomes)}")
    assert own_faults == []
    assert outcomes["lies"] >= 10_000
