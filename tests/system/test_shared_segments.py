"""What a scheduler lets sequences share, an executor finds: prefixes, samples and beams, preempted and resumed."""

import random

import numpy as np
import pytest

from executor_svc.batch import ResidentBatch
from executor_svc.intake import Intake
from executor_svc.leases import Lease as RowsAndBlocks
from executor_svc.leases import Ownership
from executor_svc.plan_checks import Limits
from executor_svc.step import Step
from paged.v1 import executor_pb2
from scheduler_svc.core.beam import BeamParameters, BeamSearch
from scheduler_svc.core.beam_group import BeamGroup
from scheduler_svc.core.plan import Lease, Plan, Result
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sampling, Sequence, TokenLogprobs
from scheduler_svc.link.codec import encode_plan
from tests.executor.segments import as_set, assert_tiled, naive_segments

SESSION, BLOCK_SIZE, VOCAB_SIZE, MAX_LEN = 1, 4, 50, 120
NUM_ROWS, NUM_BLOCKS = 12, 70  # few enough that some are preempted
MIN_SAVED = 4  # tokens a row


class Executor:
    """Its side of the plan stream, up to the step that a runner would be given."""

    def __init__(self) -> None:
        rows, blocks = np.arange(NUM_ROWS, dtype=np.int32), np.arange(1, NUM_BLOCKS, dtype=np.int32)
        ownership = Ownership(NUM_ROWS, NUM_BLOCKS, 1 << 20)
        ownership.lend(SESSION, RowsAndBlocks(blocks, rows, 1 << 20))
        limits = Limits(VOCAB_SIZE, MAX_LEN, BLOCK_SIZE, 0)
        self.batch = ResidentBatch(ownership, limits, min_saved_tokens=MIN_SAVED)
        self.intake = Intake(self.batch, SESSION)
        self.num_shared: list[int] = []  # rows that were in a segment, step by step

    def take(self, plan: Plan) -> None:
        step = self.intake.take(executor_pb2.ToExecutor.FromString(encode_plan(plan, 1, SESSION)).plan).step
        self.intake.prepare()
        self.check(step)
        shared = step.shared
        self.num_shared.append(0 if shared is None else int((shared.own_start > 0).sum()))

    def check(self, step: Step) -> None:
        """Segments are those that all tables have now."""
        tables = {
            int(row): self.batch.block_tables[row, : self.batch.num_blocks[row]].tolist()
            for row in self.batch.live.nonzero()[0]
        }
        num_tokens = np.diff(step.query_start)
        expected = naive_segments(
            tables, step.rows.tolist(), num_tokens, step.context_lens, block_size=BLOCK_SIZE, min_saved=MIN_SAVED
        )
        assert as_set(step.shared) == expected
        if step.shared is not None:
            assert_tiled(step.shared, len(step.rows))


def request(name: str, chance: random.Random) -> Sequence:
    stem = random.Random(chance.randrange(3))  # few, so that many begin alike
    prompt = [stem.randrange(VOCAB_SIZE) for _ in range(chance.randrange(40))]
    prompt += [chance.randrange(VOCAB_SIZE) for _ in range(chance.randrange(1, 9))]
    num_output, kind = chance.randrange(1, 30), chance.choice(["one", "one", "samples", "beams"])
    if kind == "beams":
        (first,) = sequences = [Sequence(name, prompt, num_output, Sampling(temperature=0))]
        first.group = BeamGroup(sequences, BeamSearch(BeamParameters(chance.randrange(2, 5))))
        return first
    num_samples = chance.randrange(2, 5) if kind == "samples" else 1
    first, *first.held = [Sequence(name, list(prompt), num_output, Sampling(index=i)) for i in range(num_samples)]
    return first


def result(scheduler: Scheduler, plan: Plan, chance: random.Random) -> Result:
    rows = plan.rows[plan.samples].tolist()
    tokens = [chance.randrange(VOCAB_SIZE) for _ in rows]
    logprobs: list[TokenLogprobs | None] = []
    for row, token in zip(rows, tokens, strict=True):
        count = scheduler.state.sequence_in(row).sampling.logprobs
        likely = [-(rank + chance.random()) for rank in range(count or 0)]
        ids = [(token + rank) % VOCAB_SIZE for rank in range(count or 0)]
        logprobs.append(None if count is None else TokenLogprobs(likely[0], 1, ids, likely))
    return Result(plan.step, np.array(tokens, np.int32), logprobs if any(logprobs) else None)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_shares_blocks_is_found_to_and_nothing_else(seed):
    chance = random.Random(seed)
    scheduler, executor = Scheduler(), Executor()
    scheduler.attach(Lease(list(range(1, NUM_BLOCKS)), list(range(NUM_ROWS)), 48, BLOCK_SIZE, 2, MAX_LEN, VOCAB_SIZE))
    left = [request(f"r{i}", chance) for i in range(20)]
    while True:
        for _ in range(min(len(left), chance.randrange(3))):
            scheduler.submit(left.pop())
        plan = scheduler.plan()
        if plan is None:
            if not left:
                break
            continue
        executor.take(plan)
        scheduler.apply(result(scheduler, plan, chance))
    assert sum(executor.num_shared) > 50
    assert max(executor.num_shared) > 3
    assert executor.num_shared[-1] == 0
