"""A lease that changes while it runs: what is granted comes in, what others are to have goes back, and what is needed
is said.

What is to go back goes with the next plan, from what is free by then: blank blocks first, then those of the prefix
cache; where that is not enough, running sequences are preempted, last in the order first (`Planner._settle`).
"""

import numpy as np

from scheduler_svc.core.plan import NO_AMOUNTS, NOTHING_RETURNED, Amounts, Demand, LeaseChange, Returned
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.state import CoreState

AHEAD_TOKENS = 1024  # a sequence is taken to become longer by so many, if it may
FEW_WAITING = 32  # looked at one by one; of more it is taken that they are like these
TELL_PARTS = 16  # a demand that has changed by less than this part of everything is not told anew
PLANS_BETWEEN = 16  # looks at the demand, while nobody else has a part or as many run and wait as before
CLAIM_BLOCKS = 2  # more than what is known fills: as far as the plans in flight may come
CLAIM_PARTS = 32  # a claim is rounded up to such a part of everything, so as not to grow with each block


class Lending:
    """`keep` is what is left of the lease once all that was asked for has been returned; None: nothing was."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._pool = state.cache.pool  # of the session that the rest is about
        self._keep: Amounts | None = None
        self._told: Demand | None = None
        self._seen: tuple[int, int] = (0, 0)  # at the last look: what would make another one worth it
        self._seen_at = 0  # number of the plan before

    def change(self, change: LeaseChange) -> None:
        """Raises ValueError where something is granted that is leased already, or more than there is."""
        self._begin_anew()
        tokens, most = self._state.tokens_per_step + change.granted_tokens, self._state.lease.most.tokens
        if tokens > most:
            raise ValueError(f"{tokens} tokens a step; the largest lease has {most}")
        self._state.columns.lend(change.granted_rows)
        self._state.cache.lend(change.granted_blocks)
        self._state.tokens_per_step = tokens
        self._keep = change.keep

    @property
    def owed(self) -> Amounts:
        """What is to be returned."""
        self._begin_anew()
        if self._keep is None:
            return NO_AMOUNTS
        state, keep = self._state, self._keep
        return Amounts(
            max(0, state.cache.pool.num_leased - keep.blocks),
            max(0, state.columns.num_leased - keep.rows),
            max(0, state.tokens_per_step - keep.tokens),
        )

    def give_back(self) -> Returned:
        """Take what is owed out of what is free; there must be as much. A step keeps a token for each row."""
        owed, state = self.owed, self._state
        self._keep = None
        if not any(owed):
            return NOTHING_RETURNED
        rows = state.columns.take_back(owed.rows)
        tokens = max(0, min(owed.tokens, state.tokens_per_step - state.columns.num_leased))
        state.tokens_per_step -= tokens
        return Returned(state.cache.pool.take_back(owed.blocks), rows, tokens)

    def news(self, *, anyhow: bool) -> Demand | None:
        """The demand, if it is worth telling; or anyhow."""
        self._begin_anew()
        state = self._state
        num_live = state.num_running + state.num_waiting
        seen = (state.num_running, state.num_waiting) if self.shares else (bool(num_live), False)
        if not anyhow and seen == self._seen and state.step - self._seen_at < PLANS_BETWEEN:
            return None
        self._seen, self._seen_at = seen, state.step
        demand = self._demand()
        if not anyhow and not self._is_news(demand):
            return None
        self._told = demand
        return demand

    @property
    def shares(self) -> bool:
        """Whether somebody else has a part of what there is."""
        most, state = self._state.lease.most, self._state
        held = (state.cache.pool.num_leased, state.columns.num_leased, state.tokens_per_step)
        return held != most

    def _begin_anew(self) -> None:
        """If the session is another one."""
        if self._pool is not self._state.cache.pool:
            self._pool, self._keep, self._told = self._state.cache.pool, None, None
            self._seen, self._seen_at = (0, 0), 0

    def _is_news(self, demand: Demand) -> bool:
        told = self._told
        if told is None or (told.least_blocks, told.least_rows, told.claim) != (
            demand.least_blocks,
            demand.least_rows,
            demand.claim,
        ):
            return True
        pairs = zip(told.wants, demand.wants, self._state.lease.most, strict=True)
        return any(bool(was) != bool(wanted) or abs(wanted - was) * TELL_PARTS > most for was, wanted, most in pairs)

    def _demand(self) -> Demand:
        state, columns = self._state, self._state.columns
        rows = columns.running_rows()
        known = columns.num_tokens[rows] + columns.in_flight[rows]
        length = np.minimum(known + AHEAD_TOKENS, columns.max_total[rows] - 1)
        num_blocks = int((-(-length // state.lease.block_size)).sum())
        num_blocks += sum(group.growth(state.lease.block_size) for group in state.groups)
        num_rows = len(rows) + state.num_held
        num_tokens = num_rows + int((known - columns.num_computed[rows]).sum())
        few = [sequence for sequence, _ in zip(state.queue, range(FEW_WAITING), strict=False)]
        if few:
            scale = len(state.queue) / len(few)
            num_blocks += int(scale * sum(self._blocks_of(sequence, AHEAD_TOKENS) for sequence in few))
            num_rows += int(scale * sum(map(_rows_of, few)))
            num_tokens += int(scale * sum(len(sequence.token_ids) for sequence in few))
        wants = Amounts(*map(min, (num_blocks, num_rows, num_tokens), state.lease.most))
        first = self._first()
        if first is None:
            return Demand(wants, 0, 0, 0)
        most, part = state.lease.most.blocks, max(1, state.lease.most.blocks // CLAIM_PARTS)
        least = -(-self._blocks_of(first, CLAIM_BLOCKS * state.lease.block_size) // part) * part
        return Demand(wants, min(least, most), _rows_of(first), first.rank.number)

    def _first(self) -> Sequence | None:
        """Of all that run or wait, in the order."""
        firsts = (self._state.columns.first_running(), self._state.queue.first())
        live = [sequence for sequence in firsts if sequence is not None]
        first = min(live, key=lambda sequence: sequence.rank, default=None)
        return first if first is None or first.group is None else first.group.handle

    def _blocks_of(self, sequence: Sequence, ahead_tokens: int) -> int:
        """What it needs if it becomes longer by so many tokens, as far as it may, and shares nothing."""
        state, block_size = self._state, self._state.lease.block_size
        group = sequence.group
        known = len(sequence.token_ids) if group is None else group.num_tokens
        num_blocks = -(-min(known + ahead_tokens, sequence.max_total - 1) // block_size)
        if group is None:
            return num_blocks
        num_shared = min(num_blocks, (sequence.num_prompt - 1) // block_size)
        return min(num_shared + group.parameters.width * (num_blocks - num_shared), state.lease.most.blocks)


def _rows_of(sequence: Sequence) -> int:
    return 1 if sequence.group is None else sequence.group.parameters.width
