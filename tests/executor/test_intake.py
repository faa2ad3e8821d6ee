"""Plans that repeat the last one's schedule come to the same steps, the same rows and the same refusals as if each had
been looked at anew."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from executor_svc.intake import Intake
from executor_svc.leases import Lease
from executor_svc.plan import PlanViolation, read_plan
from executor_svc.step import Step
from executor_svc.step_builder import merge_steps
from paged.v1.executor_pb2 import StepPlan
from tests.executor.plans import OTHER_SESSION, SESSION, column, make_batch, schedule, start

B = 4
SIZES = {"num_rows": 5, "num_blocks": 60, "block_size": B, "max_model_len": 40}
COLUMNS = ("rows", "query_start", "token_ids", "positions", "slots", "context_lens", "samples")
HOSTILE_BLOCKS = {"the executor's": 0, "another session's": 58, "out of range": 60, "negative": -1}


class Pair:
    """The same plans given to an intake and, one by one, to a batch of their own."""

    def __init__(self, *lengths: int, **sizes: int) -> None:
        self.batch = make_batch(**SIZES | sizes)
        self.plain = make_batch(**SIZES | sizes)
        self.intake = Intake(self.batch, SESSION)
        self.lengths = dict(enumerate(lengths))  # positions that are computed
        self.next_block = 1
        starts = [
            start(row, [7] * length, self.take(-(-length // B)), num_computed=length - 1)
            for row, length in self.lengths.items()
        ]
        self.give(schedule(StepPlan(started=starts), *((row, 1, True) for row in self.lengths)))

    def take(self, count: int) -> list[int]:
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def decode_plan(self) -> StepPlan:
        growing = [row for row, length in self.lengths.items() if length % B == 0]
        plan = StepPlan(appended_rows=column(growing), appended_blocks=column(self.take(len(growing))))
        return schedule(plan, *((row, 1, True) for row in self.lengths))

    def give(self, plan: StepPlan) -> Step:
        expected = self.plain.apply(read_plan(plan), SESSION).step
        step = self.intake.take(plan).step
        for name in COLUMNS:
            assert getattr(step, name).tolist() == getattr(expected, name).tolist(), name
        for table, other, length in zip(step.block_tables, expected.block_tables, step.context_lens, strict=True):
            assert table[: -(-length // B)].tolist() == other[: -(-length // B)].tolist()
        return step

    def decode(self) -> Step:
        step = self.give(self.decode_plan())
        for row in self.lengths:
            self.lengths[row] += 1
        return step

    def check_rows(self) -> None:
        """By a plan without a schedule, the batch is told of all that was decoded."""
        self.give(StepPlan())
        for name in ("live", "num_known", "num_sampled", "num_computed", "num_blocks"):
            assert getattr(self.batch, name).tolist() == getattr(self.plain, name).tolist(), name
        width = min(self.batch.block_tables.shape[1], self.plain.block_tables.shape[1])
        assert self.batch.block_tables[:, :width].tolist() == self.plain.block_tables[:, :width].tolist()
        assert not self.batch.block_tables[:, width:].any()


@pytest.fixture
def pair() -> Pair:
    pair = Pair(3, 5, 8)
    for _ in range(6):
        pair.decode()
    return pair


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_steps_and_rows_are_those_of_plans_looked_at_anew(data: st.DataObject) -> None:
    pair = Pair(*data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3), "lengths"))
    for _ in range(data.draw(st.integers(1, 5), "stretches")):
        for _ in range(data.draw(st.integers(0, 5), "steps")):
            pair.decode()
            if data.draw(st.booleans(), "prepare"):
                pair.intake.prepare()
        match data.draw(st.sampled_from(["nothing", "pause", "end", "block ahead"]), "between"):
            case "pause":
                pair.check_rows()
            case "end" if len(pair.lengths) > 1:
                row = data.draw(st.sampled_from(sorted(pair.lengths)), "row")
                del pair.lengths[row]
                pair.give(StepPlan(ended_rows=column([row])))
            case "block ahead":
                row = data.draw(st.sampled_from(sorted(pair.lengths)), "row")
                if pair.lengths[row] % B:
                    pair.give(StepPlan(appended_rows=column([row]), appended_blocks=column(pair.take(1))))
                    break  # from here on it needs its blocks at other times than `decode` gives them
    pair.check_rows()


def test_the_steps_of_a_run_say_that_they_decode(pair: Pair) -> None:
    assert pair.decode().decodes
    assert not pair.give(StepPlan()).decodes


def refuse(pair: Pair, plan: StepPlan) -> None:
    """Both refuse it in the same words, and the batch is as it was."""
    with pytest.raises(PlanViolation) as expected:
        pair.plain.apply(read_plan(plan), SESSION)
    with pytest.raises(PlanViolation) as refused:
        pair.intake.take(plan)
    assert str(refused.value) == str(expected.value)
    pair.check_rows()


@pytest.mark.parametrize("lengths", [(3, 5, 8), (8, 13), (8, 30)])
def test_a_row_that_started_short_does_not_pass_the_length_at_which_keys_change(lengths: tuple[int, ...]) -> None:
    pair = Pair(*lengths, rope_switch_len=12)
    assert all(pair.decode().decodes for _ in range(4))
    refuse(pair, pair.decode_plan())


def test_a_row_that_started_long_goes_on_past_the_length_at_which_keys_change() -> None:
    pair = Pair(13, 20, rope_switch_len=12)
    for _ in range(8):
        pair.decode()
    pair.check_rows()


@pytest.mark.parametrize("block", HOSTILE_BLOCKS.values(), ids=HOSTILE_BLOCKS.keys())
def test_a_block_that_is_not_the_sessions_is_refused(pair: Pair, block: int) -> None:
    while not (plan := pair.decode_plan()).appended_rows:
        pair.give(plan)
        pair.lengths = {row: length + 1 for row, length in pair.lengths.items()}
    plan.appended_blocks = column([block]) + plan.appended_blocks[4:]
    refuse(pair, plan)


def test_a_row_without_a_slot_is_refused(pair: Pair) -> None:
    while not (plan := pair.decode_plan()).appended_rows:
        pair.give(plan)
        pair.lengths = {row: length + 1 for row, length in pair.lengths.items()}
    plan.appended_rows, plan.appended_blocks = b"", b""
    refuse(pair, plan)


@pytest.mark.parametrize("name", ["scheduled_tokens", "scheduled_samples", "appended_blocks", "ended_rows"])
def test_a_column_that_cannot_be_read_is_refused(pair: Pair, name: str) -> None:
    plan = pair.decode_plan()
    setattr(plan, name, getattr(plan, name) + b"\2")
    refuse(pair, plan)


def test_a_row_that_ends_in_the_plan_that_schedules_it_is_refused(pair: Pair) -> None:
    plan = pair.decode_plan()
    plan.ended_rows = column([0])
    refuse(pair, plan)


def test_nothing_decodes_past_the_models_length() -> None:
    pair = Pair(36)
    for _ in range(3):
        pair.decode()
    refuse(pair, pair.decode_plan())


def test_a_run_goes_on_past_the_entries_it_began_with() -> None:
    batch = make_batch(num_rows=3, num_blocks=200, block_size=2, max_model_len=400)
    intake = Intake(batch, SESSION)
    intake.take(schedule(StepPlan(started=[start(0, [1, 2], [1])]), (0, 2, True)))
    for length in range(3, 300):
        grows = length % 2
        plan = StepPlan(appended_rows=column([0] * grows), appended_blocks=column([1 + length // 2] * grows))
        step = intake.take(schedule(plan, (0, 1, True))).step
        assert step.slots.tolist() == [2 + length - 1]
        assert step.block_tables[0].tolist() == list(np.arange(1, 2 + (length - 1) // 2))


def test_each_session_goes_on_from_its_own_last_step_and_both_make_one_decode_step() -> None:
    batch = make_batch(num_rows=3, num_blocks=20, block_size=8)
    mine, theirs = Intake(batch, SESSION), Intake(batch, OTHER_SESSION)
    mine.take(schedule(StepPlan(started=[start(0, [1, 2], [1])]), (0, 2, True)))
    theirs.take(schedule(StepPlan(started=[start(2, [3, 4, 5], [18])]), (2, 3, True)))
    for number in range(1, 5):
        steps = [intake.take(schedule(StepPlan(), (row, 1, True))).step for intake, row in ((mine, 0), (theirs, 2))]
        merged = merge_steps(steps)
        assert merged.decodes
        assert merged.rows.tolist() == [0, 2]
        assert merged.slots.tolist() == [8 + 1 + number, 18 * 8 + 2 + number]


def test_a_run_ends_where_blocks_are_returned_and_they_are_checked_against_all_that_it_took() -> None:
    batch = make_batch(num_rows=3, num_blocks=20, block_size=2)
    intake = Intake(batch, SESSION)
    intake.take(schedule(StepPlan(started=[start(0, [1, 2], [1])]), (0, 2, True)))
    for block in (2, 3):
        grown = StepPlan(appended_rows=column([0]), appended_blocks=column([block]))
        intake.take(schedule(grown, (0, 1, True)))
        intake.take(schedule(StepPlan(), (0, 1, True)))
    returning = StepPlan(
        appended_rows=column([0]), appended_blocks=column([4]), returned_blocks=column([3]), returned_rows=column([1])
    )
    assert not intake.take(schedule(returning, (0, 1, True))).step.decodes
    for blocks, rows, named in (
        ([3], [1], "returned_blocks"),
        ([4], [], "returned_blocks"),
        ([7], [0], "returned_rows"),
    ):
        with pytest.raises(PlanViolation, match=named):
            batch.check_returned(Lease(np.array(blocks, np.int32), np.array(rows, np.int32), 0), SESSION)
    batch.check_returned(Lease(np.array([7, 8], np.int32), np.array([1], np.int32), 0), SESSION)
