"""The resident batch does what plain dicts and lists do, whatever legal plans come."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given, settings

from executor_svc.batch import ResidentBatch
from executor_svc.plan import read_plan
from paged.v1.executor_pb2 import StepPlan
from tests.executor.plans import SESSION, column, make_batch, sampling, start
from tests.executor.segments import as_set, naive_segments

BLOCK_SIZE = 4
NUM_ROWS = 5  # the session's; the fixture has one more
NUM_BLOCKS = 40
MAX_MODEL_LEN = 40
TOKENS_PER_STEP = 16
MIN_SAVED = 3


@dataclass
class NaiveRow:
    tokens: list[int]  # -1 for each that was sampled
    computed: int
    blocks: list[int]

    def copy(self) -> "NaiveRow":
        return NaiveRow(list(self.tokens), self.computed, list(self.blocks))


@dataclass
class Naive:
    """What a plan means, row by row. `next_block` hands out block ids, each one once while they last."""

    rows: dict[int, NaiveRow] = field(default_factory=dict)
    next_block: int = 0

    def blocks(self, count: int) -> list[int]:
        taken = [1 + (self.next_block + i) % (NUM_BLOCKS - 3) for i in range(count)]
        self.next_block += count
        return taken


@dataclass
class ExpectedStep:
    rows: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


def draw_rows(data: st.DataObject, rows: list[int], label: str) -> list[int]:
    return data.draw(st.lists(st.sampled_from(rows), unique=True, max_size=3), label) if rows else []


def draw_deltas(data: st.DataObject, naive: Naive, expected: ExpectedStep) -> StepPlan:
    """Forks, ends, starts, appends and copies, applied to `naive` in that order."""
    plan = StepPlan()
    before = {row: state.copy() for row, state in naive.rows.items()}
    children = draw_rows(data, list(range(NUM_ROWS)), "children") if before else []
    parents = [data.draw(st.sampled_from(sorted(before)), "parent") for _ in children]
    plan.fork_parents, plan.fork_children = column(parents), column(children)
    plan.fork_sampling.extend(sampling(index=i) for i in range(len(children)))
    naive.rows.update({child: before[parent].copy() for child, parent in zip(children, parents, strict=True)})

    ended = draw_rows(data, [row for row in naive.rows if row not in children], "ended")
    plan.ended_rows = column(ended)
    for row in ended:
        del naive.rows[row]

    for row in draw_rows(data, [row for row in range(NUM_ROWS) if row not in naive.rows], "started"):
        ids = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=12), "ids")
        computed = data.draw(st.integers(0, len(ids) - 1), "computed")
        blocks = naive.blocks(data.draw(st.integers(-(-computed // BLOCK_SIZE), 3), "blocks"))
        plan.started.append(start(row, ids, blocks, num_computed=computed))
        naive.rows[row] = NaiveRow(ids, computed, blocks)

    appended = data.draw(st.lists(st.sampled_from(sorted(naive.rows)), max_size=6), "appended") if naive.rows else []
    appended = [row for row in appended if len(naive.rows[row].blocks) < 3]
    new_blocks = naive.blocks(len(appended))
    plan.appended_rows, plan.appended_blocks = column(appended), column(new_blocks)
    for row, block in zip(appended, new_blocks, strict=True):
        naive.rows[row].blocks.append(block)
    draw_copies(data, naive, plan, expected)
    return plan


def draw_copies(data: st.DataObject, naive: Naive, plan: StepPlan, expected: ExpectedStep) -> None:
    rows = draw_rows(data, [row for row in sorted(naive.rows) if naive.rows[row].blocks], "copied")
    for row in rows:
        blocks = naive.rows[row].blocks
        source = data.draw(st.sampled_from(blocks), "source")
        sources = {pair[0] for pair in expected.copies} | {source}
        taken = sources | {pair[1] for pair in expected.copies}
        destination = next(block for block in naive.blocks(NUM_BLOCKS) if block not in taken)
        if source in {pair[1] for pair in expected.copies}:
            continue
        expected.copies.append((source, destination))
        plan.copy_rows += column([row])
        plan.copy_sources += column([source])
        plan.copy_destinations += column([destination])
        blocks[blocks.index(source)] = destination


def draw_schedule(data: st.DataObject, naive: Naive, plan: StepPlan, expected: ExpectedStep) -> None:
    left = TOKENS_PER_STEP
    for row in draw_rows(data, sorted(naive.rows), "scheduled"):
        state = naive.rows[row]
        most = min(left, len(state.tokens) - state.computed, len(state.blocks) * BLOCK_SIZE - state.computed)
        if most < 1:
            continue
        count = data.draw(st.integers(1, most), "tokens")
        end = state.computed + count
        may_sample = end == len(state.tokens) and end < MAX_MODEL_LEN
        samples = may_sample and data.draw(st.booleans(), "samples")
        left -= count
        plan.scheduled_rows += column([row])
        plan.scheduled_tokens += column([count])
        plan.scheduled_samples += bytes([samples])
        positions = range(state.computed, end)
        expected.rows.append(row)
        expected.positions += positions
        expected.ids += [state.tokens[p] for p in positions]
        expected.slots += [state.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]
        expected.contexts.append(end)
        expected.tables.append(list(state.blocks))
        state.computed = end
        state.tokens = [*state.tokens, -1] if samples else state.tokens


def check_rows(batch: ResidentBatch, naive: Naive) -> None:
    assert [int(row) for row in batch.live.nonzero()[0]] == sorted(naive.rows)
    for row, state in naive.rows.items():
        assert batch.num_known[row] + batch.num_sampled[row] == len(state.tokens)
        assert batch.num_computed[row] == state.computed
        assert batch.block_tables[row].tolist()[: len(state.blocks)] == state.blocks
        assert not batch.block_tables[row, len(state.blocks) :].any()
    for row in set(range(NUM_ROWS)) - naive.rows.keys():
        assert not batch.block_tables[row].any()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rows_and_steps_are_what_plain_lists_say(data: st.DataObject) -> None:
    batch = make_batch(
        num_rows=NUM_ROWS + 1,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        min_saved_tokens=MIN_SAVED,
    )
    naive = Naive()
    for _ in range(data.draw(st.integers(1, 6), "plans")):
        expected = ExpectedStep()
        plan = draw_deltas(data, naive, expected)
        draw_schedule(data, naive, plan, expected)
        applied = batch.apply(read_plan(plan), SESSION)
        check_rows(batch, naive)
        if not applied.needs_step:
            assert not expected.rows
            assert not expected.copies
            continue
        step = applied.step
        assert step.rows.tolist() == expected.rows
        assert step.token_ids.tolist() == expected.ids
        assert step.positions.tolist() == expected.positions
        assert step.slots.tolist() == expected.slots
        assert step.context_lens.tolist() == expected.contexts
        assert step.query_start[-1] == len(expected.ids)
        assert as_set(step.shared) == naive_segments(
            {row: state.blocks for row, state in naive.rows.items()},
            expected.rows,
            step.query_start[1:] - step.query_start[:-1],
            expected.contexts,
            block_size=BLOCK_SIZE,
            min_saved=MIN_SAVED,
        )
        for i, table in enumerate(expected.tables):
            used = -(-expected.contexts[i] // BLOCK_SIZE)
            assert step.block_tables[i, :used].tolist() == table[:used]
        assert list(zip(step.copy_sources.tolist(), step.copy_destinations.tolist(), strict=True)) == expected.copies
