"""Makes plans: which running sequences advance, who must give way, and who gets in."""

import numpy as np

from scheduler_svc.core import prompt_scores
from scheduler_svc.core.beam_group import BeamGroup
from scheduler_svc.core.beams import Beams
from scheduler_svc.core.lending import Lending
from scheduler_svc.core.masking import Masking
from scheduler_svc.core.plan import MAX_SENT, NOTHING_RETURNED, Copies, Demand, JoinedRow, Plan, StartedRow
from scheduler_svc.core.prompt_scores import Scored
from scheduler_svc.core.room import Room, RoomMaker
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.sharing import Sharing
from scheduler_svc.core.state import CoreState, InFlight


class Planner:
    """See `Room` for `watermark`."""

    def __init__(self, state: CoreState, lending: Lending, watermark: float, make_room: RoomMaker = Room) -> None:
        self._state = state
        self._lending = lending
        self._masking = Masking(state)
        self._sharing = Sharing(state, self._masking)
        self._beams = Beams(state)
        self._room = make_room(state, self._sharing, self._masking, watermark)
        self._promised = 0  # blocks of the reserve for samples that are to join in this plan

    def plan(self, *, even_if_empty: bool = False) -> Plan | None:
        """The next step, or None if there is nothing to say.

        All blocks are taken before any is given back, so no plan uses a block that was freed while it was made.
        """
        started = self._admit_alone()
        growing, blocks = self._grow()
        copies = self._sharing.copy_on_write(self._state.rows_of_step())
        preempted = self._settle()
        returned = self._lending.give_back()
        preempted = preempted or self._make_way()
        if preempted:  # at once: samples that join may take the rows of the victims
            kept = self._state.columns.tenancy[growing] > 0
            growing, blocks, copies = growing[kept], blocks[kept], self._kept(copies)
        rows, num_tokens, num_single = self._schedule_running(admits=not preempted)
        if not (preempted or self._state.running_alone or self._state.is_closed):
            promised = sum(map(self._promise, self._leaders_at_end(rows, num_tokens)))
            started, chunks = self._admit(self._state.tokens_per_step - int(num_tokens.sum()), promised)
            if started:
                computed = [start.row for start, chunk in zip(started, chunks, strict=True) if chunk]
                rows = np.concatenate([rows, computed])
                num_tokens = np.concatenate([num_tokens, [chunk for chunk in chunks if chunk]])
        self._state.num_left_waiting = len(self._state.queue)
        says_something = bool(len(rows) or self._state.ended_rows or returned is not NOTHING_RETURNED)
        demand = self._demand(says_something, even_if_empty)
        if not (says_something or even_if_empty or demand is not None):
            return None
        samples = self._advance(rows, num_tokens, num_single)
        scored = prompt_scores.planned(self._state, rows, num_tokens) if self._state.scoring else ()
        joined: list[JoinedRow] = []
        if self._state.leaders:
            rows, num_tokens, samples, joined = self._join(rows, num_tokens, samples)
        self._state.step += 1
        sampling = rows[samples]
        masks = self._masking.of_plan(sampling)
        self._await_result(sampling, scored)
        self._note_peaks()
        ended, self._state.ended_rows = self._state.ended_rows, []
        forks, self._state.forks = self._state.forks, []
        return Plan(
            step=self._state.step,
            forks=forks,
            ended=ended,
            started=started,
            joined=joined,
            appended_rows=growing.astype(np.int32),
            appended_blocks=blocks,
            copies=copies,
            rows=rows.astype(np.int32),
            num_tokens=num_tokens.astype(np.int32),
            samples=samples,
            masks=masks,
            returned=returned,
            demand=demand,
            exclusive=bool(len(rows)) and self._state.running_alone is not None,
        )

    def _demand(self, says_something: bool, even_if_empty: bool) -> Demand | None:
        """Told with plans that are made anyway; in one of its own where somebody else might give what is lacking."""
        if says_something or even_if_empty or self._lending.shares:
            return self._lending.news(anyhow=even_if_empty)
        return None

    def _grow(self) -> tuple[np.ndarray, np.ndarray]:
        """A block for each row whose next position has none. `_settle` in the plan before has seen to it that there are
        enough. Returns rows and blocks."""
        columns = self._state.columns
        rows = self._state.rows_of_step()
        full = columns.num_computed[rows] == columns.num_blocks[rows] * self._state.lease.block_size
        growing = rows[full & self._has_more(rows)]
        blocks = self._state.cache.pool.allocate(len(growing))
        if blocks:
            columns.append_blocks(growing, blocks)
        return growing, np.array(blocks, np.int32)

    def _has_more(self, rows: np.ndarray) -> np.ndarray:
        """Which rows may still get a token beyond those known and in flight."""
        columns = self._state.columns
        return columns.num_tokens[rows] + columns.in_flight[rows] < columns.max_total[rows]

    def _settle(self) -> bool:
        """Preempt, last in the order first, until what is to be returned is free and the step after this one cannot
        run out of blocks."""
        preempted, owed = False, self._lending.owed
        pool, columns = self._state.cache.pool, self._state.columns
        while (need := self._room.growth()) > pool.num_free - owed.blocks or owed.rows > columns.num_free_rows:
            running = self._state.columns.running_rows().tolist()
            victim = max(map(self._state.sequence_in, running), key=lambda sequence: sequence.rank)
            self._state.counters.preemptions += 1
            self._state.counters.recalled += any(owed)
            self._state.preempt(victim)
            preempted = True
        self._room.reserve, self._promised = need, 0
        return preempted

    def _make_way(self) -> bool:
        """Preempt for the first in the queue what is of lower priority and in its way; it starts in the next plan."""
        if self._state.is_closed:
            return False
        victims = self._room.victims()
        for victim in victims:
            self._state.counters.preemptions += 1
            self._state.counters.yielded += 1
            self._state.preempt(victim)
        return bool(victims)

    def _schedule_running(self, admits: bool) -> tuple[np.ndarray, np.ndarray, int]:
        """Rows with one position to compute, then rows with more, as far as the budget goes: first admitted first, or
        first in the order where there are priorities.

        Returns rows, the number of tokens of each, and how many rows are of the first kind.
        """
        columns = self._state.columns
        rows = self._state.rows_of_step()
        remaining = columns.num_tokens[rows] + columns.in_flight[rows] - columns.num_computed[rows]
        single = rows[(remaining == 1) & self._has_more(rows)]
        behind = remaining > 1
        if not behind.any():
            return single, np.ones(len(single), np.int64), len(single)
        several, remaining = rows[behind], remaining[behind]
        if self._state.queue.has_tiers and not self._state.running_alone:
            order = self._room.in_order(several, admits)
            several, remaining = several[order], remaining[order]
        left = np.maximum(self._state.tokens_per_step - len(single) - np.cumsum(remaining), -remaining)
        chunks = remaining + np.minimum(left, 0)
        several = several[chunks > 0]
        num_tokens = np.concatenate([np.ones(len(single), np.int64), chunks[chunks > 0]])
        return np.concatenate([single, several]), num_tokens, len(single)

    def _admit_alone(self) -> list[StartedRow]:
        """If the first in the queue must be computed alone, and fits: let it in. Its steps are nobody else's."""
        sequence = self._state.queue.first()
        if sequence is None or not sequence.alone or sequence.num_owed or self._state.running_alone:
            return []
        if self._state.is_closed:
            return []
        if any(self._lending.owed):
            return []  # in the next plan: this one may have to preempt
        if sequence.needs_mask or not self._state.columns.num_free_rows:
            return []
        self._room.reserve = self._room.growth()
        starts = self._start(sequence)
        if starts is None:
            return []
        self._state.alone = sequence
        self._state.counters.admitted += 1
        return starts

    def _leaders_at_end(self, rows: np.ndarray, num_tokens: np.ndarray) -> list[Sequence]:
        """Those of whose prompts this schedule computes the last token."""
        if not self._state.leaders:
            return []
        columns = self._state.columns
        caught_up = set(rows[columns.num_computed[rows] + num_tokens == columns.num_tokens[rows]].tolist())
        return [leader for leader in self._state.leaders if leader.row in caught_up]

    def _promise(self, leader: Sequence) -> int:
        """Keep rows and blocks for the samples that are to join in this plan: they come before all that wait. Returns
        the number of rows."""
        num_rows, num_blocks = self._sharing.needs(leader)
        self._room.reserve += num_blocks
        self._promised += num_blocks
        return num_rows

    def _admit(self, budget: int, promised: int) -> tuple[list[StartedRow], list[int]]:
        """Let the first in the queue in while it fits and leaves `promised` rows. Returns their rows, and how
        many tokens of each are computed; a beam may have to wait for its first one."""
        started: list[StartedRow] = []
        chunks: list[int] = []
        num_sent = 0
        while budget > 0 and self._state.columns.num_free_rows > promised and (sequence := self._state.queue.first()):
            if sequence.num_owed or sequence.alone or sequence.needs_mask:
                break  # tokens, or a mask, are on the way and come first; or it must have a plan of its own
            if sequence.masked and not self._masking.room(sequence):
                break
            num_sent += sequence.num_sent
            if started and num_sent > MAX_SENT:
                break
            starts = self._start(sequence, promised)
            if starts is None:
                break
            self._state.counters.admitted += 1
            for start in starts:
                started.append(start)
                chunk = min(len(start.token_ids) - start.num_computed, budget)
                chunks.append(chunk)
                budget -= chunk
                if sequence.held and start.num_computed + chunk == len(start.token_ids):
                    promised += self._promise(sequence)
                # At once, so that the next one admitted in this plan finds the blocks that this one writes.
                self._state.publish(self._state.sequence_in(start.row), start.num_computed + chunk)
        return started, chunks

    def _start(self, sequence: Sequence, promised: int = 0) -> list[StartedRow] | None:
        """Admit the sequence, or all beams of its group, with blocks for all tokens that are known and rows that are
        not promised; or change nothing and return None."""
        if sequence.group is not None:
            return self._start_group(sequence.group, promised)
        need = self._room.for_sequence(sequence)
        if need is None:
            return None
        pool, hits = self._state.cache.pool, need.hits
        self._room.reserve += need.growth
        if sequence.lacks_prompt_logprobs:
            self._state.scoring.append(sequence)
        if sequence.held:
            self._state.leaders.append(sequence)
        pool.share(hits)
        blocks = hits + pool.allocate(need.num_blocks - len(hits))
        num_computed = len(hits) * self._state.lease.block_size
        self._state.queue.remove(sequence)
        sequence.state = State.RUNNING
        if not sequence.num_output:
            sequence.token_ids = sequence.token_ids.copy()
        sequence.row = self._state.columns.enter(sequence, blocks, num_computed, self._state.bound_in_row(sequence))
        self._state.count_prompt(sequence, num_computed)
        start = StartedRow(
            row=sequence.row,
            token_ids=sequence.token_ids.copy(),
            num_prompt=sequence.num_prompt,
            num_computed=num_computed,
            blocks=blocks,
            sampling=prompt_scores.sampling_to_start_with(sequence),
            end_token_ids=sequence.end_token_ids,
            traceparent=sequence.traceparent,
        )
        return [start]

    def _start_group(self, group: BeamGroup, promised: int) -> list[StartedRow] | None:
        if self._state.columns.num_free_rows - promised < group.parameters.width:
            return None
        growth = group.growth(self._state.lease.block_size)
        spare_blocks = self._state.cache.pool.num_free - growth
        if self._state.num_running:
            spare_blocks -= self._room.reserve + self._room.spared
        starts = self._beams.start(group, spare_blocks)
        self._room.reserve += growth if starts else 0
        return starts

    def _join(
        self, rows: np.ndarray, num_tokens: np.ndarray, samples: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[JoinedRow]]:
        """Put the held samples of those that have computed their prompt into the schedule, each behind its like."""
        reserve = self._room.reserve - self._promised
        spare_blocks = self._state.cache.pool.num_free - reserve - self._room.spared
        joined = self._sharing.join(set(rows[samples].tolist()), spare_blocks)
        if not joined:
            return rows, num_tokens, samples, []
        counts = np.array([len(joined.get(row, ())) for row in rows.tolist()])
        places = np.repeat(np.arange(len(rows)) + 1, counts)
        new = [entry for row in rows.tolist() for entry in joined.get(row, ())]
        new_rows = np.array([entry.row for entry in new])
        self._state.columns.in_flight[new_rows] += 1
        rows = np.insert(rows, places, new_rows)
        return rows, np.insert(num_tokens, places, 0), np.insert(samples, places, True), new

    def _kept(self, copies: Copies) -> Copies:
        """Without those of rows that were preempted after all."""
        tenancy = self._state.columns.tenancy
        kept = [i for i, row in enumerate(copies.rows) if tenancy[row] > 0]
        return Copies(
            [copies.rows[i] for i in kept], [copies.sources[i] for i in kept], [copies.destinations[i] for i in kept]
        )

    def _advance(self, rows: np.ndarray, num_tokens: np.ndarray, num_single: int) -> np.ndarray:
        """Note what the plan computes. Returns which rows catch up, and so give a token."""
        columns = self._state.columns
        columns.num_computed[rows] += num_tokens
        samples = columns.num_computed[rows] == columns.num_tokens[rows] + columns.in_flight[rows]
        columns.in_flight[rows[samples]] += 1
        for row in rows[num_single:].tolist():
            self._state.publish(self._state.sequence_in(row), int(columns.num_computed[row]))
        return samples

    def _await_result(self, rows: np.ndarray, scored: tuple[Scored, ...]) -> None:
        tenancies = self._state.columns.tenancy[rows]
        last = self._state.last_in_flight
        if last is not None and np.array_equal(last.tenancies, tenancies):
            record = InFlight(
                self._state.step, rows, tenancies, last.sequences, last.token_lists, scored
            )  # the common case
        else:
            sequences = self._state.sequences_in(rows)
            record = InFlight(
                self._state.step, rows, tenancies, sequences, [sequence.token_ids for sequence in sequences], scored
            )
        self._state.last_in_flight = record
        self._state.in_flight.append(record)

    def _note_peaks(self) -> None:
        counters, used = self._state.counters, self._state.cache.pool.num_used
        counters.peak_running = max(counters.peak_running, self._state.num_running)
        if used > counters.peak_used_blocks:
            counters.peak_used_blocks = used
            counters.peak_unused_slots = self._state.unused_slots
