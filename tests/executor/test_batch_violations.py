"""A plan that breaks a rule is refused, names what is wrong, and leaves no trace."""

import math
import tracemalloc

import numpy as np
import pytest

from executor_svc.batch import ResidentBatch
from executor_svc.leases import Lease
from executor_svc.plan import PlanViolation, read_plan
from paged.v1.executor_pb2 import JoinedRow, RowSampling, StartedRow, StepPlan
from tests.executor.plans import SESSION, column, make_batch, sampling, schedule, start
from tests.rules import rule_columns


@pytest.fixture
def batch() -> ResidentBatch:
    """Row 0 has 6 tokens in blocks 1, 2, of which 4 are computed; row 1 has 4 in block 3 and has sampled one more."""
    batch = make_batch()
    plan = StepPlan(started=[start(0, range(10, 16), [1, 2]), start(1, range(20, 24), [3, 4])])
    batch.apply(read_plan(schedule(plan, (0, 4, False), (1, 4, True))), SESSION)
    return batch


def snapshot(batch: ResidentBatch) -> tuple[object, ...]:
    columns = (batch.live, batch.num_known, batch.num_sampled, batch.num_computed, batch.num_blocks, batch.num_logprobs)
    tables = batch.block_tables[:, : batch.block_tables.any(axis=0).sum()]
    known = tuple(tuple(batch.known_ids(row).tolist()) for row in range(len(batch.live)))
    return *(tuple(c.tolist()) for c in columns), tuple(map(tuple, tables.tolist())), known


def a_good_delta() -> StepPlan:
    """Changes that are fine by themselves: what follows them in the same plan must undo them all."""
    return StepPlan(
        ended_rows=column([1]),
        started=[start(1, [1, 2], [5])],
        appended_rows=column([1, 0, 1]),
        appended_blocks=column([6, 7, 8]),
        copy_rows=column([0]),
        copy_sources=column([2]),
        copy_destinations=column([9]),
    )


def started(**changes: object) -> StartedRow:
    row = start(2, [1, 2, 3], [5])
    for name, value in changes.items():
        setattr(row, name, value)
    return row


def joins(*joined: tuple[int, int]) -> StepPlan:
    """(row, like) of each."""
    return StepPlan(joined=[JoinedRow(row=row, like=like, sampling=sampling()) for row, like in joined])


def fork(parent: int, child: int, tokens: list[int] | None = None, **parameters: float) -> StepPlan:
    plan = StepPlan(fork_parents=column([parent]), fork_children=column([child]))
    plan.fork_sampling.append(sampling(**parameters))
    plan.fork_tokens = column(tokens or [])
    return plan


def with_sampling(parameters: RowSampling) -> StepPlan:
    return StepPlan(started=[start(2, [1, 2, 3], [5], parameters=parameters)])


VIOLATIONS = {
    # the shape of columns
    "a column with a part of an int32": ("ended_rows", StepPlan(ended_rows=b"\0\0\0")),
    "a started row's ids with a part of an int32": (
        "started.token_ids",
        StepPlan(started=[started(token_ids=b"\0" * 5)]),
    ),
    "appended blocks without rows": ("appended_blocks", StepPlan(appended_blocks=column([5]))),
    "copies without destinations": (
        "copy_destinations",
        StepPlan(copy_rows=column([0]), copy_sources=column([1])),
    ),
    "forks without sampling": ("fork_sampling", StepPlan(fork_parents=column([0]), fork_children=column([2]))),
    "more tokens than rows": (
        "scheduled_tokens",
        StepPlan(scheduled_rows=column([0]), scheduled_tokens=column([1, 1])),
    ),
    "a flag that is not 0 or 1": (
        "scheduled_samples",
        StepPlan(scheduled_rows=column([0]), scheduled_tokens=column([1]), scheduled_samples=b"\2"),
    ),
    # rows
    "a foreign row ended": ("ended_rows", StepPlan(ended_rows=column([3]))),
    "a row that does not exist ended": ("ended_rows", StepPlan(ended_rows=column([4]))),
    "a negative row ended": ("ended_rows", StepPlan(ended_rows=column([-1]))),
    "a free row ended": ("ended_rows", StepPlan(ended_rows=column([2]))),
    "a row ended twice": ("ended_rows", StepPlan(ended_rows=column([0, 0]))),
    "a foreign row started": ("started.row", StepPlan(started=[start(3, [1], [5])])),
    "a huge row started": ("started.row", StepPlan(started=[start(2**31 - 1, [1], [5])])),
    "a negative row started": ("started.row", StepPlan(started=[start(-1, [1], [5])])),
    "a live row started": ("started.row", StepPlan(started=[start(0, [1], [5])])),
    "a row started twice": ("started.row", StepPlan(started=[start(2, [1], [5]), start(2, [1], [6])])),
    "a free row appended to": ("appended_rows", StepPlan(appended_rows=column([2]), appended_blocks=column([5]))),
    "a free row scheduled": ("scheduled_rows", schedule(StepPlan(), (2, 1, False))),
    "a foreign row scheduled": ("scheduled_rows", schedule(StepPlan(), (3, 1, False))),
    "a row scheduled after its end": ("scheduled_rows", schedule(StepPlan(ended_rows=column([0])), (0, 1, False))),
    "a row scheduled twice": ("scheduled_rows", schedule(StepPlan(), (0, 1, False), (0, 1, True))),
    # forks
    "a free parent": (
        "fork_parents",
        StepPlan(fork_parents=column([2]), fork_children=column([1]), fork_sampling=[sampling()]),
    ),
    "a foreign parent": (
        "fork_parents",
        StepPlan(fork_parents=column([3]), fork_children=column([2]), fork_sampling=[sampling()]),
    ),
    "a foreign child": (
        "fork_children",
        StepPlan(fork_parents=column([0]), fork_children=column([3]), fork_sampling=[sampling()]),
    ),
    "a child twice": (
        "fork_children",
        StepPlan(fork_parents=column([0, 1]), fork_children=column([2, 2]), fork_sampling=[sampling()] * 2),
    ),
    "a child that ends at once": (
        "fork_children",
        StepPlan(
            fork_parents=column([0]), fork_children=column([2]), fork_sampling=[sampling()], ended_rows=column([2])
        ),
    ),
    "a child with a bad temperature": (
        "fork_sampling.temperature",
        StepPlan(fork_parents=column([0]), fork_children=column([2]), fork_sampling=[sampling(temperature=-1)]),
    ),
    "a child that counts tokens its parent did not": ("fork_sampling", fork(1, 2, presence_penalty=1)),
    "more tokens than children": ("fork_tokens", fork(1, 2, tokens=[5, 6])),
    "tokens without children": ("fork_tokens", StepPlan(fork_tokens=column([5]))),
    "a child's token outside the vocabulary": ("fork_tokens", fork(1, 2, tokens=[100])),
    "a child's negative token": ("fork_tokens", fork(1, 2, tokens=[-1])),
    "another token for a parent that has sampled none": ("fork_tokens", fork(0, 2, tokens=[5])),
    "another token for a child that counts tokens": ("fork_sampling", fork(1, 2, tokens=[5], presence_penalty=1)),
    # joined rows; row 0 has two tokens to compute
    "a joined row that is not scheduled": ("joined.row", schedule(joins((2, 0)), (0, 2, True))),
    "a joined row with tokens": ("joined.row", schedule(joins((2, 0)), (0, 2, True), (2, 1, True))),
    "a joined row that does not sample": ("joined.row", schedule(joins((2, 0)), (0, 2, True), (2, 0, False))),
    "a joined row before its like": ("joined.like", schedule(joins((2, 0)), (2, 0, True), (0, 2, True))),
    "a joined row behind another": (
        "joined.like",
        schedule(joins((2, 0)), (0, 2, True), (1, 1, True), (2, 0, True)),
    ),
    "a like that does not exist": ("joined.like", schedule(joins((2, 4)), (4, 2, True), (2, 0, True))),
    "a negative like": ("joined.like", schedule(joins((2, -1)), (-1, 2, True), (2, 0, True))),
    "a like of another's": ("joined.like", schedule(joins((2, 3)), (3, 2, True), (2, 0, True))),
    "a like that does not sample": ("joined.like", schedule(joins((2, 0)), (0, 1, False), (2, 0, True))),
    "a row joined twice": (
        "joined.row",
        schedule(joins((2, 0), (2, 0)), (0, 2, True), (2, 0, True), (2, 0, True)),
    ),
    "a live row joined": ("joined.row", schedule(joins((1, 0)), (0, 2, True), (1, 0, True))),
    "a foreign row joined": ("joined.row", schedule(joins((3, 0)), (0, 2, True), (3, 0, True))),
    "a row of no tokens that is not joined": ("scheduled_tokens", schedule(StepPlan(), (0, 0, True))),
    "a joined row with a bad temperature": (
        "joined.sampling.temperature",
        schedule(
            StepPlan(joined=[JoinedRow(row=2, like=0, sampling=sampling(temperature=-1))]), (0, 2, True), (2, 0, True)
        ),
    ),
    # blocks
    "the executor's own block": ("started.blocks", StepPlan(started=[start(2, [1], [0])])),
    "a foreign block": ("started.blocks", StepPlan(started=[start(2, [1], [10])])),
    "a block that does not exist": ("started.blocks", StepPlan(started=[start(2, [1], [12])])),
    "a block of 2^31 - 1": ("started.blocks", StepPlan(started=[start(2, [1], [2**31 - 1])])),
    "a block twice in a table": ("started.blocks", StepPlan(started=[start(2, [1], [5, 5])])),
    "more blocks than the model's length": ("started.blocks", StepPlan(started=[start(2, [1], range(1, 8))])),
    "a foreign block appended": ("appended_blocks", StepPlan(appended_rows=column([0]), appended_blocks=column([10]))),
    "a negative block appended": ("appended_blocks", StepPlan(appended_rows=column([0]), appended_blocks=column([-1]))),
    "a table longer than the model": (
        "appended_rows",
        StepPlan(appended_rows=column([0] * 5), appended_blocks=column([5, 6, 7, 8, 9])),
    ),
    "a copy from a foreign block": (
        "copy_sources",
        StepPlan(copy_rows=column([0]), copy_sources=column([10]), copy_destinations=column([5])),
    ),
    "a copy to a foreign block": (
        "copy_destinations",
        StepPlan(copy_rows=column([0]), copy_sources=column([1]), copy_destinations=column([10])),
    ),
    "a copy from a block that is not in the table": (
        "copy_sources",
        StepPlan(copy_rows=column([0]), copy_sources=column([3]), copy_destinations=column([5])),
    ),
    "a copy to a block that is copied from": (
        "copy_destinations",
        StepPlan(copy_rows=column([0, 1]), copy_sources=column([1, 3]), copy_destinations=column([3, 5])),
    ),
    "two copies to one block": (
        "copy_destinations",
        StepPlan(copy_rows=column([0, 1]), copy_sources=column([1, 3]), copy_destinations=column([5, 5])),
    ),
    "one entry replaced twice": (
        "copy_rows",
        StepPlan(copy_rows=column([0, 0]), copy_sources=column([1, 1]), copy_destinations=column([5, 6])),
    ),
    # tokens
    "no tokens": ("started.token_ids", StepPlan(started=[started(token_ids=b"")])),
    "more tokens than the model's length": ("started.token_ids", StepPlan(started=[start(2, [1] * 25, [5])])),
    "a token outside the vocabulary": ("started.token_ids", StepPlan(started=[start(2, [1, 100], [5])])),
    "a negative token": ("started.token_ids", StepPlan(started=[start(2, [1, -1], [5])])),
    "no prompt": ("started.num_prompt_tokens", StepPlan(started=[started(num_prompt_tokens=0)])),
    "more prompt than tokens": ("started.num_prompt_tokens", StepPlan(started=[started(num_prompt_tokens=4)])),
    "nothing left to compute": ("started.num_computed_tokens", StepPlan(started=[started(num_computed_tokens=3)])),
    "computed tokens without blocks": ("started.blocks", StepPlan(started=[start(2, [1] * 6, [5], num_computed=5)])),
    "zero tokens scheduled": ("scheduled_tokens", schedule(StepPlan(), (0, 0, False))),
    "negative tokens scheduled": ("scheduled_tokens", schedule(StepPlan(), (0, -1, False))),
    "more tokens than exist": ("scheduled_tokens", schedule(StepPlan(), (0, 3, True))),
    "a second token past what was sampled": ("scheduled_tokens", schedule(StepPlan(), (1, 2, True))),
    "2^31 - 1 tokens": ("scheduled_tokens", schedule(StepPlan(), (0, 2**31 - 1, True))),
    "more tokens than the lease": (
        "scheduled_tokens",
        schedule(StepPlan(started=[start(2, [1] * 17, [5, 6, 7, 8, 9])]), (2, 17, True)),
    ),
    "more tokens than slots": ("scheduled_tokens", schedule(StepPlan(started=[start(2, [1] * 5, [5])]), (2, 5, True))),
    "a token past the model's length": (
        "scheduled_tokens",
        schedule(StepPlan(started=[start(2, [1] * 24, range(4, 10), num_computed=20)]), (2, 4, True)),
    ),
    "a sample before the last known token": ("scheduled_samples", schedule(StepPlan(), (0, 1, True))),
    # sampling
    "a negative temperature": ("started.sampling.temperature", with_sampling(sampling(temperature=-0.1))),
    "a temperature that is no number": ("started.sampling.temperature", with_sampling(sampling(temperature=math.nan))),
    "an infinite temperature": ("started.sampling.temperature", with_sampling(sampling(temperature=math.inf))),
    "top_p 0": ("started.sampling.top_p", with_sampling(sampling(top_p=0))),
    "top_p above 1": ("started.sampling.top_p", with_sampling(sampling(top_p=1.5))),
    "min_p above 1": ("started.sampling.min_p", with_sampling(sampling(min_p=1.5))),
    "repetition_penalty 0": ("started.sampling.repetition_penalty", with_sampling(sampling(repetition_penalty=0))),
    "presence_penalty 3": ("started.sampling.presence_penalty", with_sampling(sampling(presence_penalty=3))),
    "frequency_penalty -3": ("started.sampling.frequency_penalty", with_sampling(sampling(frequency_penalty=-3))),
    "an end token outside the vocabulary": (
        "started.sampling.end_token_ids",
        with_sampling(sampling(end_token_ids=[100])),
    ),
    **{
        name: (f"started.sampling.{column}", with_sampling(sampling(**rule_columns(**good) | bad)))
        for name, column, good, bad in [
            ("a bias on an id that is not there", "bias_ids", {"bias": {100: 1.0}}, {}),
            ("a bias on a negative id", "bias_ids", {"bias": {-1: 1.0}}, {}),
            ("two biases on one id", "bias_ids", {}, {"bias_ids": column([7, 7]), "biases": bytes(8)}),
            ("more biases than any request has", "bias_ids", {}, {"bias_ids": column(range(1025))}),
            ("ids without biases", "biases", {}, {"bias_ids": column([7])}),
            ("biases without ids", "biases", {}, {"biases": bytes(4)}),
            ("a bias that is no number", "biases", {"bias": {7: math.nan}}, {}),
            ("an infinite bias", "biases", {"bias": {7: -math.inf}}, {}),
            ("a bias beyond its range", "biases", {"bias": {7: 10001.0}}, {}),
            ("an allowed id that is not there", "allowed_ids", {"allowed": [5, 100]}, {}),
            ("more allowed ids than any request has", "allowed_ids", {"allowed": [5] * 4097}, {}),
            ("a part of an allowed id", "allowed_ids", {}, {"allowed_ids": b"\0\0\0"}),
            ("a banned id that is not there", "banned_ids", {"banned": [[5, 100]]}, {}),
            ("a banned sequence of nothing", "banned_lengths", {"banned": [[5], []]}, {}),
            ("a banned sequence that is too long", "banned_lengths", {"banned": [[5] * 17]}, {}),
            ("a negative length", "banned_lengths", {"banned": [[5]]}, {"banned_lengths": column([2, -1])}),
            ("too many banned sequences", "banned_lengths", {"banned": [[5]] * 513}, {}),
            ("lengths that add up to more", "banned_lengths", {"banned": [[5]]}, {"banned_lengths": column([2])}),
            ("lengths of no sequence", "banned_lengths", {}, {"banned_lengths": column([1])}),
        ]
    },
    "more log-probabilities than ids": ("started.sampling.logprobs", with_sampling(sampling(logprobs=101))),
    "sampling that was not set": ("started.sampling.top_p", with_sampling(RowSampling())),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_is_refused_by_name_and_leaves_no_trace(name: str, batch: ResidentBatch) -> None:
    place, plan = VIOLATIONS[name]
    before = snapshot(batch)
    with pytest.raises(PlanViolation) as refusal:
        batch.apply(read_plan(plan), SESSION)
    assert refusal.value.column == place
    assert snapshot(batch) == before


@pytest.mark.parametrize("last", ["scheduled twice", "table too long", "foreign copy"])
def test_good_changes_before_the_violation_are_undone(last: str, batch: ResidentBatch) -> None:
    plan = a_good_delta()
    if last == "scheduled twice":
        schedule(plan, (0, 1, False), (0, 1, False))
    elif last == "table too long":
        plan.appended_rows += column([1] * 4)
        plan.appended_blocks += column([5] * 4)
    else:
        plan.copy_rows += column([1])
        plan.copy_sources += column([11])
        plan.copy_destinations += column([4])
    before = snapshot(batch)
    with pytest.raises(PlanViolation):
        batch.apply(read_plan(plan), SESSION)
    assert snapshot(batch) == before
    batch.apply(read_plan(a_good_delta()), SESSION)
    assert batch.block_tables[0, :3].tolist() == [1, 9, 7]
    assert batch.block_tables[1, :3].tolist() == [5, 6, 8]


def test_a_row_may_use_all_of_the_models_length(batch: ResidentBatch) -> None:
    plan = StepPlan(started=[start(2, [1] * 23, range(4, 10), num_computed=20)])
    batch.apply(read_plan(schedule(plan, (2, 3, True))), SESSION)
    assert batch.num_sampled[2] == 1
    batch.apply(read_plan(schedule(StepPlan(), (2, 1, False))), SESSION)
    assert batch.num_computed[2] == 24


def test_an_empty_plan_changes_nothing(batch: ResidentBatch) -> None:
    before = snapshot(batch)
    applied = batch.apply(read_plan(StepPlan()), SESSION)
    assert not applied.needs_step
    assert snapshot(batch) == before


def test_a_session_ends_with_its_rows_and_no_others(batch: ResidentBatch) -> None:
    assert batch.end_rows_of(2).tolist() == []
    assert batch.end_rows_of(SESSION).tolist() == [0, 1]
    assert not batch.live.any()
    assert not batch.block_tables.any()


def test_a_slot_number_may_pass_32_bits() -> None:
    from executor_svc.leases import Ownership
    from executor_svc.plan_checks import Limits

    block = (1 << 23) + 1
    ownership = Ownership(2, block + 1, 16)
    lease = Lease(np.array([block], np.int32), np.array([0], np.int32), 16)
    ownership.lend(SESSION, lease)
    batch = ResidentBatch(ownership, Limits(vocab_size=10, max_model_len=1000, block_size=300))
    plan = schedule(StepPlan(started=[start(0, [1, 2, 3], [block])]), (0, 3, True))
    step = batch.apply(read_plan(plan), SESSION).step
    assert step.slots.tolist() == [block * 300, block * 300 + 1, block * 300 + 2]


def test_a_plan_that_names_a_row_many_times_takes_no_memory_for_each() -> None:
    batch = make_batch(num_blocks=2100, block_size=1, max_model_len=4096)
    plan = StepPlan(started=[start(0, [1] * 2000, range(1, 2001)), start(1, [1], [2001])])
    batch.apply(read_plan(schedule(plan, (0, 1, False))), SESSION)
    hostile = StepPlan(ended_rows=column([1]), appended_rows=column([0] * 50_000), appended_blocks=column([5] * 50_000))
    tracemalloc.start()
    with pytest.raises(PlanViolation):
        batch.apply(read_plan(hostile), SESSION)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50 << 20, "50,000 rows of 2,048 entries would be 400 MB"


def test_another_token_replaces_one_that_is_sampled_and_not_computed(
    batch: ResidentBatch,
) -> None:
    batch.apply(read_plan(schedule(fork(1, 2, tokens=[5]), (2, 1, True))), SESSION)
    assert (batch.num_computed[2], batch.num_sampled[2]) == (5, 2)
    batch.apply(read_plan(schedule(StepPlan(), (1, 1, False))), SESSION)
    with pytest.raises(PlanViolation, match="fork_tokens: of row 1; its last token must be sampled, and not computed"):
        batch.apply(read_plan(fork(1, 2, tokens=[5])), SESSION)


def test_a_row_with_a_penalty_forks_to_others_with_one_and_with_no_other_token(
    batch: ResidentBatch,
) -> None:
    plan = StepPlan(started=[start(2, [1, 2], [5], parameters=sampling(frequency_penalty=1))])
    batch.apply(read_plan(schedule(plan, (2, 2, True))), SESSION)
    batch.apply(read_plan(fork(2, 0, repetition_penalty=2)), SESSION)
    with pytest.raises(PlanViolation, match="fork_tokens: of row 0; has a penalty"):
        batch.apply(read_plan(fork(2, 0, tokens=[5], presence_penalty=1)), SESSION)
    batch.apply(read_plan(fork(2, 0, tokens=[5])), SESSION)
    with pytest.raises(PlanViolation, match="fork_sampling: a penalty in row 1; its parent, row 0, has none"):
        batch.apply(read_plan(fork(0, 1, presence_penalty=1)), SESSION)
