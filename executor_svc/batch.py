"""The resident batch: what the executor knows of each row, changed by plans and by nothing else."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from executor_svc.applied_plan import AppliedPlan, Forks, RowChanges
from executor_svc.fork_checks import check_past, check_replaced, remembered
from executor_svc.joining import read_joined
from executor_svc.leases import Lease, Ownership
from executor_svc.masking import read_masks
from executor_svc.plan import PlanColumns, PlanViolation, read_int32s
from executor_svc.plan_checks import (
    Limits,
    check_disjoint,
    check_in_range,
    check_live,
    check_owned,
    check_sampling,
    check_started,
    check_token_ids,
    check_unique,
)
from executor_svc.return_checks import check_returned
from executor_svc.schedule_check import Schedule
from executor_svc.scoring import find_scored
from executor_svc.shared_segments import MIN_SAVED_TOKENS, SegmentFinder
from executor_svc.step import Int32s, RowStart, SharedSegments
from executor_svc.step_builder import build_step
from paged.v1 import executor_pb2

_EMPTY = np.empty(0, np.int32)
(
    _LIVE,
    _NUM_KNOWN,
    _NUM_SAMPLED,
    _NUM_COMPUTED,
    _NUM_BLOCKS,
    _NUM_LOGPROBS,
    _REMEMBERED,
    _NUM_PROMPT,
    _NUM_SCORED,
) = range(9)
NO_LOGPROBS = -1
_FIRST_TABLE_WIDTH = 16


class ResidentBatch:
    """Rows of all sessions, as columns indexed by row.

    A live row has `num_known` token ids that came with its start and `num_sampled` tokens drawn since, of which the
    first `num_computed` have K/V in the blocks of its table. Table entries past `num_blocks` are 0.
    """

    def __init__(self, ownership: Ownership, limits: Limits, *, min_saved_tokens: int = MIN_SAVED_TOKENS) -> None:
        num_rows = len(ownership.of_row)
        self._ownership = ownership
        self._limits = limits
        self._state = np.zeros((9, num_rows), np.int32)
        self._has_scored = False  # whether any row has ever asked for its prompt's log-probabilities
        self._tables = np.zeros((num_rows, min(_FIRST_TABLE_WIDTH, limits.blocks_per_row)), np.int32)
        self._known: list[Int32s] = [_EMPTY] * num_rows
        self._segments = SegmentFinder(num_rows, limits.block_size, min_saved_tokens)
        self._seen_at = np.zeros(num_rows, np.int32)  # scratch of _repeated: where a row was last seen

    @property
    def block_size(self) -> int:
        return self._limits.block_size

    @property
    def max_model_len(self) -> int:
        return self._limits.max_model_len

    @property
    def rope_switch_len(self) -> int:
        return self._limits.rope_switch_len

    @property
    def live(self) -> NDArray[np.bool_]:
        return self._state[_LIVE].astype(np.bool_)

    @property
    def num_known(self) -> Int32s:
        return self._state[_NUM_KNOWN]

    @property
    def num_sampled(self) -> Int32s:
        return self._state[_NUM_SAMPLED]

    @property
    def num_computed(self) -> Int32s:
        return self._state[_NUM_COMPUTED]

    @property
    def num_blocks(self) -> Int32s:
        return self._state[_NUM_BLOCKS]

    @property
    def num_logprobs(self) -> Int32s:
        """Alternatives that a row reports for each token; NO_LOGPROBS where it reports nothing."""
        return self._state[_NUM_LOGPROBS]

    @property
    def block_tables(self) -> Int32s:
        """[num_rows, widest table so far]."""
        return self._tables

    def known_ids(self, row: int) -> Int32s:
        """Token ids that came with the row's start."""
        return self._known[row]

    def shared_segments(self, rows: Int32s, num_tokens: Int32s, context_lens: Int32s) -> SharedSegments | None:
        """Of a step in which these rows compute so many tokens, and have `context_lens` after it."""
        return self._segments.find(rows, num_tokens, context_lens, self._tables, self.num_blocks)

    def end_rows_of(self, session: int) -> Int32s:
        """End all rows of a session. Returns those that were live."""
        rows = np.flatnonzero((self._ownership.of_row == session) & self.live).astype(np.int32)
        self._clear(rows)
        return rows

    def owns_blocks(self, session: int, blocks: Int32s) -> bool:
        """Whether every one of these ids is of a block that is lent to the session."""
        return self._ownership.owns_blocks(session, blocks)

    def check_returned(self, returned: Lease, session: int) -> None:
        """Raises PlanViolation unless all of it is the session's, each once, and none of it is in use."""
        check_returned(returned, session, self._ownership, self.live, self._tables)

    def clear(self) -> None:
        """No row is live."""
        self._clear(np.arange(self._state.shape[1], dtype=np.int32))

    def apply(self, plan: PlanColumns, session: int) -> AppliedPlan:
        """Take a plan's changes in their stated order. Raises PlanViolation, and then nothing has changed."""
        if plan.moves_rows or len(plan.copy_rows):
            return self._apply_or_restore(plan, session)
        places = self._append(plan, session)
        try:
            return self._run_schedule(plan, session, [])
        except PlanViolation:
            self._take_off(plan.appended_rows, places)
            raise

    def advance(self, rows: Int32s, num_computed: Int32s, num_steps: int, tables: Int32s) -> None:
        """Catch up with decode steps in which each of these rows has drawn a token, without a block to spare."""
        self._state[_NUM_COMPUTED, rows] = num_computed
        self._state[_NUM_SAMPLED, rows] += num_steps
        self._state[_NUM_BLOCKS, rows] = -(-num_computed // self.block_size)
        self._segments.grown(rows)
        self._grow_tables(tables.shape[1])
        self._tables[rows, : tables.shape[1]] = tables

    def _apply_or_restore(self, plan: PlanColumns, session: int) -> AppliedPlan:
        touched = self._touched_rows(plan, session)
        state, tables = self._state[:, touched], self._tables[touched]
        known = [self._known[row] for row in touched]
        try:
            self._fork(plan, session)
            self._end(plan)
            starts = [self._start(started, session) for started in plan.started]
            self._append(plan, session)
            self._copy(plan, session)
            return self._run_schedule(plan, session, starts)
        except PlanViolation:
            self._segments.changed(touched)
            self._state[:, touched] = state
            self._tables[touched, tables.shape[1] :] = 0  # tables may have grown in between
            self._tables[touched, : tables.shape[1]] = tables
            for row, ids in zip(touched, known, strict=True):
                self._known[row] = ids
            raise

    def _touched_rows(self, plan: PlanColumns, session: int) -> Int32s:
        """Rows that change before the schedule is looked at, each once, all of them the session's."""
        columns = {
            "fork_children": plan.fork_children,
            "ended_rows": plan.ended_rows,
            "started.row": np.array([started.row for started in plan.started], np.int32),
            "joined.row": np.array([joined.row for joined in plan.joined], np.int32),
            "appended_rows": plan.appended_rows,
            "copy_rows": plan.copy_rows,
        }
        for column, rows in columns.items():
            check_owned(column, rows, self._ownership.of_row, session)
        return np.unique(np.concatenate(list(columns.values())))

    def _run_schedule(self, plan: PlanColumns, session: int, starts: list[RowStart]) -> AppliedPlan:
        joining = read_joined(plan)
        computing = joining.computing
        self._check_joined(joining.forks, session)
        masks = read_masks(plan, self._limits.vocab_size)
        first, ends, known = self._schedule(computing, session)
        self._copy_rows(joining.forks)
        step = build_step(computing, first, ends, known, self._tables, self._known, self.block_size)
        step.draws, step.masks = joining.draws, masks
        step.shared = self.shared_segments(step.rows, computing.scheduled_tokens, ends)
        if self._has_scored:
            num_prompt, num_top = self._state[[_NUM_PROMPT, _NUM_SCORED]]
            step.scored = find_scored(step, first, ends, self._known, num_prompt, num_top)
        forks = Forks(plan.fork_parents, plan.fork_children, plan.fork_sampling, plan.fork_tokens)
        return AppliedPlan(RowChanges(forks, plan.ended_rows, starts, joining.forks), step)

    def _fork(self, plan: PlanColumns, session: int) -> None:
        parents, children = plan.fork_parents, plan.fork_children
        if not len(children):
            return
        check_owned("fork_parents", parents, self._ownership.of_row, session)
        check_live("fork_parents", parents, self._state[_LIVE])
        check_unique("fork_children", children)
        check_disjoint("fork_children", children, "ended_rows", plan.ended_rows)
        for sampling in plan.fork_sampling:
            check_sampling("fork_sampling", sampling, self._limits)
        forks = Forks(parents, children, plan.fork_sampling, plan.fork_tokens)
        check_past("fork_sampling", forks, self._state[_REMEMBERED])
        if forks.tokens is not None:
            check_token_ids("fork_tokens", forks.tokens, self._limits)
            check_replaced(forks, self.num_known + self.num_sampled, self.num_sampled, self.num_computed)
        self._copy_rows(forks)

    def _check_joined(self, forks: Forks, session: int) -> None:
        """Their likes are scheduled: whether they may be, is checked there."""
        check_owned("joined.like", forks.parents, self._ownership.of_row, session)
        check_unique("joined.row", forks.children)
        if (live := self._state[_LIVE].take(forks.children)).any():
            raise PlanViolation("joined.row", f"row {forks.children[live.argmax()]}", "is live already")
        for sampling in forks.sampling:
            check_sampling("joined.sampling", sampling, self._limits)
        check_past("joined.sampling", forks, self._state[_REMEMBERED])

    def _copy_rows(self, forks: Forks) -> None:
        if not len(forks.children):
            return
        # Right-hand sides are copies: a child that is a parent too hands on what it was before.
        self._state[:, forks.children] = self._state[:, forks.parents]
        self._tables[forks.children] = self._tables[forks.parents]
        self._segments.changed(forks.children)
        known = [self._known[parent] for parent in forks.parents]
        for child, ids, sampling in zip(forks.children, known, forks.sampling, strict=True):
            self._known[child] = ids
            self._state[_NUM_LOGPROBS, child] = _wanted(sampling, "logprobs")
            self._state[_REMEMBERED, child] = remembered(sampling)
            self._state[_NUM_SCORED, child] = self._wanted_scored(sampling)

    def _end(self, plan: PlanColumns) -> None:
        if len(plan.ended_rows):
            check_unique("ended_rows", plan.ended_rows)
            check_live("ended_rows", plan.ended_rows, self._state[_LIVE])
            self._clear(plan.ended_rows)

    def _start(self, started: executor_pb2.StartedRow, session: int) -> RowStart:
        row = started.row
        if self._state[_LIVE, row]:
            raise PlanViolation("started.row", f"row {row}", "is live already")
        token_ids = read_int32s("started.token_ids", started.token_ids)
        blocks = read_int32s("started.blocks", started.blocks)
        check_started(started, token_ids, blocks, self._limits)
        check_owned("started.blocks", blocks, self._ownership.of_block, session)
        check_sampling("started.sampling", started.sampling, self._limits)
        self._grow_tables(len(blocks))
        self._tables[row, : len(blocks)] = blocks
        self._segments.changed([row])
        self._known[row] = token_ids
        self._state[:, row] = (
            1,
            len(token_ids),
            0,
            started.num_computed_tokens,
            len(blocks),
            _wanted(started.sampling, "logprobs"),
            remembered(started.sampling),
            started.num_prompt_tokens,
            self._wanted_scored(started.sampling),
        )
        return RowStart(row, token_ids, started.num_prompt_tokens, started.sampling)

    def _append(self, plan: PlanColumns, session: int) -> Int32s:
        """Returns the place in its row's table that each block was put at."""
        rows, blocks = plan.appended_rows, plan.appended_blocks
        if not len(rows):
            return _EMPTY
        check_owned("appended_rows", rows, self._ownership.of_row, session)
        check_live("appended_rows", rows, self._state[_LIVE])
        check_owned("appended_blocks", blocks, self._ownership.of_block, session)
        places = self.num_blocks.take(rows)
        if self._repeated(rows).any():
            places += _rank_among_equals(rows)
        width, limit = int(places.max()) + 1, self._limits.blocks_per_row
        if width > limit:
            raise PlanViolation("appended_rows", f"row {rows[places.argmax()]}", f"may have {limit} blocks at most")
        self._grow_tables(width)
        self._segments.grown(rows)
        self._tables[rows, places] = blocks
        self._state[_NUM_BLOCKS, rows] = places + 1  # of equal rows the last one counts
        return places

    def _take_off(self, rows: Int32s, places: Int32s) -> None:
        """Undo an append."""
        self._tables[rows, places] = 0
        self._state[_NUM_BLOCKS, rows[::-1]] = places[::-1]  # of equal rows the first one counts

    def _copy(self, plan: PlanColumns, session: int) -> None:
        rows, sources, destinations = plan.copy_rows, plan.copy_sources, plan.copy_destinations
        if not len(rows):
            return
        check_live("copy_rows", rows, self._state[_LIVE])
        check_owned("copy_sources", sources, self._ownership.of_block, session)
        check_owned("copy_destinations", destinations, self._ownership.of_block, session)
        check_unique("copy_destinations", destinations)
        check_disjoint("copy_destinations", destinations, "copy_sources", sources)
        places = np.array([self._place_of(row, block) for row, block in zip(rows, sources, strict=True)], np.int64)
        if len(rows) > 1 and len(np.unique(np.stack([rows, places]), axis=1).T) < len(rows):
            raise PlanViolation("copy_rows", "the same entry twice", "may be replaced once")
        self._tables[rows, places] = destinations
        self._segments.changed(rows)

    def _place_of(self, row: np.int32, block: np.int32) -> int:
        """Where the row's table names the block. Row by row: all tables at once can be more than memory holds."""
        found = (self._tables[row] == block).nonzero()[0]
        if not len(found):
            raise PlanViolation("copy_sources", f"block {block}", f"is not in the table of row {row}")
        return int(found[0])

    def _schedule(self, plan: PlanColumns, session: int) -> tuple[Int32s, Int32s, Int32s]:
        """Check the schedule against the rows as they are now, then advance them.

        Returns first positions, ends and numbers of known ids.
        """
        rows, tokens, samples = plan.scheduled_rows, plan.scheduled_tokens, plan.scheduled_samples
        if not len(rows):
            return _EMPTY, _EMPTY, _EMPTY
        check_in_range("scheduled_rows", rows, len(self._known))
        total = int(tokens.sum(dtype=np.int64))
        budget = self._ownership.held_by(session).tokens
        if total > budget:
            raise PlanViolation("scheduled_tokens", f"{total} in all", f"the lease has {budget} a step")
        live, known, sampled, first, blocks = self._state[:_NUM_LOGPROBS].take(rows, axis=1)
        exist = known + sampled
        schedule = Schedule(
            rows=rows,
            tokens=tokens,
            samples=samples,
            foreign=self._ownership.of_row.take(rows) != session,
            repeated=self._repeated(rows),
            dead=live == 0,
            first=first,
            end=first + tokens,
            known=known,
            exist=exist,
            slots=blocks * self.block_size,
        )
        schedule.check(self._limits)
        self._state[_NUM_COMPUTED, rows] = schedule.end
        self._state[_NUM_SAMPLED, rows] = sampled + samples
        return first, schedule.end, known

    def _repeated(self, rows: Int32s) -> NDArray[np.bool_]:
        """Which entries name a row that comes again further on. Every row is in range."""
        places = np.arange(len(rows), dtype=np.int32)
        self._seen_at[rows] = places
        return self._seen_at.take(rows) != places

    def _grow_tables(self, width: int) -> None:
        old = self._tables.shape[1]
        if width > old:
            wider = np.zeros((len(self._tables), min(max(width, 2 * old), self._limits.blocks_per_row)), np.int32)
            wider[:, :old] = self._tables
            self._tables = wider

    def _wanted_scored(self, sampling: executor_pb2.RowSampling) -> int:
        wanted = _wanted(sampling, "prompt_logprobs")
        self._has_scored |= wanted != NO_LOGPROBS
        return wanted

    def _clear(self, rows: Int32s) -> None:
        self._state[:, rows] = 0
        self._tables[rows] = 0
        self._segments.changed(rows)
        for row in rows:
            self._known[row] = _EMPTY


def _wanted(sampling: executor_pb2.RowSampling, name: Literal["logprobs", "prompt_logprobs"]) -> int:
    """How many alternatives, or NO_LOGPROBS."""
    return getattr(sampling, name) if sampling.HasField(name) else NO_LOGPROBS


def _rank_among_equals(rows: Int32s) -> Int32s:
    """For each entry, how many entries of the same row come before it."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    places = np.arange(len(rows), dtype=np.int32)
    ranks = np.empty(len(rows), np.int32)
    ranks[order] = places - np.maximum.accumulate(np.where(first, places, 0))
    return ranks
