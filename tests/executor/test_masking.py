"""Masks of a plan: for rows that draw in it, for this step alone, whole and with something in them."""

import numpy as np
import pytest

from executor_svc.intake import Intake
from executor_svc.plan import PlanViolation, read_plan
from executor_svc.simulated.runner import SimulatedRunner
from executor_svc.simulated.text import SimulatedText, simulated_continuation
from executor_svc.step import RowStart
from executor_svc.step_builder import merge_steps
from paged.v1.executor_pb2 import JoinedRow, StepPlan
from tests.executor.plans import SESSION, column, make_batch, sampling, schedule, start

VOCAB = 100  # of `make_batch`: 13 bytes, and whole words need 16


def mask(*ids: int) -> bytes:
    return sum(1 << token for token in ids).to_bytes(16, "little")


def masked_plan(**masks: bytes) -> StepPlan:
    """Rows 0 and 1 begin; row 0 computes a part of its prompt, row 1 all of it. Masks are given as row1=..."""
    plan = StepPlan(started=[start(0, range(10, 16), [1, 2]), start(1, range(20, 24), [3, 4])])
    plan.mask_rows = column([int(name.removeprefix("row")) for name in masks])
    plan.masks = b"".join(masks.values())
    return schedule(plan, (0, 4, False), (1, 4, True))


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (masked_plan(row0=mask(1)), "mask_rows: row 0"),
        (masked_plan(row2=mask(1)), "mask_rows: row 2"),
        (masked_plan(**{"row-1": mask(1)}), "mask_rows: row -1"),
        (masked_plan(row99=mask(1)), "mask_rows: row 99"),
        (masked_plan(row1=mask(1)[:-1]), "masks: 15 bytes"),
        (masked_plan(row1=mask(1) * 2), "masks: 32 bytes"),
        (masked_plan(row1=b""), "masks: 0 bytes"),
        (masked_plan(row1=mask()), "masks: that of row 1"),
        (masked_plan(row1=mask(100, 127)), "masks: that of row 1"),
    ],
)
def test_a_mask_that_is_not_whole_or_allows_nothing_or_is_for_a_row_that_draws_nothing_is_refused(plan, named):
    batch = make_batch()
    with pytest.raises(PlanViolation) as refused:
        batch.apply(read_plan(plan), SESSION)
    assert str(refused.value).startswith(named)
    assert not batch.live.any()


def test_a_row_may_have_one_mask_only_and_no_mask_goes_without_a_row():
    batch = make_batch()
    twice = masked_plan(row1=mask(1) + mask(2))
    twice.mask_rows = column([1, 1])
    nobody = masked_plan()
    nobody.masks = mask(1)
    for plan, named in ((twice, "mask_rows: id 1 twice"), (nobody, "masks: 16 bytes")):
        with pytest.raises(PlanViolation, match=named):
            batch.apply(read_plan(plan), SESSION)


def test_masks_find_their_places_among_the_rows_that_draw_joined_ones_and_other_plans_included():
    batch = make_batch()
    plan = StepPlan(started=[start(1, range(4), [1])], joined=[JoinedRow(row=0, like=1, sampling=sampling())])
    plan.mask_rows, plan.masks = column([0, 1]), mask(7) + mask(8, 100)
    step = batch.apply(read_plan(schedule(plan, (1, 4, True), (0, 0, True))), SESSION).step
    assert step.masks.places.tolist() == [0, 1]
    assert [row.tobytes() for row in step.masks.allowed] == [mask(8, 100), mask(7)]
    plain = batch.apply(read_plan(schedule(StepPlan(started=[start(2, [1], [2])]), (2, 1, True))), SESSION).step
    merged = merge_steps([plain, step])
    assert merged.masks.places.tolist() == [1, 2]
    assert np.array_equal(merged.masks.allowed, step.masks.allowed)
    assert merge_steps([plain, plain]).masks is None


def test_a_mask_holds_for_one_step_also_in_a_run_of_decode_steps():
    """Steps 2 and 4 have a mask, the others none; all name the same row."""
    batch = make_batch()
    runner = SimulatedRunner(num_rows=4, num_blocks=12, block_size=4, vocab_size=VOCAB)
    intake = Intake(batch, SESSION)
    oracle, drawn = SimulatedText([5, 6], vocab_size=VOCAB), []
    for step in range(1, 6):
        plan = StepPlan(started=[start(0, [5, 6], [1])] if step == 1 else [])
        if step == 4:
            plan.appended_rows, plan.appended_blocks = column([0]), column([2])
        if step in (2, 4):
            plan.mask_rows, plan.masks = column([0]), mask(11, 12)
        applied = intake.take(schedule(plan, (0, 2 if step == 1 else 1, True)))
        if applied.changes.starts:
            runner.start_rows(applied.changes.starts)
        drawn += runner.launch(applied.step).result().sampled_ids.tolist()
        oracle.next_token(np.array([11, 12]) if step in (2, 4) else None)
    assert drawn == oracle.token_ids[2:]
    assert {drawn[1], drawn[3]} <= {11, 12}
    assert drawn != simulated_continuation([5, 6], 5, vocab_size=VOCAB)


def test_end_tokens_held_back_are_passed_over_for_others_that_the_mask_allows():
    runner = SimulatedRunner(num_rows=1, num_blocks=4, block_size=4, vocab_size=VOCAB)
    batch = make_batch(num_rows=2)
    parameters = sampling(min_tokens=3, end_token_ids=[40, 41])
    plan = StepPlan(started=[start(0, [5, 6], [1], parameters=parameters)], mask_rows=column([0]))
    plan.masks = mask(40, 41, 60)
    step = batch.apply(read_plan(schedule(plan, (0, 2, True))), SESSION).step
    runner.start_rows([RowStart(0, np.array([5, 6], np.int32), 2, parameters)])
    assert runner.launch(step).result().sampled_ids.tolist() == [60]
