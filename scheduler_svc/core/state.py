"""What the core knows, and the few changes that more than one part of it makes."""

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from scheduler_svc.core.admission import AdmissionQueue
from scheduler_svc.core.beam_group import BeamGroup
from scheduler_svc.core.blocks import BlockPool, PoolMaker
from scheduler_svc.core.bounds import length_of, reach
from scheduler_svc.core.cache_events import CachedBlock, CacheEvents
from scheduler_svc.core.columns import SequenceColumns
from scheduler_svc.core.plan import ForkedRow, Lease
from scheduler_svc.core.prefix import PrefixCache, root_hash
from scheduler_svc.core.sequence import Sequence, State

if TYPE_CHECKING:
    from scheduler_svc.core.prompt_scores import Scored

NO_LEASE = Lease(block_ids=[], row_ids=[], tokens_per_step=0, block_size=16, plans_in_flight=0)


@dataclass(slots=True)
class Counters:
    """Since the scheduler was made."""

    preemptions: int = 0
    yielded: int = 0  # of these, to a higher priority
    recalled: int = 0  # because part of the lease was to be returned
    prompt_tokens: int = 0  # of admitted sequences, once each
    cached_prompt_tokens: int = 0  # of these, found in the prefix cache
    generated_tokens: int = 0
    not_finite: int = 0  # sequences that have ended because their logits were not
    admitted: int = 0  # how often one that waited got in, beams of one search together
    peak_running: int = 0
    peak_used_blocks: int = 0
    peak_unused_slots: int = 0  # at the moment of peak_used_blocks

    @classmethod
    def sum(cls, several: Iterable["Counters"]) -> "Counters":
        """Of several schedulers together; each peak is the sum of theirs."""
        return cls(*map(sum, zip(*map(astuple, several), strict=True)))

    def without_peaks(self) -> "Counters":
        """What remains true of them once they are gone."""
        return replace(self, peak_running=0, peak_used_blocks=0, peak_unused_slots=0)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan whose result is awaited: its sampling rows, and who held them when it was made."""

    step: int
    rows: np.ndarray
    tenancies: np.ndarray
    sequences: list[Sequence]
    token_lists: list[list[int]]  # of these sequences: saves a look-up for each token
    scored: tuple["Scored", ...] = ()  # what it will tell of prompts

    def only(self, indices: list[int]) -> "InFlight":
        """The same for some of the rows."""
        return InFlight(
            self.step,
            self.rows[indices],
            self.tenancies[indices],
            [self.sequences[i] for i in indices],
            [self.token_lists[i] for i in indices],
        )


class CoreState:
    """The sequences, running and waiting, and what is leased. Planner and results are written upon it."""

    def __init__(
        self,
        prefix_caching: bool,
        longest: int | None,
        queue: AdmissionQueue,
        cache_events: CacheEvents,
        make_pool: PoolMaker = BlockPool,
    ) -> None:
        self.prefix_caching = prefix_caching
        self._longest = longest
        self._make_pool = make_pool
        self.hashed_block_size = NO_LEASE.block_size  # what the waiting sequences' hashes are for
        self.queue = queue
        self.cache_events = cache_events
        self.counters = Counters()
        self.num_held = 0  # sequences that are HELD
        self.begin(NO_LEASE)

    def begin(self, lease: Lease) -> None:
        """A new lease, with nothing in its blocks and rows. What waits is bounded by `bound`, sequence by sequence."""
        self.lease = lease
        self.cache = PrefixCache(lease.block_ids, self.cache_events, self._make_pool, lease.most.blocks + 1)
        self.columns = SequenceColumns(lease.row_ids, lease.block_size, lease.most.rows)
        self.tokens_per_step = lease.tokens_per_step  # present share; `lease` tells what was lent at the begin
        self.in_flight: deque[InFlight] = deque()
        self.last_in_flight: InFlight | None = None
        self.leaders: list[Sequence] = []  # that run, or ran, and for which other samples are held
        self.groups: dict[BeamGroup, None] = {}  # of beams that run, in order of admission
        self.forks: list[ForkedRow] = []  # of these, for the next plan
        self.scoring: list[Sequence] = []  # that run, or ran, and lack log-probabilities of their prompt
        self.alone: Sequence | None = None  # the last one admitted to be computed alone
        self.is_closed = False  # nothing is admitted any more
        self.num_left_waiting = 0  # in the queue when the last plan was made
        self.step = 0
        self.ended_rows: list[int] = []  # since the last plan

    @property
    def num_running(self) -> int:
        return self.columns.num_running

    @property
    def leaves_some_waiting(self) -> bool:
        """Whether there are more than the last plan could let in."""
        return self.num_left_waiting > 0 and len(self.queue) > 0

    @property
    def num_waiting(self) -> int:
        """Sequences that wait by themselves, and those that wait for the first sample of their request."""
        return len(self.queue) + self.num_held

    @property
    def unused_slots(self) -> int:
        """Slots of used blocks that hold no token yet; a token counts from the plan that computes it."""
        rows = self.columns.running_rows()
        num_blocks = self.columns.num_blocks[rows]
        unused = num_blocks * self.lease.block_size - self.columns.num_computed[rows]
        if num_blocks.sum() != self.cache.pool.num_used:  # some are shared: if they have room, as the last of a table
            _, first = np.unique(self.columns.block_table[rows, num_blocks - 1], return_index=True)
            unused = unused[first]
        return int(unused.sum())

    def bound(self, sequence: Sequence) -> bool:
        """Set how long the sequence may become under the largest lease. False if it can never be computed."""
        sequence.max_total = length_of(sequence, self.lease, self._longest)
        return self.reach(sequence) > 0

    def reach(self, sequence: Sequence) -> int:
        """Most tokens, prompt included, that the sequence may come to have; 0 if it can never be computed."""
        return reach(sequence, self.lease, self._longest)

    def stretch(self, sequence: Sequence) -> None:
        """Note which keys the sequence has if it starts with the tokens that it has now."""
        stretched = 0 < self.lease.rope_switch_len < len(sequence.token_ids)
        if stretched != sequence.stretched:
            sequence.stretched = stretched
            sequence.block_hashes.clear()

    def bound_in_row(self, sequence: Sequence) -> int:
        """Most tokens of the sequence before it ends, or must start anew because all its keys change."""
        switch = self.lease.rope_switch_len
        return min(sequence.max_total, switch + 1) if switch and not sequence.stretched else sequence.max_total

    def cache_root(self, sequence: Sequence) -> bytes:
        """H_0 of the sequence's block hashes: only blocks of equal salt and of equal keys are ever shared."""
        return root_hash(salt=sequence.cache_salt, keys="stretched" if sequence.stretched else "")

    def extend_hashes(self, sequence: Sequence) -> None:
        """Hash the full blocks of the sequence that are not hashed yet."""
        sequence.block_hashes.extend(sequence.token_ids, self.lease.block_size, lambda: self.cache_root(sequence))

    def cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the beginning of the sequence, as far as it need not be computed."""
        if not self.prefix_caching or sequence.bypass_cache:
            return []
        self.extend_hashes(sequence)
        return self.cache.find(sequence.block_hashes[: sequence.usable_prefix // self.lease.block_size])

    def rows_of_step(self) -> np.ndarray:
        """Rows that the next step may compute, in order of admission: all that run, or the one that must be alone; but
        none that awaits its mask."""
        alone = self.running_alone
        if alone is None:
            rows = self.columns.running_rows()
        elif alone.group is None:
            rows = np.array([alone.row])
        else:
            rows = np.array([beam.row for beam in alone.group.beams])
            rows = rows[np.argsort(self.columns.tenancy[rows])]
        return rows[~self.columns.awaits_mask[rows]] if self.columns.num_masked else rows

    @property
    def running_alone(self) -> Sequence | None:
        """The running sequence that has the steps to itself, if one has."""
        alone = self.alone
        return alone if alone is not None and alone.alone and alone.state is State.RUNNING else None

    def sequence_in(self, row: int) -> Sequence:
        sequence = self.columns.sequence[row]
        if sequence is None:
            raise RuntimeError(f"row {row} is free")
        return sequence

    def sequences_in(self, rows: np.ndarray) -> list[Sequence]:
        """Of these rows, in their order. Far quicker than asking for one after another."""
        by_row = self.columns.sequence
        sequences = [sequence for row in rows.tolist() if (sequence := by_row[row]) is not None]
        if len(sequences) != len(rows):
            raise RuntimeError("some of these rows are free")
        return sequences

    def end(self, sequence: Sequence) -> None:
        """End the sequence now, wherever it is; its tokens in flight will be dropped. Harmless if it has ended."""
        if sequence.state is State.RUNNING:
            self._leave(sequence)
        elif sequence.state is State.WAITING:
            self.queue.remove(sequence)
        elif sequence.state is State.HELD:
            self.num_held -= 1
        if sequence.state not in (State.NEW, State.ENDED):
            self.queue.settle(sequence)
        sequence.state = State.ENDED
        if sequence.group is not None:
            for answer in sequence.group.answers:
                answer.state = State.ENDED
        self.let_go(sequence)

    def let_go(self, leader: Sequence) -> None:
        """The samples that are held for this one wait by themselves, where its place would be."""
        for sample in leader.held:
            if sample.state is State.HELD:
                self.part(sample, leader, State.WAITING)
                self.queue.push(sample)
        leader.held = ()

    def part(self, sample: Sequence, leader: Sequence, state: State) -> None:
        """A held sample becomes a sequence like any other, with what its leader knows of the prompt."""
        self.num_held -= 1
        sample.state = state
        sample.max_total, sample.stretched = leader.max_total, leader.stretched
        sample.num_cached = leader.num_cached  # of their request, which is counted once
        sample.block_hashes = leader.block_hashes[: leader.num_prompt // self.hashed_block_size]

    def count_prompt(self, sequence: Sequence, num_cached: int) -> None:
        """The sequence, or its group, is admitted; its prompt counts the first time."""
        if sequence.num_cached is None:
            sequence.num_cached = num_cached
            self.counters.prompt_tokens += sequence.num_prompt
            self.counters.cached_prompt_tokens += num_cached

    def preempt(self, sequence: Sequence) -> None:
        """A running sequence waits again, at its old place in the order; a beam with all of its group."""
        if sequence.group is not None:
            sequence = sequence.group.handle
        self._leave(sequence)
        sequence.state = State.WAITING
        self.queue.push(sequence)

    def publish(self, sequence: Sequence, num_computed: int) -> None:
        """Let others find the sequence's blocks whose ids are known and whose K/V is final."""
        if not self.prefix_caching or sequence.bypass_cache:
            return
        columns, row = self.columns, sequence.row
        begin = int(columns.num_published[row])
        end = min(num_computed, int(columns.num_tokens[row])) // self.lease.block_size
        if begin >= end:
            return
        self.extend_hashes(sequence)
        for i, block in enumerate(columns.block_table[row, begin:end].tolist(), begin):
            self.publish_block(sequence, i, block)
        columns.num_published[row] = end

    def publish_block(self, sequence: Sequence, index: int, block: int) -> None:
        """The same of one block, which is the sequence's `index`-th and hashed already."""
        parent, digest = sequence.block_hashes.with_parent(index)
        self.cache.publish(block, digest, parent)
        events = self.cache_events
        # A prompt without a salt finds nothing that was stored under one, nor do keys of two kinds meet.
        if events.keeps_contents and not (sequence.cache_salt or sequence.stretched) and self.cache.holds(digest):
            begin = index * self.lease.block_size
            ids = array("i", sequence.token_ids[begin : begin + self.lease.block_size])
            events.contents[digest] = CachedBlock(parent or None, ids.tobytes())

    def _leave(self, sequence: Sequence) -> None:
        """Release its row, or those of all beams of its group."""
        group = sequence.group
        if group is None:
            self._release(sequence)
            return
        sequence.num_owed = int(sum(self.columns.in_flight[beam.row] for beam in group.beams))
        for beam in group.beams:
            self._release(beam)
        self.columns.give_back(group.places)
        group.beams, group.places = [], []
        group.drawn.clear()
        del self.groups[group]

    def _release(self, sequence: Sequence) -> None:
        """The only way out of a row, whatever the reason. The executor is told in the next plan."""
        row = sequence.row
        sequence.row = -1
        sequence.num_owed = int(self.columns.in_flight[row])
        self.cache.pool.release(self.columns.leave(row))
        if self.forks:
            fork = next((fork for fork in self.forks if fork.row == row), None)
            if fork is not None:
                self.forks.remove(fork)
                if fork.is_fresh:
                    return  # the executor has never heard of it
        self.ended_rows.append(row)
