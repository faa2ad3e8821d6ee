"""What every plan must be, and return, whatever has led to it."""

from scheduler_svc.core.plan import Amounts, Lease, LeaseChange, Plan, Returned
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, State


class PlanChecks:
    """Of the scheduler's next plan: made right before it, for most rules are about what it changes."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._state = scheduler.state
        self._free_before = self._free_blocks()
        self._running_before = self._running()
        self._waited = list(self._state.queue)

    def check(self, plan: Plan) -> None:
        victims = self._running_before - self._running()
        stayed = self._running_before - victims
        computed = [self._state.sequence_in(row) for row in plan.rows.tolist()]
        self._check_blocks(plan)
        self._check_order(victims, stayed, plan)
        assert not victims & set(computed), "a victim is in the plan"
        assert not (victims and plan.started), "a step that preempts admits nobody"
        assert plan.num_tokens.sum() <= self._state.tokens_per_step
        if not self._is_exclusive(computed):
            self._check_nobody_idles(stayed - set(computed), plan)

    def _check_blocks(self, plan: Plan) -> None:
        block_size = self._state.lease.block_size
        taken = set(plan.appended_blocks.tolist()) | {b for s in plan.started for b in s.blocks}
        taken |= set(plan.copies.destinations)
        shared = {b for s in plan.started for b in s.blocks[: s.num_computed // block_size]}
        assert taken - shared <= self._free_before, "a plan uses a block that was freed while it was made"

    def _check_order(self, victims: set[Sequence], stayed: set[Sequence], plan: Plan) -> None:
        """The victims are the last in the order, or of lower priority than the first that waits and behind it."""
        first = next((sequence for sequence in self._waited if sequence.state is State.WAITING), None)
        for victim in victims:
            if all(victim.rank > other.rank for other in stayed):
                continue
            assert first is not None
            assert first.rank < victim.rank
            assert first.priority > victim.priority
            assert all(victim.rank > other.rank for other in stayed if other.priority < first.priority)
        for start in plan.started:
            assert first is None or self._state.sequence_in(start.row).rank < first.rank

    def _is_exclusive(self, computed: list[Sequence]) -> bool:
        """Whether it must be of one sequence or group, and is."""
        running = self._running()
        if any(sequence.alone for sequence in running):
            assert all(s.alone for s in computed), "a sequence that must be alone has company"
            assert len(computed) <= 1, "two sequences that must be alone"
            return True
        groups = {sequence.group for sequence in running}
        if alone := {group for group in groups if group is not None and group.handle.alone}:
            assert {sequence.group for sequence in computed} <= alone, "a group that must be alone has company"
            assert len(alone) == 1, "two groups that must be alone"
            return True
        return False

    def _check_nobody_idles(self, left_out: set[Sequence], plan: Plan) -> None:
        started = [self._state.sequence_in(start.row) for start in plan.started]
        behind = {
            sequence.row
            for sequence in left_out
            if not any(s.priority > sequence.priority and s.rank < sequence.rank for s in started)
        }
        budget_spent = int(plan.num_tokens.sum()) == self._state.tokens_per_step
        assert not behind or budget_spent or self._nothing_to_do(behind)

    def _running(self) -> set[Sequence]:
        return {self._state.sequence_in(row) for row in self._state.columns.running_rows().tolist()}

    def _free_blocks(self) -> set[int]:
        pool = self._state.cache.pool
        return {block for block in pool.leased if pool.is_free(block)}

    def _nothing_to_do(self, rows: set[int]) -> bool:
        columns = self._state.columns
        return all(
            columns.awaits_mask[r] or columns.num_tokens[r] + columns.in_flight[r] == columns.max_total[r] for r in rows
        )


class Lent:
    """What of the lease is held, and what others have of it."""

    def __init__(self, scheduler: Scheduler, lease: Lease) -> None:
        self._scheduler = scheduler
        self._lease = lease
        self._elsewhere = Returned([], [], 0)
        self._keep: Amounts | None = None  # of the last recall, until a plan returns what it is about

    @property
    def held(self) -> Amounts:
        state = self._scheduler.state
        return Amounts(state.cache.pool.num_leased, state.columns.num_leased, state.tokens_per_step)

    @property
    def elsewhere(self) -> Amounts:
        return Amounts(len(self._elsewhere.blocks), len(self._elsewhere.rows), self._elsewhere.tokens)

    @property
    def is_recalled(self) -> bool:
        """Whether anything is to be returned."""
        return self._keep is not None and any(h > k for h, k in zip(self.held, self._keep, strict=True))

    def recall(self, keep: Amounts) -> None:
        self._keep = keep
        self._scheduler.change_lease(LeaseChange(keep=keep))

    def grant(self, amounts: Amounts) -> None:
        blocks, rows, tokens = self._elsewhere.blocks, self._elsewhere.rows, self._elsewhere.tokens
        change = LeaseChange(blocks[: amounts.blocks], rows[: amounts.rows], amounts.tokens)
        self._scheduler.change_lease(change)
        self._elsewhere = Returned(blocks[amounts.blocks :], rows[amounts.rows :], tokens - amounts.tokens)
        self._keep = None

    def check(self, plan: Plan, held: Amounts) -> None:
        """What was recalled goes back with the next plan, all of it and nothing else. `held`: before the plan."""
        returned, others = plan.returned, self._elsewhere
        gone = Amounts(len(returned.blocks), len(returned.rows), returned.tokens)
        left = Amounts(*(amount - less for amount, less in zip(held, gone, strict=True)))
        assert left == self.held
        if self._keep is None:
            assert not any(gone)
        else:
            assert left.blocks == min(held.blocks, self._keep.blocks)
            assert left.rows == min(held.rows, self._keep.rows)
            assert left.tokens == min(held.tokens, max(self._keep.tokens, left.rows))
        self._keep = None
        self._elsewhere = Returned(
            others.blocks + returned.blocks, others.rows + returned.rows, others.tokens + returned.tokens
        )
        lent = [*self._scheduler.state.cache.pool.leased, *self._elsewhere.blocks]
        assert sorted(lent) == sorted(self._lease.block_ids), "a block is lost, or in two leases"
