"""Runs beam searches in rows: starts groups whole, waits for all beams of one, and forks them as the search says.

A beam's row draws one token and waits: its `max_total` is one token away. Once every beam of a group has its
candidates, and so none of them is in flight, the search chooses; rows of beams that are dropped, or were kept free,
take the place of others. The executor is told with the next plan. Blocks are shared by count; of a last block that is
partly filled each beam but one takes a copy before it writes (`Sharing.copy_on_write`).
"""

from dataclasses import dataclass

from scheduler_svc.core.beam_group import BeamGroup
from scheduler_svc.core.block_hashes import BlockHashes
from scheduler_svc.core.plan import ForkedRow, StartedRow
from scheduler_svc.core.sequence import EndReason, Sequence, State, TokenLogprobs
from scheduler_svc.core.state import CoreState


class MissingCandidates(Exception):
    """A result has no log-probabilities for a beam, or some of tokens that there are not."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What a beam hands on to those that go on from it."""

    blocks: list[int]
    num_published: int
    block_hashes: BlockHashes
    stretched: bool


class Beams:
    """The groups of one core. All that they know is in `CoreState.groups`, `CoreState.forks` and the groups."""

    def __init__(self, state: CoreState) -> None:
        self._state = state

    def start(self, group: BeamGroup, spare_blocks: int) -> list[StartedRow] | None:
        """Admit the group, for which there are rows enough, with blocks for all known tokens, if `spare_blocks` are
        enough of these; else change nothing and return None.

        A beam begins in the blocks of one before it, as far as their tokens are equal.
        """
        state, pool = self._state, self._state.cache.pool
        start = group.start(state.lease.block_size)
        beams, num_blocks = start.beams, start.num_blocks
        for beam in beams:
            state.stretch(beam)
        hits = state.cached_prefix(beams[0])
        needed = start.most_blocks - len(hits) + sum(map(pool.is_free, hits))
        if needed > spare_blocks:
            return None
        pool.share(hits)
        tables = [hits + pool.allocate(num_blocks - len(hits))]
        for like, num_shared in start.likes:
            shared = tables[like][:num_shared]
            pool.share(shared)
            tables.append(shared + pool.allocate(num_blocks - num_shared))
        computed = [len(hits), *(num_shared for _, num_shared in start.likes)]
        state.count_prompt(group.handle, len(hits) * state.lease.block_size)
        return self._enter(group, beams, tables, computed)

    def take(self, beam: Sequence, token: int, candidates: TokenLogprobs | None, is_current: bool) -> list[Sequence]:
        """A beam has got its candidates; if it is not current, it has lost its row since it was planned, and they are
        dropped. Returns the answers of the group if it has ended by that."""
        group = beam.group
        if group is None:
            raise RuntimeError("a beam without a group")
        handle, state = group.handle, self._state
        if token < 0:
            state.cache.withdraw(beam.block_hashes)
        if handle.state is State.ENDED:
            return []
        if token < 0:
            state.counters.not_finite += 1
            state.end(handle)
            return group.fail(EndReason.NOT_FINITE)
        if not is_current:
            handle.num_owed -= 1
            return []
        if candidates is None or not _are_tokens(candidates.top_ids, state.lease.vocab_size):
            raise MissingCandidates(f"row {beam.row}")
        state.columns.in_flight[beam.row] -= 1
        state.columns.max_total[beam.row] = state.columns.num_tokens[beam.row]  # nothing to do for it until then
        group.drawn[beam] = (token, candidates)
        return self._choose(group) if len(group.drawn) == len(group.beams) else []

    def _enter(
        self, group: BeamGroup, beams: list[Sequence], tables: list[list[int]], computed: list[int]
    ) -> list[StartedRow]:
        """Rows for these beams, of whose tables so many blocks are computed, and places for those to come."""
        state, handle = self._state, group.handle
        places = state.columns.reserve(group.parameters.width)
        starts = []
        for beam, table, num_blocks, place in zip(beams, tables, computed, places, strict=False):
            num_computed = num_blocks * state.lease.block_size
            beam.row = state.columns.enter(beam, table, num_computed, group.num_tokens + 1, place)
            starts.append(
                StartedRow(
                    row=beam.row,
                    token_ids=beam.token_ids,
                    num_prompt=handle.num_prompt,
                    num_computed=num_computed,
                    blocks=table,
                    sampling=beam.sampling,
                    end_token_ids=(),
                )
            )
        group.beams, group.places = beams, places[len(beams) :]
        group.waiting = None
        group.drawn.clear()
        state.groups[group] = None
        state.queue.remove(handle)
        handle.state = State.RUNNING
        return starts

    def _choose(self, group: BeamGroup) -> list[Sequence]:
        """Every beam has its candidates: go on from the best. Returns the answers if the search is over."""
        state = self._state
        parents = group.search.advance([group.drawn[beam][1] for beam in group.beams], group.max_tokens)
        state.counters.generated_tokens += len(group.search.beams) or 1
        if not parents:
            state.end(group.handle)
            return group.finish()
        self._fork(group, parents)
        switch = state.lease.rope_switch_len
        if switch and not group.beams[0].stretched and group.num_tokens > switch:
            state.preempt(group.handle)  # with one token more all its keys are others: it starts anew
        return []

    def _fork(self, group: BeamGroup, parents: list[int]) -> None:
        """Beam i of those to come goes on from beam `parents[i]`: in its row if it is the first to do so, else in a row
        that is free, or whose beam is dropped."""
        before, drawn = group.beams, group.drawn
        parts = [self._part(beam) for beam in before]
        firsts = {parent: i for i, parent in reversed(list(enumerate(parents)))}
        dropped = [index for index in range(len(before)) if index not in firsts]
        for i, parent in enumerate(parents):
            if firsts[parent] != i:
                self._state.cache.pool.share(parts[parent].blocks)
        for index in dropped:
            self._state.cache.pool.release(parts[index].blocks)
        group.beams = []
        for i, parent in enumerate(parents):
            beam = before[parent]
            if firsts[parent] != i:
                beam = before[dropped.pop()] if dropped else group.new_beam([])
                self._move_in(beam, parts[parent], None if beam in drawn else group.places.pop(0))
            self._lengthen(beam, group.num_tokens)
            token, row = group.search.last_token(i), before[parent].row
            if beam.row != row or token != drawn[before[parent]][0]:
                self._state.forks.append(ForkedRow(beam.row, row, token, beam.sampling, is_fresh=beam not in drawn))
            group.beams.append(beam)
        group.drawn = {}
        self._share_tails(group)

    def _part(self, beam: Sequence) -> _Part:
        columns = self._state.columns
        num_published = int(columns.num_published[beam.row])
        return _Part(columns.table(beam.row), num_published, beam.block_hashes, beam.stretched)

    def _move_in(self, beam: Sequence, part: _Part, place: tuple[int, int] | None) -> None:
        """Give the beam what another has: in its own row, or at a place that was kept free."""
        columns = self._state.columns
        beam.block_hashes, beam.stretched = part.block_hashes.copy(), part.stretched
        if place is None:
            columns.set_table(beam.row, part.blocks)
        else:
            beam.row = columns.enter(beam, part.blocks, 0, 0, place)
        columns.num_published[beam.row] = part.num_published

    def _lengthen(self, beam: Sequence, num_tokens: int) -> None:
        """The beam has so many tokens now, the last of them to be computed, and may draw one."""
        columns = self._state.columns
        columns.num_tokens[beam.row] = num_tokens
        columns.num_computed[beam.row] = num_tokens - 1
        columns.max_total[beam.row] = num_tokens + 1

    def _share_tails(self, group: BeamGroup) -> None:
        """Whoever writes next into a block that others have too must copy it before."""
        columns, block_size = self._state.columns, self._state.lease.block_size
        entry, offset = divmod(group.num_tokens - 1, block_size)
        for beam in group.beams:
            shares = offset > 0 and self._state.cache.pool.ref_count[int(columns.block_table[beam.row, entry])] > 1
            columns.set_sharing(beam.row, shares)


def _are_tokens(ids: list[int], vocab_size: int) -> bool:
    return not ids or (min(ids) >= 0 and max(ids) < vocab_size)
