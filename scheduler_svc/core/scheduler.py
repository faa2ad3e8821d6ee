"""The scheduler: which sequences run, in which blocks, and what the next step computes.

There is no prefill phase and no decode phase. Every running sequence has `num_computed` positions that must catch up
with the tokens it has, or will have once results come: each plan advances it by as many as the budget allows, and
when it has caught up its last logits give one more token.

    submit(sequence)        it waits
    plan()                  grow: a block for each row whose next position has none
                            settle: preempt if the step after this one could run out of blocks
                            schedule: rows with one position to compute, then chunks of prompts
                            admit: first come, first served, blocks for all known tokens or nothing
    ... the executor computes; the next plan may be made meanwhile ...
    apply(result)           append tokens, end what has ended, publish full blocks
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.admission import AdmissionQueue
from scheduler_svc.core.columns import SequenceColumns
from scheduler_svc.core.plan import Lease, LogprobColumn, Plan, Result, StartedRow
from scheduler_svc.core.prefix import PrefixCache, extend_hashes
from scheduler_svc.core.sequence import EndReason, Sequence, State, TokenLogprobs

NO_LEASE = Lease(block_ids=[], row_ids=[], tokens_per_step=0, block_size=16, plans_in_flight=0)


@dataclass(slots=True)
class Counters:
    """Since the scheduler was made."""

    preemptions: int = 0
    prompt_tokens: int = 0  # of admitted sequences, once each
    cached_prompt_tokens: int = 0  # of these, found in the prefix cache
    generated_tokens: int = 0
    peak_running: int = 0
    peak_used_blocks: int = 0
    peak_unused_slots: int = 0  # at the moment of peak_used_blocks


@dataclass(frozen=True, slots=True)
class Applied:
    """What a result has changed: sequences that got a token, and sequences that have ended by it."""

    updated: list[Sequence]
    ended: list[Sequence]


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan whose result is awaited: its sampling rows, and who held them when it was made."""

    step: int
    rows: np.ndarray
    tenancies: np.ndarray
    sequences: list[Sequence]
    token_lists: list[list[int]]  # of these sequences: saves a look-up for each token

    def only(self, indices: list[int]) -> "InFlight":
        """The same for some of the rows."""
        return InFlight(
            self.step,
            self.rows[indices],
            self.tenancies[indices],
            [self.sequences[i] for i in indices],
            [self.token_lists[i] for i in indices],
        )


class ResultMismatch(Exception):
    """A result that is not that of the oldest plan in flight."""


class Scheduler:
    """Bookkeeping for one executor. `watermark` is the share of the lease that admission leaves free while others
    run, so that they can grow for a while before one of them must be preempted."""

    def __init__(self, *, prefix_caching: bool = True, watermark: float = 0.01) -> None:
        self.queue = AdmissionQueue()
        self.counters = Counters()
        self._prefix_caching = prefix_caching
        self._watermark = watermark
        self._begin(NO_LEASE)

    # --- sessions ---

    def attach(self, lease: Lease) -> list[Sequence]:
        """Begin a session, with empty KV memory. Returns waiting sequences that can never fit it; they have ended."""
        if self.in_flight or self.num_running:
            raise RuntimeError("attach() during a session: call detach() first")
        self._begin(lease)
        for sequence in self.queue:
            sequence.block_hashes.clear()  # the block size may be another one now
        hopeless = [sequence for sequence in self.queue if not self.fits(sequence.max_total)]
        for sequence in hopeless:
            self.cancel(sequence)
        return hopeless

    def detach(self) -> list[Sequence]:
        """The executor is lost: what ran waits again, in the same order, to be computed anew. Returns what ran."""
        ran = [self._sequence(row) for row in self.columns.running_rows()]
        for sequence in reversed(ran):
            self._preempt(sequence)
        for record in self.in_flight:
            for sequence in record.sequences:
                sequence.in_flight = 0
        self._begin(NO_LEASE)
        return ran

    def _begin(self, lease: Lease) -> None:
        self.lease = lease
        self.cache = PrefixCache(lease.block_ids)
        self.columns = SequenceColumns(lease.row_ids[: lease.tokens_per_step], lease.block_size)
        self.in_flight: deque[InFlight] = deque()
        self._step = 0
        self._ended_rows: list[int] = []
        self._reserve = 0  # blocks that running rows could come to need in the step after this one
        self._last_record: InFlight | None = None

    # --- facts ---

    @property
    def capacity_tokens(self) -> int:
        """Most tokens of one sequence; the last one needs no slot."""
        return len(self.lease.block_ids) * self.lease.block_size + 1

    def fits(self, max_total: int) -> bool:
        """Whether a sequence of that many tokens could be computed if it were alone."""
        return max_total <= self.capacity_tokens

    @property
    def num_running(self) -> int:
        return len(self.columns.running_rows())

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def unused_slots(self) -> int:
        """Slots in block tables that hold no token yet; a token counts from the plan that computes it."""
        rows = self.columns.running_rows()
        return int((self.columns.num_blocks[rows] * self.lease.block_size - self.columns.num_computed[rows]).sum())

    # --- requests ---

    def submit(self, sequence: Sequence) -> None:
        """Let the sequence wait for its turn. The caller has checked that it `fits`."""
        sequence.state = State.WAITING
        self.queue.push(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """End the sequence now, wherever it is; its tokens in flight will be dropped. Harmless if it has ended."""
        if sequence.state is State.RUNNING:
            self._release(sequence)
        elif sequence.state is State.WAITING:
            self.queue.remove(sequence)
        sequence.state = State.ENDED

    # --- plan ---

    def plan(self, *, even_if_empty: bool = False) -> Plan | None:
        """The next step, or None if there is nothing to say. The caller keeps to `lease.plans_in_flight`.

        All blocks are taken before any is given back, so no plan uses a block that was freed while it was made.
        """
        growing, blocks = self._grow()
        preempted = self._settle()
        rows, num_tokens, num_single = self._schedule_running()
        started: list[StartedRow] = []
        if not preempted:
            started = self._admit(self.lease.tokens_per_step - int(num_tokens.sum()))
            if started:
                rows = np.concatenate([rows, [start.row for start in started]])
                num_tokens = np.concatenate([num_tokens, self._first_chunks])
        if not (len(rows) or self._ended_rows or even_if_empty):
            return None
        samples = self._advance(rows, num_tokens, num_single)
        self._step += 1
        self._await_result(rows[samples])
        self._note_peaks()
        ended, self._ended_rows = self._ended_rows, []
        kept = self.columns.tenancy[growing] > 0
        return Plan(
            step=self._step,
            ended=ended,
            started=started,
            appended_rows=growing[kept].astype(np.int32),
            appended_blocks=blocks[kept],
            rows=rows.astype(np.int32),
            num_tokens=num_tokens.astype(np.int32),
            samples=samples,
        )

    def _grow(self) -> tuple[np.ndarray, np.ndarray]:
        """A block for each row whose next position has none. `_settle` in the plan before has seen to it that there are
        enough. Returns rows and blocks."""
        columns = self.columns
        rows = columns.running_rows()
        full = columns.num_computed[rows] == columns.num_blocks[rows] * self.lease.block_size
        growing = rows[full & self._has_more(rows)]
        blocks = self.cache.pool.allocate(len(growing))
        if blocks:
            columns.append_blocks(growing, blocks)
        return growing, np.array(blocks, np.int32)

    def _has_more(self, rows: np.ndarray) -> np.ndarray:
        """Which rows may still get a token beyond those known and in flight."""
        columns = self.columns
        return columns.num_tokens[rows] + columns.in_flight[rows] < columns.max_total[rows]

    def _settle(self) -> bool:
        """Preempt, last admitted first, until the step after this one cannot run out of blocks."""
        preempted = False
        while (need := self._growth()) > self.cache.pool.num_free:
            victim = self._sequence(self.columns.running_rows()[-1])
            victim.num_preemptions += 1
            self.counters.preemptions += 1
            self._preempt(victim)
            preempted = True
        self._reserve = need
        return preempted

    def _growth(self) -> int:
        """Blocks that the running rows could come to need in the step after this one."""
        columns = self.columns
        rows = columns.running_rows()
        length = np.minimum(columns.num_tokens[rows] + columns.in_flight[rows] + 1, columns.max_total[rows] - 1)
        return int(np.maximum(self._blocks_for(length) - columns.num_blocks[rows], 0).sum())

    def _blocks_for(self, num_tokens: np.ndarray) -> np.ndarray:
        return -(-num_tokens // self.lease.block_size)

    def _schedule_running(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Rows with one position to compute, then rows with more, first admitted first, as far as the budget goes.

        Returns rows, the number of tokens of each, and how many rows are of the first kind.
        """
        columns = self.columns
        rows = columns.running_rows()
        remaining = columns.num_tokens[rows] + columns.in_flight[rows] - columns.num_computed[rows]
        single = rows[(remaining == 1) & self._has_more(rows)]
        behind = remaining > 1
        if not behind.any():
            return single, np.ones(len(single), np.int64), len(single)
        left = np.maximum(self.lease.tokens_per_step - len(single) - np.cumsum(remaining[behind]), -remaining[behind])
        chunks = remaining[behind] + np.minimum(left, 0)
        several = rows[behind][chunks > 0]
        num_tokens = np.concatenate([np.ones(len(single), np.int64), chunks[chunks > 0]])
        return np.concatenate([single, several]), num_tokens, len(single)

    def _admit(self, budget: int) -> list[StartedRow]:
        """Let the first in the queue in while it fits; `_first_chunks` tells how many tokens of each are computed."""
        started: list[StartedRow] = []
        self._first_chunks: list[int] = []
        while budget > 0 and self.columns.num_free_rows and (sequence := self.queue.first()):
            if sequence.in_flight:
                break  # preempted with tokens on the way: they come first
            start = self._start(sequence)
            if start is None:
                break
            started.append(start)
            chunk = min(len(start.token_ids) - start.num_computed, budget)
            self._first_chunks.append(chunk)
            budget -= chunk
            # At once, so that the next one admitted in this plan finds the blocks that this one writes.
            self._publish(sequence, start.num_computed + chunk)
        return started

    def _start(self, sequence: Sequence) -> StartedRow | None:
        """Admit the sequence with blocks for all tokens that are known, or change nothing and return None."""
        block_size, pool = self.lease.block_size, self.cache.pool
        hits = self._cached_prefix(sequence)
        num_tokens = len(sequence.token_ids)
        num_blocks = -(-num_tokens // block_size)
        growth = max(0, -(-min(num_tokens + 1, sequence.max_total - 1) // block_size) - num_blocks)
        needed = num_blocks - len(hits) + sum(map(pool.is_free, hits))
        if self.num_running:
            needed += self._reserve + growth + max(1, int(self._watermark * pool.num_leased))
        if needed > pool.num_free:
            return None
        self._reserve += growth
        pool.share(hits)
        blocks = hits + pool.allocate(num_blocks - len(hits))
        num_computed = len(hits) * block_size
        self.queue.remove(sequence)
        sequence.state = State.RUNNING
        sequence.row = self.columns.enter(sequence, blocks, num_computed)
        if sequence.num_cached is None:
            sequence.num_cached = num_computed
            self.counters.prompt_tokens += sequence.num_prompt
            self.counters.cached_prompt_tokens += num_computed
        return StartedRow(
            row=sequence.row,
            token_ids=sequence.token_ids.copy(),
            num_prompt=sequence.num_prompt,
            num_computed=num_computed,
            blocks=blocks,
            sampling=sequence.sampling,
            end_token_ids=sequence.end_token_ids,
        )

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the beginning of the sequence; never its last token, whose logits are needed."""
        if not self._prefix_caching:
            return []
        extend_hashes(sequence.block_hashes, sequence.token_ids, self.lease.block_size, sequence.cache_salt)
        return self.cache.find(sequence.block_hashes[: (len(sequence.token_ids) - 1) // self.lease.block_size])

    def _advance(self, rows: np.ndarray, num_tokens: np.ndarray, num_single: int) -> np.ndarray:
        """Note what the plan computes. Returns which rows catch up, and so give a token."""
        columns = self.columns
        columns.num_computed[rows] += num_tokens
        samples = columns.num_computed[rows] == columns.num_tokens[rows] + columns.in_flight[rows]
        columns.in_flight[rows[samples]] += 1
        for row in rows[num_single:].tolist():
            self._publish(self._sequence(row), int(columns.num_computed[row]))
        return samples

    def _await_result(self, rows: np.ndarray) -> None:
        tenancies = self.columns.tenancy[rows]
        last = self._last_record
        if last is not None and np.array_equal(last.tenancies, tenancies):
            record = InFlight(self._step, rows, tenancies, last.sequences, last.token_lists)  # the common case
        else:
            sequences = [self._sequence(row) for row in rows.tolist()]
            record = InFlight(self._step, rows, tenancies, sequences, [sequence.token_ids for sequence in sequences])
        self._last_record = record
        self.in_flight.append(record)

    def _note_peaks(self) -> None:
        counters, used = self.counters, self.cache.pool.num_used
        counters.peak_running = max(counters.peak_running, self.num_running)
        if used > counters.peak_used_blocks:
            counters.peak_used_blocks = used
            counters.peak_unused_slots = self.unused_slots

    # --- apply ---

    def apply(self, result: Result) -> Applied:
        """Take in the result of the oldest plan in flight. Raises ResultMismatch if it is another's."""
        record = self.in_flight[0] if self.in_flight else None
        if record is None or record.step != result.step or len(record.rows) != len(result.tokens):
            raise ResultMismatch(f"step {result.step} with {len(result.tokens)} tokens is not the plan in flight")
        self.in_flight.popleft()
        regular = (self.columns.tenancy[record.rows] == record.tenancies) & (result.tokens >= 0)
        if regular.all():
            return self._append(record, result.tokens, result.logprobs)
        chosen = np.flatnonzero(regular).tolist()
        logprobs = result.logprobs and [result.logprobs[i] for i in chosen]
        applied = self._append(record.only(chosen), result.tokens[chosen], logprobs)
        for i in np.flatnonzero(~regular).tolist():
            entry = result.logprobs[i] if result.logprobs else None
            self._append_irregular(record.sequences[i], int(result.tokens[i]), entry, applied)
        return applied

    def _append(self, record: InFlight, tokens: np.ndarray, logprobs: LogprobColumn) -> Applied:
        """One more token for each of these running rows."""
        rows, sequences = record.rows, record.sequences
        columns = self.columns
        num_tokens = columns.num_tokens[rows] + 1
        columns.num_tokens[rows] = num_tokens
        columns.in_flight[rows] -= 1
        for token_ids, token in zip(record.token_lists, tokens.tolist(), strict=True):
            token_ids.append(token)
        if logprobs is not None:
            for sequence, entry in zip(sequences, logprobs, strict=True):
                if entry is not None:
                    sequence.logprobs.append(entry)
        self.counters.generated_tokens += len(rows)
        self._publish_outputs(rows, sequences)
        at_end = (columns.end_ids[rows] == tokens[:, None]).any(axis=1)
        ended = [sequences[i] for i in np.flatnonzero(at_end | (num_tokens >= columns.max_total[rows])).tolist()]
        for sequence in ended:
            self._finish(sequence)
        return Applied(list(sequences), ended)

    def _append_irregular(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, applied: Applied
    ) -> None:
        """A token of a sequence that has lost its row meanwhile (kept if it was preempted, dropped if it has ended), or
        one that is none because the logits were not finite."""
        if sequence.state is State.ENDED:
            return
        if token < 0:
            for block in self.columns.table(sequence.row) if sequence.state is State.RUNNING else []:
                self.cache.withdraw(block)
            sequence.end_reason = EndReason.NOT_FINITE
            self.cancel(sequence)
            applied.ended.append(sequence)
            return
        sequence.in_flight -= 1
        sequence.token_ids.append(token)
        if logprobs is not None:
            sequence.logprobs.append(logprobs)
        self.counters.generated_tokens += 1
        applied.updated.append(sequence)
        if token in sequence.end_token_ids or len(sequence.token_ids) >= sequence.max_total:
            self._finish(sequence)
            applied.ended.append(sequence)

    def _publish_outputs(self, rows: np.ndarray, sequences: list[Sequence]) -> None:
        """Publish, for each of these rows, the next block if its ids are known and its K/V is final."""
        if not self._prefix_caching:
            return
        columns, block_size = self.columns, self.lease.block_size
        published = columns.num_published[rows]
        full = np.minimum(columns.num_tokens[rows], columns.num_computed[rows]) // block_size > published
        if not full.any():
            return
        indices = published[full]
        blocks = columns.block_table[rows[full], indices]
        columns.num_published[rows[full]] = indices + 1
        chosen = np.flatnonzero(full).tolist()
        for i, index, block in zip(chosen, indices.tolist(), blocks.tolist(), strict=True):
            hashes = sequences[i].block_hashes
            extend_hashes(hashes, sequences[i].token_ids, block_size, sequences[i].cache_salt)
            self.cache.publish(block, hashes[index])

    # --- shared by several ways ---

    def _publish(self, sequence: Sequence, num_computed: int) -> None:
        """Let others find the sequence's blocks whose ids are known and whose K/V is final."""
        if not self._prefix_caching:
            return
        columns, row = self.columns, sequence.row
        begin = int(columns.num_published[row])
        end = min(num_computed, int(columns.num_tokens[row])) // self.lease.block_size
        if begin >= end:
            return
        extend_hashes(sequence.block_hashes, sequence.token_ids, self.lease.block_size, sequence.cache_salt)
        for i, block in enumerate(columns.block_table[row, begin:end].tolist(), begin):
            self.cache.publish(block, sequence.block_hashes[i])
        columns.num_published[row] = end

    def _finish(self, sequence: Sequence) -> None:
        """The sequence has got its last token."""
        at_end = sequence.token_ids[-1] in sequence.end_token_ids
        sequence.end_reason = EndReason.END_TOKEN if at_end else EndReason.LENGTH
        self.cancel(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.state = State.WAITING
        self.queue.push_front(sequence)

    def _release(self, sequence: Sequence) -> None:
        """The only way out of a row, whatever the reason. The executor is told in the next plan."""
        row = sequence.row
        sequence.row = -1
        sequence.in_flight = int(self.columns.in_flight[row])
        self.cache.pool.release(self.columns.leave(row))
        self._ended_rows.append(row)

    def _sequence(self, row: int) -> Sequence:
        sequence = self.columns.sequence[row]
        if sequence is None:
            raise RuntimeError(f"row {row} is free")
        return sequence
