"""The rules that everything else rests on, as one check of the core's whole state."""

from collections import Counter

from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.state import CoreState


class AuditFailure(Exception):
    """The bookkeeping contradicts itself: a fault of ours."""


def audit(state: CoreState) -> None:
    """Raise AuditFailure unless every block is accounted for. Costs a pass over all tables and blocks."""
    columns, cache, pool = state.columns, state.cache, state.cache.pool
    rows = columns.running_rows().tolist()
    block_size = state.lease.block_size
    references = Counter(block for row in rows for block in columns.table(row))
    _require(pool.num_blank + pool.num_cached + pool.num_used == pool.num_leased, "blank + cached + used != leased")
    _require(pool.num_used == len(references), "used blocks are not those in tables")
    for block in pool.leased:
        _require(pool.ref_count[block] == references[block], f"block {block}: count differs from table references")
        _require(pool.is_free(block) or block != 0, "block 0 is in use")
    cache.audit()
    waiting_readers = _blocks_read(state)
    for row in rows:
        sequence = columns.sequence[row]
        _require(sequence is not None and sequence.state is State.RUNNING and sequence.row == row, f"row {row}: owner")
        computed, held = int(columns.num_computed[row]), int(columns.num_blocks[row])
        known = int(columns.num_tokens[row])
        most = max(known, computed)
        _require(computed <= known + int(columns.in_flight[row]), f"row {row}: computed past its tokens")
        _require(computed <= held * block_size, f"row {row}: positions without a block")
        _require(held <= -(-most // block_size), f"row {row}: more than {block_size - 1} slots unused")
        if not sequence.stretched and state.lease.rope_switch_len:
            _require(computed <= state.lease.rope_switch_len, f"row {row}: computed past the length of its keys")
        for block in columns.table(row)[computed // block_size :]:
            _require(not cache.is_published(block), f"row {row}: block {block} is published and yet to be written")
            writes = known + int(columns.in_flight[row]) < columns.max_total[row]
            # Beams that start anew wait for the one before them to write what they share.
            readers = 0 if sequence.group is None else waiting_readers[id(sequence.group), block]
            settled = pool.ref_count[block] - readers == 1 or columns.shares_tail[row] or not writes
            _require(settled, f"row {row}: block {block} is shared and yet to be written")
        unready = sequence.needs_mask or (sequence.masked and columns.in_flight[row] > 0)
        _require(bool(columns.awaits_mask[row]) == unready, f"row {row}: planned without its mask, or held out with it")
        _require(not sequence.masked or columns.in_flight[row] <= 1, f"row {row}: drawn twice by one mask")
    num_masked = sum(state.sequence_in(row).masked for row in rows)
    _require(columns.num_masked == num_masked, "the number of masked rows is off")
    _require(columns.num_running == len(rows), "the number of running rows is off")
    _require(columns.num_sharing == int(columns.shares_tail.sum()), "the number of sharing rows is off")
    first, ranks = columns.first_running(), [state.sequence_in(row).rank[:2] for row in rows]
    _require((first and first.rank[:2]) == min(ranks, default=None), "the first that runs is another by its rank")
    held = sum(s.state is State.HELD for leader in [*state.queue, *state.leaders] for s in leader.held)
    _require(state.num_held == held, "held sequences are not those of who runs or waits")
    for group in state.groups:
        width, handle = group.parameters.width, group.handle
        _require(handle.state is State.RUNNING and handle.row == -1, "a group's handle does not run, or has a row")
        _require(len(group.beams) + len(group.places) == width, f"a group has not {width} rows")
        _require({beam.row for beam in group.beams} <= set(rows), "a beam has no row")
        lengths = {int(columns.num_tokens[beam.row]) for beam in group.beams}
        _require(lengths == {group.num_tokens}, "the beams of a group differ in length")
    num_reserved = sum(len(group.places) for group in state.groups)
    _require(
        columns.num_free_rows + num_reserved + len(rows) == columns.num_leased, "free + reserved + used != leased rows"
    )
    _require(len(rows) <= state.tokens_per_step, "more rows run than a step has tokens")
    _require(references.keys() <= pool.leased, "a table names a block that is not leased")
    beams = {beam.row for group in state.groups for beam in group.beams}
    _require(beams == {row for row in rows if _is_beam(columns.sequence[row])}, "a beam runs that is in no group")
    for fork in state.forks:
        owner = columns.sequence[fork.row]
        _require(owner is not None and owner.group in state.groups, f"row {fork.row} is to fork and no beam's")
    waiting = [sequence.rank for sequence in state.queue]
    _require(waiting == sorted(waiting), "the queue is out of order")
    for sequence in state.queue:
        _require(sequence.state is State.WAITING and sequence.row == -1, "a waiting sequence has a row")


def _is_beam(sequence: Sequence | None) -> bool:
    return sequence is not None and sequence.group is not None


def _blocks_read(state: CoreState) -> Counter[tuple[int, int]]:
    """By group and block: how many of its beams have the block before the first position that they compute."""
    columns, block_size = state.columns, state.lease.block_size
    return Counter(
        (id(group), block)
        for group in state.groups
        for beam in group.beams
        for block in columns.table(beam.row)[: int(columns.num_computed[beam.row]) // block_size]
    )


def audit_idle(state: CoreState) -> None:
    """Raise AuditFailure unless all blocks are free. For a core that runs nothing; cheap."""
    pool = state.cache.pool
    _require(pool.num_used == 0, f"{pool.num_used} blocks in use, or gone, while nothing runs")


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise AuditFailure(rule)
