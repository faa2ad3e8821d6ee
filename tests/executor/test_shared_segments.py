"""Rows that have blocks in common: found from changes of their tables, as if all tables were compared each time."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from executor_svc.decode_run import DecodeRun
from executor_svc.intake import Intake
from executor_svc.plan import PlanViolation, read_plan
from executor_svc.shared_segments import SegmentFinder, merge_segments
from paged.v1.executor_pb2 import StepPlan
from tests.executor.plans import SESSION, column, make_batch, sampling, schedule, start
from tests.executor.segments import as_set, assert_tiled, naive_segments

NUM_ROWS, WIDTH, BLOCK_SIZE = 7, 12, 2
MIN_SAVED = 4  # tokens a row: two blocks here

rows = st.integers(0, NUM_ROWS - 1)
blocks = st.integers(1, 3)  # few: tables are alike by chance, and a table may name a block twice


class Tables(RuleBasedStateMachine):
    """Any changes of tables, looked at now and then."""

    def __init__(self):
        super().__init__()
        self.finders = {least: SegmentFinder(NUM_ROWS, BLOCK_SIZE, least) for least in (1, 2, 4)}
        self.tables: dict[int, list[int]] = {}
        self.columns, self.num_blocks = np.zeros((NUM_ROWS, WIDTH), np.int32), np.zeros(NUM_ROWS, np.int32)

    def tell(self, what, changed):
        for finder in self.finders.values():
            getattr(finder, what)(np.array(changed, np.int32))
        for row in range(NUM_ROWS):
            table = self.tables.get(row, [])
            self.columns[row] = table + [0] * (WIDTH - len(table))
            self.num_blocks[row] = len(table)

    @rule(row=rows, table=st.lists(blocks, max_size=WIDTH))
    def begins(self, row, table):
        self.tables[row] = table
        self.tell("changed", [row])

    @rule(row=rows)
    def ends(self, row):
        self.tables.pop(row, None)
        self.tell("changed", [row])

    @rule(child=rows, parent=rows, blocks=st.lists(blocks, max_size=3))
    def forks(self, child, parent, blocks):
        if parent in self.tables:
            self.tables[child] = (self.tables[parent] + blocks)[:WIDTH]
            self.tell("changed", [child])

    @rule(grown=st.dictionaries(rows, st.lists(blocks, min_size=1, max_size=3)))
    def grows(self, grown):
        grown = {row: more for row, more in grown.items() if row in self.tables}
        for row, more in grown.items():
            self.tables[row] = (self.tables[row] + more)[:WIDTH]
        self.tell("grown", list(grown))

    @rule(row=rows, place=st.integers(0, WIDTH - 1), block=blocks)
    def takes_a_copy(self, row, place, block):
        if place < len(self.tables.get(row, [])):
            self.tables[row][place] = block
            self.tell("changed", [row])

    @rule(data=st.data())
    def is_looked_at(self, data):
        scheduled = data.draw(st.lists(st.sampled_from(sorted(self.tables)), unique=True)) if self.tables else []
        tokens = [data.draw(st.sampled_from([1, 1, 1, 2])) for _ in scheduled]
        contexts = [data.draw(st.integers(1, BLOCK_SIZE * len(self.tables[row]) + 1)) for row in scheduled]
        self.check(scheduled, tokens, contexts)

    @invariant()
    def all_are_as_comparing_says(self):
        if len(self.tables) > NUM_ROWS - 3:  # else changes are taken several at a time
            scheduled = sorted(self.tables)
            self.check(scheduled, [1] * len(scheduled), [BLOCK_SIZE * WIDTH + 1] * len(scheduled))

    def check(self, scheduled, tokens, contexts):
        for least, finder in self.finders.items():
            found = finder.find(
                *(np.array(values, np.int32) for values in (scheduled, tokens, contexts)), self.columns, self.num_blocks
            )
            expected = naive_segments(self.tables, scheduled, tokens, contexts, block_size=BLOCK_SIZE, min_saved=least)
            assert as_set(found) == expected
            if found is not None:
                assert_tiled(found, len(scheduled))


Tables.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
test_segments_are_what_comparing_all_tables_gives = Tables.TestCase


def batch_of(*tables, num_computed=None, block_size=2):
    """A batch whose rows begin with these tables, to compute the token behind what is full of them."""
    batch = make_batch(num_rows=9, num_blocks=60, block_size=block_size, max_model_len=80, min_saved_tokens=MIN_SAVED)
    plan = StepPlan()
    for row, table in enumerate(tables):
        num_tokens = len(table) * block_size
        plan.started.append(start(row, range(num_tokens), table, num_computed=num_tokens - 1))
    return batch, plan


def one_token_each(plan, num_rows):
    return schedule(plan, *((row, 1, True) for row in range(num_rows)))


SHARED = [1, 2, 3, 4, 5, 6]


def test_a_segment_is_found_in_the_first_step_and_dissolves_with_its_second_last_row():
    batch, plan = batch_of([*SHARED, 10], [*SHARED, 11], [*SHARED, 12])
    step = batch.apply(read_plan(one_token_each(plan, 3)), SESSION).step
    assert as_set(step.shared) == {(0, 6, frozenset({0, 1, 2}))}
    plan = schedule(StepPlan(ended_rows=column([1])), (0, 1, True), (2, 1, True))
    plan.appended_rows, plan.appended_blocks = column([0, 2]), column([20, 21])
    step = batch.apply(read_plan(plan), SESSION).step
    assert as_set(step.shared) == {(0, 6, frozenset({0, 1}))}
    plan = schedule(StepPlan(ended_rows=column([0])), (2, 1, True))
    assert batch.apply(read_plan(plan), SESSION).step.shared is None


def test_a_row_that_computes_several_tokens_is_no_member():
    batch, plan = batch_of([*SHARED, 10], [*SHARED, 11])
    plan.started.append(start(2, range(16), [*SHARED, 12, 13], num_computed=12))
    plan = schedule(plan, (2, 3, False), (0, 1, True), (1, 1, True))
    step = batch.apply(read_plan(plan), SESSION).step
    assert as_set(step.shared) == {(0, 6, frozenset({1, 2}))}
    assert step.shared.own_start.tolist() == [0, 6, 6]


def test_what_some_of_the_rows_share_besides_is_a_segment_within():
    batch, plan = batch_of([*SHARED, 10, 11, 12, 13, 20], [*SHARED, 10, 11, 12, 13, 21], [*SHARED, 30], [40, 41])
    step = batch.apply(read_plan(one_token_each(plan, 4)), SESSION).step
    assert as_set(step.shared) == {(0, 6, frozenset({0, 1, 2})), (6, 10, frozenset({0, 1}))}
    assert step.shared.own_start.tolist() == [10, 10, 6, 0]


def test_forks_share_all_blocks_but_the_one_that_is_copied():
    batch, plan = batch_of([*SHARED, 10])
    batch.apply(read_plan(one_token_each(plan, 1)), SESSION)
    plan = StepPlan(fork_parents=column([0, 0]), fork_children=column([1, 2]))
    plan.fork_sampling.extend([sampling(index=1), sampling(index=2)])
    plan.appended_rows, plan.appended_blocks = column([0, 1, 2]), column([20, 21, 22])
    plan.copy_rows, plan.copy_sources, plan.copy_destinations = column([1]), column([10]), column([30])
    step = batch.apply(read_plan(one_token_each(plan, 3)), SESSION).step
    # Rows 0 and 2 have block 10 in common besides; of so little nothing is made.
    assert as_set(step.shared) == {(0, 6, frozenset({0, 1, 2}))}


def test_a_plan_that_broke_a_rule_leaves_what_is_shared_as_it_was():
    batch, plan = batch_of([*SHARED, 10], [*SHARED, 11])
    batch.apply(read_plan(one_token_each(plan, 2)), SESSION)
    bad = schedule(StepPlan(ended_rows=column([0]), appended_rows=column([1]), appended_blocks=column([20])))
    bad.started.append(start(2, [1], [SHARED[0]]))
    schedule(bad, (1, 5, True))
    with pytest.raises(PlanViolation):
        batch.apply(read_plan(bad), SESSION)
    plan = StepPlan(appended_rows=column([0, 1]), appended_blocks=column([20, 21]))
    step = batch.apply(read_plan(one_token_each(plan, 2)), SESSION).step
    assert as_set(step.shared) == {(0, 6, frozenset({0, 1}))}


def test_a_row_whose_shared_blocks_are_not_full_yet_shares_nothing():
    """A scheduler that breaks its own rules harms its own texts, and nothing else."""
    batch, plan = batch_of([*SHARED, 10], [*SHARED, 11])
    plan.started.append(start(2, range(9), SHARED, num_computed=8))
    step = batch.apply(read_plan(one_token_each(plan, 3)), SESSION).step
    assert as_set(step.shared) == {(0, 6, frozenset({0, 1}))}
    assert step.shared.own_start.tolist() == [6, 6, 0]


def test_a_run_of_decode_steps_keeps_its_segments_and_the_batch_learns_of_its_blocks():
    batch, plan = batch_of([*SHARED, 10], [*SHARED, 11], [40])
    intake = Intake(batch, SESSION)
    first = intake.take(one_token_each(plan, 3)).step.shared
    assert as_set(first) == {(0, 6, frozenset({0, 1}))}
    free = iter(range(41, 57))
    tables = {0: [*SHARED, 10], 1: [*SHARED, 11], 2: [40]}
    for i in range(8):
        plan = StepPlan()
        if i % 2 == 0:
            plan.appended_rows, plan.appended_blocks = column([0, 1, 2]), column(new := [next(free) for _ in range(3)])
            for row, block in enumerate(new):
                tables[row].append(block)
        step = intake.take(one_token_each(plan, 3)).step
        assert isinstance(intake._run, DecodeRun)
        assert as_set(step.shared) == as_set(first)
    plan = schedule(StepPlan(ended_rows=column([2])), (1, 1, True), (3, 1, True), (0, 1, True))
    plan.started.append(start(3, range(21), [*tables[0][:10], next(free)], num_computed=20))  # finds row 0's in a cache
    plan.appended_rows, plan.appended_blocks = column([1, 0]), column([next(free), next(free)])
    step = intake.take(plan).step
    assert as_set(step.shared) == {(0, 6, frozenset({0, 1, 2})), (6, 10, frozenset({1, 2}))}


def test_a_run_that_follows_a_prompt_finds_what_its_rows_share():
    batch = make_batch(num_rows=4, num_blocks=40, block_size=2, max_model_len=40, min_saved_tokens=MIN_SAVED)
    plan = StepPlan()
    for row, last in enumerate((10, 11)):
        plan.started.append(start(row, range(14), [*SHARED, last], num_computed=12))
    intake = Intake(batch, SESSION)
    assert intake.take(schedule(plan, (0, 2, True), (1, 2, True))).step.shared is None
    plan = StepPlan(appended_rows=column([0, 1]), appended_blocks=column([20, 21]))
    step = intake.take(one_token_each(plan, 2)).step
    assert isinstance(intake._run, DecodeRun)
    assert as_set(step.shared) == {(0, 6, frozenset({0, 1}))}


@given(st.lists(st.sampled_from(["none", "two", "three"]), min_size=1, max_size=3))
def test_steps_of_several_sessions_keep_their_segments(kinds):
    tables = {"none": [[1, 2], [3]], "two": [[*SHARED, 10], [*SHARED, 11]], "three": [[9], [*SHARED, 7], [*SHARED, 8]]}
    steps, expected, num_rows = [], set(), 0
    for kind in kinds:
        batch, plan = batch_of(*tables[kind])
        steps.append(batch.apply(read_plan(one_token_each(plan, len(tables[kind]))), SESSION).step)
        expected |= {
            (first, end, frozenset(row + num_rows for row in members))
            for first, end, members in as_set(steps[-1].shared)
        }
        num_rows += len(tables[kind])
    merged = merge_segments(steps)
    assert as_set(merged) == expected
    assert (merged is None) == (set(kinds) == {"none"})
    if merged is not None:
        assert_tiled(merged, num_rows)
