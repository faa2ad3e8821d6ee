"""A scheduler and the plain executor, step by step, with every rule checked after each."""

from collections.abc import Iterator

from scheduler_svc.core.admission import AdmissionQueue
from scheduler_svc.core.audit import audit
from scheduler_svc.core.cache_events import CacheEvents
from scheduler_svc.core.plan import Lease, Plan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, State
from tests.core.plain_executor import PlainExecutor, continuation

BLOCK_SIZE = 4


class Run:
    """A scheduler and an executor, one plan between them at a time; every plan is kept."""

    def __init__(
        self,
        num_blocks: int = 60,
        num_rows: int = 8,
        tokens_per_step: int = 64,
        block_size: int = BLOCK_SIZE,
        rope_switch_len: int = 0,
        queue: AdmissionQueue | None = None,
        cache_events: CacheEvents | None = None,
        prefix_caching: bool = True,
    ) -> None:
        blocks, rows = list(range(1, num_blocks + 1)), list(range(min(num_rows, tokens_per_step)))
        self.lease = Lease(blocks, rows, tokens_per_step, block_size, rope_switch_len=rope_switch_len)
        self.scheduler = Scheduler(queue=queue, cache_events=cache_events, prefix_caching=prefix_caching)
        self.scheduler.attach(self.lease)
        self.executor = PlainExecutor(self.lease)
        self.plans: list[Plan] = []

    def submit(self, sequence: Sequence) -> Sequence:
        self.scheduler.submit(sequence)
        audit(self.scheduler.state)
        return sequence

    def step(self) -> Plan | None:
        plan = self.scheduler.plan()
        audit(self.scheduler.state)
        if plan is not None:
            self.plans.append(plan)
            self.scheduler.apply(self.executor.run(plan))
            audit(self.scheduler.state)
        return plan

    def to_the_end(self) -> None:
        while self.step() is not None:
            pass
        assert self.scheduler.state.cache.pool.num_used == 0

    def answer(self, prompt: list[int], max_tokens: int, **told: object) -> Sequence:
        """The sequence of this prompt, computed with nothing beside it but what was submitted before."""
        sequence = self.submit(Sequence("r", list(prompt), max_tokens, **told))
        while sequence.state is not State.ENDED:
            assert self.step() is not None
        return sequence

    @property
    def num_copies(self) -> int:
        return sum(len(plan.copies.rows) for plan in self.plans)

    @property
    def num_computed(self) -> int:
        return sum(int(plan.num_tokens.sum()) for plan in self.plans)


def assert_exact(samples: list[Sequence], prompt: list[int], max_tokens: int = 6) -> None:
    for sample in samples:
        expected = continuation(prompt, (), len(prompt) + max_tokens, sample.sampling.index)
        assert sample.token_ids[len(prompt) :] == expected
        assert sample.state is State.ENDED


def asked(name: str, num_prompt: int = 4, max_tokens: int = 8, **place: object) -> Sequence:
    """A request of a prompt that no other begins like."""
    first = sum(name.encode()) * 100
    return Sequence(name, list(range(first, first + num_prompt)), max_tokens, **place)


def admitted(run: Run, sequences: list[Sequence], most_steps: int = 2000) -> Iterator[Sequence]:
    """These, as they begin to run."""
    waiting = list(sequences)
    for _ in range(most_steps):
        run.step()
        begun = [sequence for sequence in waiting if sequence.num_cached is not None]
        waiting = [sequence for sequence in waiting if sequence.num_cached is None]
        yield from begun
        if not waiting:
            return
    raise AssertionError(f"{len(waiting)} have not begun after {most_steps} steps")
