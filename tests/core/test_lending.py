"""A lease that changes while sequences run: what is recalled goes back with the next plan; what is lacking is told."""

import pytest

from scheduler_svc.core.audit import audit
from scheduler_svc.core.plan import Amounts, Demand, Lease, LeaseChange, Plan
from scheduler_svc.core.scheduler import NeverFits, Scheduler
from scheduler_svc.core.sequence import Sequence, State
from tests.core.plain_executor import PlainExecutor
from tests.core.run import assert_exact

B = 4
MOST = Amounts(40, 8, 64)


class Shared:
    """A scheduler with a part of what there is, and an executor."""

    def __init__(self, num_blocks: int, num_rows: int = 4, tokens: int = 32) -> None:
        self.scheduler = Scheduler()
        self.lease = Lease(list(range(1, num_blocks + 1)), list(range(num_rows)), tokens, B, most_lent=MOST)
        self.scheduler.attach(self.lease)
        self.executor = PlainExecutor(self.lease)
        self.told: Demand | None = None

    def submit(self, num_prompt: int, max_tokens: int) -> Sequence:
        sequence = Sequence("r", [(7 * i + num_prompt) % 50 for i in range(num_prompt)], max_tokens)
        self.scheduler.submit(sequence)
        return sequence

    def step(self) -> Plan | None:
        plan = self.scheduler.plan()
        audit(self.scheduler.state)
        if plan is not None:
            self.told = plan.demand or self.told
            self.scheduler.apply(self.executor.run(plan))
            audit(self.scheduler.state)
        return plan

    def keep(self, blocks: int, rows: int, tokens: int) -> Plan:
        self.scheduler.change_lease(LeaseChange(keep=Amounts(blocks, rows, tokens)))
        plan = self.step()
        assert plan is not None
        return plan


def test_free_blocks_go_back_before_anybody_is_preempted() -> None:
    shared = Shared(20)
    running = shared.submit(9, 20)
    shared.step()
    plan = shared.keep(10, 2, 10)
    assert (len(plan.returned.blocks), plan.returned.rows, plan.returned.tokens) == (10, [2, 3], 22)
    assert running.state is State.RUNNING
    assert plan.ended == []


def test_cached_blocks_go_back_and_are_found_no_more() -> None:
    shared = Shared(20)
    first = shared.submit(16, 1)
    while first.state is not State.ENDED:
        shared.step()
    assert shared.scheduler.state.cache.pool.num_cached == 4
    shared.keep(2, 4, 32)
    assert len(shared.scheduler.state.cache) == 2


def test_the_last_in_the_order_gives_way_and_goes_on_once_there_is_room_again() -> None:
    shared = Shared(12)
    sequences = [shared.submit(12, 6), shared.submit(16, 6)]
    shared.step()
    plan = shared.keep(6, 4, 32)
    assert len(plan.ended) == 1
    assert [sequence.state for sequence in sequences] == [State.RUNNING, State.WAITING]
    shared.scheduler.change_lease(LeaseChange(granted_blocks=list(range(30, 40))))
    while shared.step() is not None:
        pass
    for sequence in sequences:
        assert_exact([sequence], sequence.token_ids[: sequence.num_prompt])


def test_what_fits_the_largest_lease_waits_and_says_what_it_lacks() -> None:
    shared = Shared(10)
    large = shared.submit(100, 20)
    while shared.step() is not None:
        pass
    assert large.state is State.WAITING
    assert shared.told is not None
    assert shared.told.least_blocks >= 26
    assert shared.told.claim == large.rank.number
    shared.scheduler.change_lease(LeaseChange(granted_blocks=list(range(11, 41))))
    while large.state is not State.ENDED:
        assert shared.step() is not None
    assert_exact([large], large.token_ids[:100], 20)


def test_what_does_not_fit_the_largest_lease_is_refused() -> None:
    shared = Shared(10)
    with pytest.raises(NeverFits):
        shared.submit(150, 20)


def test_a_demand_that_is_gone_is_told() -> None:
    shared = Shared(20)
    shared.submit(9, 2)
    while shared.step() is not None:
        pass
    assert shared.told == Demand(Amounts(0, 0, 0), 0, 0, 0)


@pytest.mark.parametrize("change", [LeaseChange(granted_blocks=[5]), LeaseChange(granted_rows=[1])])
def test_what_is_leased_already_cannot_be_granted(change: LeaseChange) -> None:
    with pytest.raises(ValueError, match="leased already"):
        Shared(20).scheduler.change_lease(change)


def test_no_more_tokens_can_be_granted_than_the_largest_lease_has() -> None:
    scheduler = Shared(20).scheduler
    left = MOST.tokens - scheduler.state.tokens_per_step
    scheduler.change_lease(LeaseChange(granted_tokens=left))
    with pytest.raises(ValueError, match="the largest lease has"):
        scheduler.change_lease(LeaseChange(granted_tokens=1))
