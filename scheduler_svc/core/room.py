"""Whether the first in the queue finds room, and who gives way to it if not.

A sequence that waits is started with blocks for all tokens that are known, or not at all. While others run, their next
growth and a watermark stay free. One that finds no room takes that of running sequences of lower priority behind it in
the order: the last first, no more than it needs, and none if all of them would not do.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.beam_group import BeamGroup
from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.masking import Masking
from scheduler_svc.core.sequence import Rank, Sequence
from scheduler_svc.core.sharing import Sharing
from scheduler_svc.core.state import CoreState


@dataclass(frozen=True, slots=True)
class Need:
    """What it takes to start a sequence: `hits` are the blocks that hold its beginning already, `blocks` those that
    must be free, `growth` those that it could come to need in the step after."""

    num_rows: int
    num_blocks: int
    hits: list[int]
    blocks: int
    growth: int


@dataclass(frozen=True, slots=True)
class _Stuck:
    """How many blocks the sequence of that rank lacked, beyond the reserve, when so many had been freed; `missing` is
    the hash that ended its cached prefix. A long prefix is not looked up again before it can matter."""

    rank: Rank  # not the sequence: it would outlive its request here
    pool: BlockPool
    num_lacking: int
    num_freed: int
    missing: bytes | None


class Room:
    """`watermark` is the share of the lease that admission leaves free while others run, so that they can grow for a
    while before one of them must be preempted. `reserve` are the blocks that running rows could come to need in the
    step after this one."""

    def __init__(self, state: CoreState, sharing: Sharing, masking: Masking, watermark: float) -> None:
        self._state = state
        self._sharing = sharing
        self._masking = masking
        self._watermark = watermark
        self._stuck: _Stuck | None = None
        self.reserve = 0

    @property
    def spared(self) -> int:
        """Blocks that admission leaves free while others run."""
        return max(1, int(self._watermark * self._state.cache.pool.num_leased))

    def growth(self) -> int:
        """Blocks that the running rows could come to need in the step after this one."""
        state = self._state
        groups = sum(group.growth(state.lease.block_size) for group in state.groups)
        return int(self._growth_of(state.columns.running_rows()).sum()) + self._sharing.copies_ahead() + groups

    def blocks_to_start(self, sequence: Sequence) -> int:
        """How many blocks a sequence's table has when it starts: those of all tokens that are known."""
        return -(-len(sequence.token_ids) // self._state.lease.block_size)

    def for_sequence(self, sequence: Sequence) -> Need | None:
        """What it takes to start this sequence; None if there is no room for it."""
        state, pool = self._state, self._state.cache.pool
        if not state.num_running:
            need = self._need(sequence)
            return need if need.blocks + need.growth <= pool.num_free else None
        if self._lacking(sequence) + self.reserve > 0:
            return None
        need = self._need(sequence)
        return need if self._note(sequence, need) + self.reserve <= 0 else None

    def _note(self, sequence: Sequence, need: Need) -> int:
        """How many blocks it lacks beyond the reserve; kept for `_lacking`."""
        pool, hashes, num_hits = self._state.cache.pool, sequence.block_hashes, len(need.hits)
        lacking = need.blocks + need.growth + self.spared - pool.num_free
        if lacking + self.reserve <= 0:
            return lacking  # it starts
        missing = hashes[num_hits] if num_hits < len(hashes) else None
        self._stuck = _Stuck(sequence.rank, pool, lacking, pool.num_freed, missing)
        return lacking

    def _lacking(self, sequence: Sequence) -> float:
        """How many blocks it lacks at least, beyond the reserve, as far as is known without looking up its prefix."""
        stuck, cache = self._stuck, self._state.cache
        if stuck is None or stuck.rank != sequence.rank or stuck.pool is not cache.pool:
            return -math.inf
        if stuck.missing is not None and cache.holds(stuck.missing):
            return -math.inf
        return stuck.num_lacking - (cache.pool.num_freed - stuck.num_freed)

    def in_order(self, rows: np.ndarray, admits: bool) -> list[int]:
        """Indices of those of these rows that may compute more of their prompts, first in the order first. If the first
        in the queue can start in a plan that admits, those that give way to it leave it the step's tokens."""
        sequences = self._state.sequences_in(rows)
        order = sorted(range(len(sequences)), key=lambda i: sequences[i].rank)
        first = self._first_of_a_tier() if admits else None
        if first is None:
            return order
        held_back = {sequence for sequence in sequences if _gives_way(sequence, first)}
        if not self._starts(first, [leader for leader in self._state.leaders if leader not in held_back]):
            return order
        return [i for i in order if sequences[i] not in held_back]

    def _starts(self, first: Sequence, leaders: list[Sequence]) -> bool:
        """Whether there is room for it even if the held samples of these leaders join before."""
        needs = [self._sharing.needs(leader) for leader in leaders]
        num_rows = self._state.columns.num_free_rows - sum(num_rows for num_rows, _ in needs)
        if num_rows < (1 if first.group is None else first.group.parameters.width):
            return False
        promised = sum(num_blocks for _, num_blocks in needs)
        self.reserve += promised
        room = self.for_sequence(first)
        self.reserve -= promised
        return room is not None

    def _first_of_a_tier(self) -> Sequence | None:
        """The first in the queue, if there are priorities and it may start among others."""
        state = self._state
        first = state.queue.first()
        if first is None or not state.queue.has_tiers or first.num_owed or first.alone or state.running_alone:
            return None
        if first.needs_mask or (first.masked and not self._masking.room(first)):
            return None
        return first

    def victims(self) -> list[Sequence]:
        """Those who give way to the first in the queue, last in the order first; none if it finds room, or could not
        start in the next plan for all that."""
        first = self._first_of_a_tier()
        if first is None:
            return []
        columns = self._state.columns
        rows = [row for row in columns.running_rows().tolist() if _gives_way(self._state.sequence_in(row), first)]
        below = list(dict.fromkeys(_whole(self._state.sequence_in(row)) for row in rows))
        below.sort(key=lambda other: other.rank, reverse=True)
        if not below or self._no_tokens_for_next(rows) or self._starts(first, []):
            return []
        spare = self.spared + (1 if first.group is None else first.group.growth(self._state.lease.block_size))
        if self._lacking(first) - spare > int(columns.num_blocks[rows].sum()):
            return []  # all of theirs would not do
        need = self._need(first)
        self._note(first, need)
        if not self._suffice(below, need):
            return []
        counts = range(1, len(below) + 1)  # the more give way, the more room: the least that will do is found by halves
        return below[: counts[bisect_left(counts, True, key=lambda count: self._suffice(below[:count], need))]]

    def _no_tokens_for_next(self, below: list[int]) -> bool:
        """Whether prompts in other rows than these take all tokens of this step and the next: until they are computed
        nobody starts, whoever gives way."""
        columns, rows = self._state.columns, np.setdiff1d(self._state.rows_of_step(), below)
        remaining = columns.num_tokens[rows] + columns.in_flight[rows] - columns.num_computed[rows]
        return int(remaining[remaining > 1].sum()) >= 2 * self._state.tokens_per_step

    def _suffice(self, victims: list[Sequence], need: Need) -> bool:
        state = self._state
        columns, pool = state.columns, state.cache.pool
        running = columns.running_rows()
        leaving = set(victims)
        leave = [row for row in running.tolist() if _whole(state.sequence_in(row)) in leaving]
        groups = [victim.group for victim in victims if victim.group is not None]
        num_rows = columns.num_free_rows + len(leave) + sum(len(group.places) for group in groups)
        held = Counter(block for row in leave for block in columns.table(row))
        given = {block for block, count in held.items() if pool.ref_count[block] == count}
        given -= set(need.hits)  # of which it needs one more, then, for each one freed
        most = pool.num_free + len(given) - need.blocks
        staying = np.setdiff1d(running, leave)
        if len(staying):
            block_size = state.lease.block_size
            growing = sum(group.growth(block_size) for group in state.groups if group not in groups)
            most -= int(self._growth_of(staying).sum()) + self._sharing.copies_ahead() + growing
            most -= need.growth + self.spared
        return most >= 0 and num_rows >= need.num_rows

    def _need(self, sequence: Sequence) -> Need:
        state = self._state
        if sequence.group is not None:
            return self._need_of_group(sequence.group)
        state.stretch(sequence)
        hits = state.cached_prefix(sequence)
        num_blocks = self.blocks_to_start(sequence)
        length = min(len(sequence.token_ids) + 1, state.bound_in_row(sequence) - 1)
        growth = max(0, -(-length // state.lease.block_size) - num_blocks)
        blocks = num_blocks - len(hits) + sum(map(state.cache.pool.is_free, hits))
        return Need(1, num_blocks, hits, blocks, growth)

    def _need_of_group(self, group: BeamGroup) -> Need:
        """At most: the beginning of the first one may be cached."""
        block_size = self._state.lease.block_size
        num_blocks = group.start(block_size).most_blocks
        return Need(group.parameters.width, num_blocks, [], num_blocks, group.growth(block_size))

    def _growth_of(self, rows: np.ndarray) -> np.ndarray:
        columns, block_size = self._state.columns, self._state.lease.block_size
        length = np.minimum(columns.num_tokens[rows] + columns.in_flight[rows] + 1, columns.max_total[rows] - 1)
        return np.maximum(-(-length // block_size) - columns.num_blocks[rows], 0)


def _whole(running: Sequence) -> Sequence:
    """What is preempted with it: itself, or all beams of its group."""
    return running if running.group is None else running.group.handle


def _gives_way(running: Sequence, first: Sequence) -> bool:
    return running.priority < first.priority and running.rank > first.rank


RoomMaker = Callable[[CoreState, Sharing, Masking, float], Room]
