"""Random histories over the plan stream: the engine drives two real executor processes that are killed and frozen at
random.

After every operation the bookkeeping adds up and every text so far is exact; at the end every text is whole."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler_svc.core.audit import audit, audit_idle
from scheduler_svc.core.beam import EarlyStopping
from scheduler_svc.core.sequence import Sampling
from scheduler_svc.engine import Engine
from scheduler_svc.requests import BeamOptions, GenerationRequest
from scheduler_svc.settings import SchedulerSettings
from tests.processes import cleaned_up, start_executor
from tests.system.simulated_answers import END_IDS, VOCAB_SIZE, right_answers

POOL = ["--num-blocks", "24", "--max-rows", "5", "--tokens-per-step", "24"]
NUM_EXECUTORS = 2
EXECUTOR = ["--simulate", *POOL, "--simulate-fixed-us", "500", "--simulate-vocab-size", str(VOCAB_SIZE)]
STEMS = [list(range(100, 250)), [i * i % 97 for i in range(150)]]
numbers = st.integers(0, NUM_EXECUTORS - 1)
prompts = st.builds(
    lambda stem, kept, tail: STEMS[stem][:kept] + tail,
    st.integers(0, 1),
    st.integers(0, 120),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20),
)


class Call:
    """One request, what has come of it, and what must."""

    def __init__(self, engine: Engine, request: GenerationRequest) -> None:
        self.expected = right_answers(request)
        self.ids: list[list[int]] = [[] for _ in self.expected]
        self.scores: list[float | None] = [None for _ in self.expected]
        self.task = asyncio.ensure_future(self._collect(engine, request))

    async def _collect(self, engine: Engine, request: GenerationRequest) -> None:
        async with contextlib.aclosing(engine.generate(request)) as deltas:
            async for delta in deltas:
                self.ids[delta.index] += delta.token_ids
                self.scores[delta.index] = delta.score


class Executors:
    """Those of all histories, each of which leaves them alive and without a session: a start takes as long as one."""

    def __init__(self, directory: Path) -> None:
        self._places = [directory / str(number) for number in range(NUM_EXECUTORS)]
        for place in self._places:
            place.mkdir()
        self.cache_dir = directory / "cache"
        self.services = [start_executor(place, *EXECUTOR) for place in self._places]
        self.endpoints = [service.wait_until_ready().address for service in self.services]

    async def kill_and_restart(self, number: int, pause_s: float) -> None:
        self.services[number].kill()
        await asyncio.sleep(pause_s)
        self.services[number] = start_executor(self._places[number], *EXECUTOR, endpoint=self.endpoints[number])


@pytest.fixture(scope="module", autouse=True)
def executors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    PlanStream.executors = Executors(tmp_path_factory.mktemp("executors"))
    with cleaned_up(PlanStream.executors.services):
        yield


class PlanStream(RuleBasedStateMachine):
    executors: Executors

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.calls: list[Call] = []
        self.num_requests = 0
        self._run(self._start_engine())

    async def _start_engine(self) -> None:
        executors = self.executors
        options = SchedulerSettings(
            executor_endpoint=",".join(executors.endpoints),
            cache_dir=executors.cache_dir,
            max_losses=1000,
            max_executor_losses=1000,
        )
        self.engine = Engine(options)
        self.driving = asyncio.ensure_future(self.engine.run())
        async with asyncio.timeout(20):
            while not self.engine.ready:
                await asyncio.sleep(0.01)

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        self.loop.run_until_complete(work)

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 60),
        seed=st.integers(0, 3),
        num_samples=st.sampled_from([1, 2, 3, 7]),
    )
    def submit(self, prompt: list[int], max_tokens: int, seed: int, num_samples: int) -> None:
        self.num_requests += 1
        sampling = Sampling(temperature=float(seed > 0), seed=seed)
        request = GenerationRequest(
            f"r{self.num_requests}", prompt, sampling, max_tokens, ignore_eos=True, num_samples=num_samples
        )
        self._run(self._submit(request))

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 16),
        beam=st.builds(
            BeamOptions, st.integers(1, 5), st.sampled_from([0.0, 1.0, 2.0, -1.0]), st.sampled_from(EarlyStopping)
        ),
        ends=st.sampled_from([(), END_IDS]),
        data=st.data(),
    )
    def search(
        self, prompt: list[int], max_tokens: int, beam: BeamOptions, ends: tuple[int, ...], data: st.DataObject
    ) -> None:
        self.num_requests += 1
        request = GenerationRequest(
            f"r{self.num_requests}",
            prompt,
            Sampling(),
            max_tokens,
            stop_token_ids=ends,
            ignore_eos=True,
            num_samples=data.draw(st.integers(1, beam.width)),
            beam=beam,
        )
        self._run(self._submit(request))

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 40),
        seed=st.integers(1, 3),
        best_of=st.integers(2, 7),
        ends=st.sampled_from([(), END_IDS]),
    )
    def take_the_best(self, prompt: list[int], max_tokens: int, seed: int, best_of: int, ends: tuple[int, ...]) -> None:
        self.num_requests += 1
        request = GenerationRequest(
            f"r{self.num_requests}",
            prompt,
            Sampling(temperature=1.0, seed=seed),
            max_tokens,
            stop_token_ids=ends,
            ignore_eos=True,
            num_samples=(best_of + 1) // 2,
            best_of=best_of,
        )
        self._run(self._submit(request))

    async def _submit(self, request: GenerationRequest) -> None:
        self.calls.append(Call(self.engine, request))
        await asyncio.sleep(0)

    @rule(seconds=st.floats(0, 0.05))
    def go_on(self, seconds: float) -> None:
        self._run(asyncio.sleep(seconds))

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.calls))
        self.calls.remove(call)
        call.task.cancel()
        self._run(asyncio.wait([call.task]))

    @rule(number=numbers, seconds=st.floats(0, 0.3))
    def freeze(self, number: int, seconds: float) -> None:
        service = self.executors.services[number]
        service.freeze()
        self._run(asyncio.sleep(seconds))
        service.thaw()

    @rule(number=numbers, seconds=st.sampled_from([0.02, 0.02, 0.3]))
    def kill_and_restart(self, number: int, seconds: float) -> None:
        self._run(self.executors.kill_and_restart(number, seconds))

    @invariant()
    def the_books_add_up(self) -> None:
        for scheduler in self.engine.fleet.schedulers:
            audit(scheduler.state)

    @invariant()
    def every_text_is_exact(self) -> None:
        for call in self.calls:
            assert all(ids == right[: len(ids)] for ids, (right, _) in zip(call.ids, call.expected, strict=True))

    def teardown(self) -> None:
        try:
            self._run(asyncio.wait_for(self._finish(), 60))
        finally:
            self.driving.cancel()
            self._run(asyncio.wait([self.driving]))
            self.loop.close()

    async def _finish(self) -> None:
        await asyncio.gather(*[call.task for call in self.calls])
        for call in self.calls:
            assert list(zip(call.ids, call.scores, strict=True)) == call.expected
        for scheduler in self.engine.fleet.schedulers:
            while scheduler.state.num_running or scheduler.state.in_flight:
                await asyncio.sleep(0.01)
            audit_idle(scheduler.state)
            assert (
                scheduler.state.num_waiting == scheduler.state.queue.num_rows == scheduler.state.queue.num_tokens == 0
            )
        assert len(self.engine.lives.samples) == 0


base = settings(deadline=None, stateful_step_count=25, suppress_health_check=list(HealthCheck), print_blob=True)
TestPlanStream = PlanStream.TestCase
TestPlanStream.settings = settings(base, max_examples=7)


@pytest.mark.slow
class TestPlanStreamForLong(PlanStream.TestCase):
    settings = settings(base, max_examples=150, stateful_step_count=40)
