"""Whatever an executor sends, the scheduler goes on: at most the session ends, each request has an answer or an error
of ours, and sane requests are exact as soon as the executor is sane."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from executor_svc.simulated.text import simulated_continuation
from paged.v1 import executor_pb2 as pb
from scheduler_svc import driver
from scheduler_svc.core.audit import audit
from scheduler_svc.core.sequence import Sampling
from scheduler_svc.engine import Engine
from scheduler_svc.errors import PagedError
from scheduler_svc.requests import GenerationRequest
from tests.fuzz.messages import Fuzzer
from tests.processes import cleaned_up, start_executor
from tests.system.engines import engine_over, samples_ids

VOCAB_SIZE = 32000
FLAGS = ["--simulate", "--num-blocks", "64", "--max-rows", "8", "--tokens-per-step", "32", "--block-size", "4"]
FLAGS += ["--simulate-max-model-len", "96", "--session-timeout-s", "0.3"]  # who was not told of it is soon let go
CHANCE = 0.1
NUM_LIES, NUM_LIARS = 600, 4


class LyingExecutor:
    """Stands between schedulers and an executor, and changes now and then what it says. In a thread of its own."""

    def __init__(self, endpoint: str, fuzzer: Fuzzer) -> None:
        self._endpoint, self._fuzzer = endpoint, fuzzer
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.linger = 0
        self._front.router_mandatory = True
        self.address = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._back: dict[bytes, zmq.Socket[bytes]] = {}  # by scheduler's connection
        self.lies = True
        self.num_lies = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        num_silent = 0
        while not self._ends.is_set():
            events = poller.poll(50)
            num_silent = 0 if events else num_silent + 1
            if num_silent == 20:
                self._end_sessions()
            for socket, _ in events:
                if socket is self._front:
                    peer, data = self._front.recv_multipart()
                    if peer not in self._back:
                        back = self._back[peer] = self._context.socket(zmq.DEALER)
                        back.linger = 0
                        back.connect(self._endpoint)
                        poller.register(back, zmq.POLLIN)
                    self._back[peer].send(data)
                else:
                    peer = next(peer for peer, back in self._back.items() if back is socket)
                    if not self._tell(peer, socket.recv()):
                        poller.unregister(socket)
                        self._back.pop(peer).close()

    def _end_sessions(self) -> None:
        """An executor's answer to who attaches, and the fault when it gives that session up, may both have become lies.
        Then a scheduler waits, as it does for a lease, until it is told something or the connection ends."""
        fault = pb.Fault(scope=pb.Fault.SCOPE_SESSION, reason="nothing was said for a second")
        for peer in list(self._back):
            with contextlib.suppress(zmq.ZMQError):  # gone
                self._front.send_multipart([peer, pb.ToScheduler(fault=fault).SerializeToString()])

    def _tell(self, peer: bytes, data: bytes) -> bool:
        """Whether there is still a peer."""
        chance = self._fuzzer.chance
        frames = [data]
        if self.lies and chance.random() < CHANCE:
            self.num_lies += 1
            said = pb.ToScheduler.FromString(data)
            lie = self._fuzzer.message(pb.ToScheduler) if chance.random() < 0.2 else self._fuzzer.mutated(said)
            frames = [self._fuzzer.bytes_of(lie)] * (2 if chance.random() < 0.02 else 1)
        try:
            self._front.send_multipart([peer, *frames])
        except zmq.ZMQError:
            return False
        return True


@contextlib.asynccontextmanager
async def engine_beside_a_liar(directory: Path, seed: int) -> AsyncIterator[tuple[Engine, LyingExecutor]]:
    with cleaned_up([start_executor(directory, *FLAGS)]) as (executor,):
        liar = LyingExecutor(executor.wait_until_ready().address, Fuzzer(seed))
        liar.lies = False
        try:
            async with engine_over(
                liar.address, directory, executor_wait_s=2.0, result_timeout_s=0.1, loss_window_s=0.1
            ) as engine:
                yield engine, liar
        finally:
            liar.close()


async def ask_until(engine: Engine, liar: LyingExecutor, num_lies: int, number: int, outcomes: Counter[str]) -> None:
    asked = 0
    while liar.num_lies < num_lies:
        asked += 1
        sampling = Sampling(temperature=0.0, logprobs=(None, 3)[asked % 2], prompt_logprobs=(None, None, 2)[asked % 3])
        prompt = [300 + (number * 131 + asked * 17 + i) % 7000 for i in range(1 + asked % 40)]
        request = GenerationRequest(f"r{number}-{asked}", prompt, sampling, max_tokens=20, num_samples=1 + asked % 3)
        try:
            async with asyncio.timeout(30):
                await samples_ids(engine, request)
            outcomes["answered"] += 1
        except PagedError as error:
            outcomes[type(error).__name__] += 1
            await asyncio.sleep(0.002)  # for others, while there is no executor


async def lied_to(directory: Path, seed: int, num_lies: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    async with engine_beside_a_liar(directory, seed) as (engine, liar):
        liar.lies = True
        async with asyncio.TaskGroup() as tasks:
            for number in range(12):
                tasks.create_task(ask_until(engine, liar, num_lies, number, outcomes))
        liar.lies = False
        prompt = [300, 301, 302]
        async with asyncio.timeout(30):
            while True:  # it may have been told of another model
                with contextlib.suppress(PagedError):
                    sane = GenerationRequest("sane", prompt, Sampling(temperature=0.0), max_tokens=20, ignore_eos=True)
                    ids = await samples_ids(engine, sane)
                    break
                await asyncio.sleep(0.05)
        assert ids == [list(simulated_continuation(prompt, 20, vocab_size=VOCAB_SIZE))]
        for scheduler in engine.fleet.schedulers:
            audit(scheduler.state)
        assert engine.lives.samples == {}
        assert engine.load().used_blocks == 0
    outcomes["lies"] = liar.num_lies
    return outcomes


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between sessions: most of the time would go by in them."""
    monkeypatch.setattr(driver, "MIN_PAUSE_S", 0.001)
    monkeypatch.setattr(driver, "MAX_PAUSE_S", 0.005)


async def test_nothing_that_an_executor_says_costs_more_than_its_session(tmp_path: Path) -> None:
    outcomes = await lied_to(tmp_path, 1, 80)
    assert outcomes["answered"]


@pytest.mark.slow
async def test_nothing_that_an_executor_says_costs_more_than_its_session_for_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most of the time goes by in waiting for new sessions: so several schedulers, each beside a liar of its own."""
    outcomes: Counter[str] = Counter()

    async def beside_a_liar(number: int) -> None:
        directory = tmp_path / str(number)
        directory.mkdir()
        outcomes.update(await lied_to(directory, 2 + number, NUM_LIES // NUM_LIARS))

    async with asyncio.TaskGroup() as tasks:
        for number in range(NUM_LIARS):
            tasks.create_task(beside_a_liar(number))
    with capsys.disabled():
        print(f"fuzzing, messages to the scheduler: {outcomes['lies']}, {dict(outcomes)}")
    assert outcomes["lies"] >= NUM_LIES
