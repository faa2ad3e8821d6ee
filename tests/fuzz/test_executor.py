"""Whatever a scheduler sends, the executor goes on: at most that scheduler's session ends, and nothing stays lent."""

from collections.abc import Iterator

import numpy as np
import pytest

from executor_svc.sessions import Session
from executor_svc.settings import ExecutorSettings
from executor_svc.step import PendingStep, Step
from paged.v1 import executor_pb2 as pb
from scheduler_svc.core.audit import audit
from scheduler_svc.core.results import ResultMismatch
from scheduler_svc.core.sequence import Sampling, Sequence
from scheduler_svc.core.token_rules import TokenRules
from scheduler_svc.link.codec import MalformedMessage
from tests.fuzz.messages import Fuzzer
from tests.system.network import Clock
from tests.system.nodes import ExecutorNode, Link

SETTINGS = ExecutorSettings(
    simulate=True,
    simulate_vocab_size=300,
    simulate_max_model_len=96,
    num_blocks=40,
    max_rows=8,
    tokens_per_step=32,
    block_size=4,
    recall_timeout_s=0.5,  # what strangers are lent they do not return
    session_timeout_s=2.0,
)
NUM_STRANGERS = 3


class Stage:
    """One executor, one scheduler whose plans are changed on their way now and then, and peers who make no sense."""

    def __init__(self, seed: int, *, step_us: float) -> None:
        """With steps that take time the next one begins before the last results leave."""
        self.fuzzer, self.clock = Fuzzer(seed), Clock()
        self.chance = self.fuzzer.chance
        self.node = ExecutorNode(SETTINGS.model_copy(update={"simulate_fixed_us": step_us}), self.clock)
        self.node.router._watch = lambda *_: None  # type: ignore[method-assign]  # names of schedulers are changed, too
        self.epoch = self.node.service._sessions.epoch
        self._begin_new_epoch = self.node.service._begin_new_epoch
        self.node.service._begin_new_epoch = self._on_failure  # type: ignore[method-assign]
        runner = self.node.service._steps._stepper._runner
        self._launch = runner.launch
        runner.launch = self._on_step  # type: ignore[method-assign]
        self._end_session = self.node.service._sessions.end
        self.node.service._sessions.end = self._on_end  # type: ignore[method-assign]
        self.link = Link("fuzz", self.node, self.clock)
        self.strangers = [self.node.router.connect(f"stranger {i}", self.clock) for i in range(NUM_STRANGERS)]
        self.num_inputs = self.num_sequences = self.num_steps = self._turns_without_session = 0

    def turn(self) -> None:
        self.clock.now += 0.2  # so that what is not answered is soon given up
        if self.link.key is not None and self.link.core.state.num_waiting < 4:
            self._submit()
        self._turns_without_session = self._turns_without_session + 1 if self.link.key is None else 0
        if self._turns_without_session > 40:  # what it asked with was changed
            self.link.lose()
            self._turns_without_session = 0
        try:
            self.link.act()
        except (ResultMismatch, MalformedMessage, ValueError):  # the executor has done as it was told, by us
            self.link.lose()
        audit(self.link.core.state)
        connection = self.link.connection
        if connection is not None:
            for i, data in enumerate(connection.to_executor):
                if self.chance.random() < 0.3:
                    self.num_inputs += 1
                    sent = pb.ToExecutor.FromString(data)
                    connection.to_executor[i] = self.fuzzer.bytes_of(self.fuzzer.mutated(sent))
            self.node.router.deliver(connection)
        self._say_nonsense()
        self.node.turn()
        assert self.node.service._sessions.epoch == self.epoch, "an input has cost the executor its epoch"

    def _on_failure(self, reason: str) -> bool:
        """The simulated model, and it alone, fails over slots that its scheduler says were computed and were not."""
        assert reason.startswith("SimulatedFailure"), reason
        self.epoch += 1
        return self._begin_new_epoch(reason)

    def _on_step(self, step: Step) -> PendingStep:
        """No runner is asked to touch what is not there, or not its row's: kernels do not look."""
        of_row, of_block = self.node.ownership.of_row, self.node.ownership.of_block
        self.num_steps += 1
        assert step.context_lens.min(initial=1) > 0
        assert step.positions.min(initial=0) >= 0
        assert step.token_ids.max(initial=0) < SETTINGS.simulate_vocab_size
        for i, row in enumerate(step.rows):
            num_blocks = -(-int(step.context_lens[i]) // SETTINGS.block_size)
            table = step.block_tables[i, :num_blocks]
            slots = step.slots[step.query_start[i] : step.query_start[i + 1]]
            assert len(slots)
            assert np.isin(slots // SETTINGS.block_size, table).all()
            assert (of_block[table] == of_row[row]).all()  # the executor's own block is nobody's
            assert of_row[row] > 0
        assert (of_block[step.copy_sources] == of_block[step.copy_destinations]).all()
        return self._launch(step)

    def _on_end(self, session: Session, reason: str, *more: object, **options: object) -> None:
        assert not reason.endswith("over the plan"), f"{reason}: a rule has to say so"
        self._end_session(session, reason, *more, **options)  # type: ignore[arg-type]

    def _submit(self) -> None:
        self.num_sequences += 1
        sampling = Sampling(
            temperature=self.chance.choice((0.0, 1.0)),
            repetition_penalty=self.chance.choice((1.0, 1.5)),
            logprobs=self.chance.choice((None, None, 3)),
            rules=TokenRules(((5, 1.0),), (), ((7, 8),)) if self.chance.random() < 0.3 else Sampling().rules,
        )
        prompt = [self.chance.randrange(300) for _ in range(self.chance.randrange(1, 40))]
        self.link.submit(Sequence(f"r{self.num_sequences}", prompt, self.chance.randrange(1, 30), sampling))

    def _say_nonsense(self) -> None:
        stranger, router = self.chance.choice(self.strangers), self.node.router
        if self.chance.random() < 0.2:
            self.num_inputs += 1
            data = self.fuzzer.bytes_of(self.fuzzer.message(pb.ToExecutor))
            router.arrived.append((stranger.peer, None if self.chance.random() < 0.02 else data))  # type: ignore[arg-type]
        stranger.to_scheduler.clear()

    def end(self) -> None:
        """All go, and everything is the executor's own again."""
        self.link.lose()
        for stranger in self.strangers:
            stranger.break_off()
        for _ in range(20):
            self.clock.now += 1.0
            self.node.turn()
        assert not self.node.sessions
        assert self.node.ownership.free == self.node.ownership.most
        self.strangers = []
        self.link = Link("sane", self.node, self.clock)
        for _ in range(3):
            self.link.act()
            self.node.router.deliver(self.link.connection)  # type: ignore[arg-type]
            self.node.turn()
        assert self.link.is_current


def play(seed: int, num_inputs: int, *, step_us: float) -> Iterator[Stage]:
    while num_inputs > 0:
        stage = Stage(seed, step_us=step_us)
        while stage.num_inputs < min(num_inputs, 2000):
            stage.turn()
        stage.end()
        num_inputs -= stage.num_inputs
        seed += 1
        yield stage


@pytest.mark.parametrize("step_us", [0.0, 1.0])
def test_nothing_that_a_peer_sends_costs_more_than_its_session(step_us: float) -> None:
    (stage,) = play(1000, 1500, step_us=step_us)
    assert stage.num_inputs >= 1500
    assert stage.num_steps > 100


@pytest.mark.slow
@pytest.mark.parametrize("step_us", [0.0, 1.0])
def test_nothing_that_a_peer_sends_costs_more_than_its_session_for_long(
    capsys: pytest.CaptureFixture[str], step_us: float
) -> None:
    num_inputs = sum(stage.num_inputs for stage in play(0, 55_000, step_us=step_us))
    with capsys.disabled():
        print(f"fuzzing, inputs to the executor: {num_inputs}")
    assert num_inputs >= 55_000
