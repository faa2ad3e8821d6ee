"""What the samples of one request share: the blocks of their prompt, until one of them writes.

The first sample computes the prompt alone while the others are held. In the plan that computes its last token they
join: rows of their own, the same blocks with one more reference each, a token each from the same logits. From then on
they are sequences like any other. If the prompt ends inside a block, that block is written by all of them next: each
but the last takes a copy first.
"""

import numpy as np

from scheduler_svc.core.masking import Masking
from scheduler_svc.core.plan import MAX_SENT, Copies, JoinedRow
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.state import CoreState


class Sharing:
    """Joins held samples, and copies what more than one of them would write."""

    def __init__(self, state: CoreState, masking: Masking) -> None:
        self._state = state
        self._masking = masking

    def copy_on_write(self, rows: np.ndarray) -> Copies:
        """Give each of these rows whose next position lies in a block of several a copy of its own; the last holder
        keeps the original. The caller has seen to it that there are enough blocks."""
        copies = Copies([], [], [])
        columns, pool = self._state.columns, self._state.cache.pool
        if not columns.num_sharing:
            return copies
        for row in rows[columns.shares_tail[rows]].tolist():
            entry = self._tail_entry(row)
            source = int(columns.block_table[row, entry])
            columns.set_sharing(row, False)
            if pool.ref_count[source] > 1:
                (destination,) = pool.allocate(1)
                columns.block_table[row, entry] = destination
                pool.release([source])
                copies.rows.append(row)
                copies.sources.append(source)
                copies.destinations.append(destination)
        return copies

    def copies_ahead(self) -> int:
        """Blocks that `copy_on_write` could come to need."""
        columns = self._state.columns
        if not columns.num_sharing:
            return 0
        holders: dict[int, int] = {}
        for row in np.flatnonzero(columns.shares_tail).tolist():
            block = int(columns.block_table[row, self._tail_entry(row)])
            holders[block] = holders.get(block, 0) + 1
        # Who has the block besides them, and will not write again, is no less a holder.
        return sum(min(count, self._state.cache.pool.ref_count[block] - 1) for block, count in holders.items())

    def join(self, sampling_rows: set[int], spare_blocks: int) -> dict[int, list[JoinedRow]]:
        """The held samples of each sequence in `sampling_rows`, which has just computed its prompt. Those for which
        there is no row, no block, or no room in the plan for their rules wait in the queue. Returns joined rows by the
        row that they are like."""
        leaders, self._state.leaders = self._state.leaders, []
        joined: dict[int, list[JoinedRow]] = {}
        num_sent = 0
        for leader in leaders:
            if leader.state is not State.RUNNING:
                continue  # its samples wait with it, or by themselves
            if leader.row not in sampling_rows:
                self._state.leaders.append(leader)
                continue
            leader.held = [sample for sample in leader.held if sample.state is State.HELD]  # not those cancelled
            goes_on = self._goes_on(leader)
            room = min(self._state.columns.num_free_rows, spare_blocks if goes_on else len(leader.held))
            room = 0 if leader.alone else max(room, 0)
            if leader.masked:
                room = min(room, self._masking.room(leader))
            if own := leader.sampling.rules.num_sent:
                room = min(room, (MAX_SENT - num_sent) // own)
                num_sent += own * min(room, len(leader.held))
            joining, leader.held = leader.held[:room], leader.held[room:]
            spare_blocks -= len(joining) if goes_on else 0
            self._state.let_go(leader)
            if joining:
                joined[leader.row] = [self._enter(sample, leader, goes_on) for sample in joining]
        return joined

    def needs(self, leader: Sequence) -> tuple[int, int]:
        """Rows that the leader's held samples take when they join, and blocks in the step after."""
        num_rows = sum(sample.state is State.HELD for sample in leader.held)
        return num_rows, num_rows if self._goes_on(leader) else 0

    def _goes_on(self, leader: Sequence) -> bool:
        """Whether the token from the last logits of the prompt is not the last one in its row."""
        return leader.num_prompt + 1 < self._state.bound_in_row(leader)

    def _enter(self, sample: Sequence, leader: Sequence, goes_on: bool) -> JoinedRow:
        state, columns = self._state, self._state.columns
        state.part(sample, leader, State.RUNNING)
        sample.token_ids = sample.token_ids.copy()
        blocks = columns.table(leader.row)
        state.cache.pool.share(blocks)
        sample.row = columns.enter(sample, blocks, sample.num_prompt, state.bound_in_row(sample))
        if goes_on and sample.num_prompt % state.lease.block_size:
            columns.set_sharing(leader.row, True)
            columns.set_sharing(sample.row, True)
        return JoinedRow(sample.row, leader.row, sample.sampling, sample.end_token_ids)

    def _tail_entry(self, row: int) -> int:
        return int(self._state.columns.num_computed[row]) // self._state.lease.block_size
