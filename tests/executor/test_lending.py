"""Who is lent how much, when demands change and schedulers come and go."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from executor_svc.demands import HOLD_S
from executor_svc.leases import NOTHING, Amounts, Lease, Ownership
from executor_svc.lending import Change, Lender

MOST = Amounts(320, 64, 640)


class Lending:
    """A lender whose sessions return what they are told to at once, unless they are told not to."""

    def __init__(self, most: Amounts = MOST) -> None:
        self.ownership = Ownership(most.rows, most.blocks + 1, most.tokens)
        self.lender = Lender(self.ownership)
        self.now = 0.0
        self.num_newcomers = 0
        self.moves = 0  # recalls
        self.recalls: dict[int, Amounts] = {}  # not served yet
        self.stubborn: set[int] = set()
        self.last = 0

    def attach(self) -> int:
        """The number of a new session, whose first lease comes as soon as the others have returned a part."""
        self.num_newcomers += 1
        self.settle()
        assert not self.num_newcomers
        return self.last

    def settle(self) -> None:
        self.lender.is_settled = False
        while not self.lender.is_settled:
            self.admit()
            for change in self.lender.rebalance(self.now, self.num_newcomers):
                self.take(change)

    def admit(self) -> None:
        while self.num_newcomers and (lease := self.lender.first_lease(self.now, self.num_newcomers)) is not None:
            assert min(len(lease.block_ids), len(lease.row_ids)) > 0
            self.last += 1
            self.num_newcomers -= 1
            self.lender.open(self.last, lease)

    def take(self, change: Change) -> None:
        if change.recall is None:
            self.recalls.pop(change.session, None)
            return
        self.moves += 1
        self.recalls[change.session] = change.recall
        if change.session not in self.stubborn:
            self.serve(change.session)

    def serve(self, session: int) -> None:
        held, keep = self.held(session), self.recalls.pop(session)
        gone = Amounts(*(max(0, has - kept) for has, kept in zip(held, keep, strict=True)))
        blocks = np.flatnonzero(self.ownership.of_block == session)[: gone.blocks].astype(np.int32)
        rows = np.flatnonzero(self.ownership.of_row == session)[: gone.rows].astype(np.int32)
        self.lender.give_back(session, Lease(blocks, rows, gone.tokens))

    def say(self, session: int, wants: Amounts, least: Amounts = NOTHING, claim: int = 0) -> None:
        self.lender.note_demand(session, wants, least, claim, self.now)
        self.settle()

    def held(self, session: int) -> Amounts:
        return self.ownership.held_by(session)


def test_one_that_is_alone_has_all() -> None:
    lending = Lending()
    assert lending.held(lending.attach()) == MOST


def test_a_newcomer_gets_a_floor_and_what_it_wants_afterwards() -> None:
    lending = Lending()
    first = lending.attach()
    second = lending.attach()
    assert lending.held(second) == Amounts(10, 2, 20), "it has said nothing yet"
    lending.say(second, MOST)
    assert lending.held(first) == lending.held(second) == Amounts(160, 32, 320)


def test_a_small_demand_is_met_and_the_rest_is_the_others() -> None:
    lending = Lending()
    first, second = lending.attach(), lending.attach()
    lending.say(second, Amounts(40, 8, 100))
    assert lending.held(second) == Amounts(40, 8, 100)
    assert lending.held(first) == Amounts(280, 56, 540)


def test_what_a_session_had_is_granted_when_it_ends() -> None:
    lending = Lending()
    first, second = lending.attach(), lending.attach()
    lending.say(second, MOST)
    lending.lender.close(first)
    lending.settle()
    assert lending.held(second) == MOST


def test_what_a_session_had_goes_to_those_who_need_it_most() -> None:
    lending = Lending()
    first, second, third = lending.attach(), lending.attach(), lending.attach()
    lending.say(first, MOST)
    lending.say(second, MOST)
    lending.lender.close(third)
    lending.settle()
    assert lending.held(first) == lending.held(second) == Amounts(160, 32, 320)


def test_demands_that_change_a_little_move_nothing() -> None:
    lending = Lending()
    first, second = lending.attach(), lending.attach()
    lending.say(first, MOST)
    lending.say(second, Amounts(100, 20, 200))
    moves = lending.moves
    for blocks in (105, 95, 108, 100, 110):
        lending.say(second, Amounts(blocks, 20, 200))
        lending.now += 2 * HOLD_S
    assert lending.moves == moves


def test_a_demand_that_goes_up_and_down_keeps_what_it_was_lent() -> None:
    lending = Lending()
    first, second = lending.attach(), lending.attach()
    lending.say(first, MOST)
    lending.say(second, MOST)
    moves = lending.moves
    for _ in range(50):
        lending.say(second, Amounts(20, 4, 40))
        lending.now += HOLD_S / 2
        lending.settle()
        lending.say(second, MOST)
        lending.now += HOLD_S / 2
        lending.settle()
    assert lending.moves == moves
    assert lending.held(second) == Amounts(160, 32, 320)


def test_a_demand_that_has_fallen_for_a_while_is_lent_to_others() -> None:
    lending = Lending()
    first, second = lending.attach(), lending.attach()
    lending.say(first, MOST)
    lending.say(second, MOST)
    lending.say(second, Amounts(20, 4, 40))
    assert lending.held(first) == Amounts(160, 32, 320)
    lending.now += HOLD_S
    lending.settle()
    assert lending.held(first) == Amounts(300, 60, 600)


def test_demands_above_the_fair_share_are_met_one_session_at_a_time_in_the_order_of_asking() -> None:
    lending = Lending()
    first, second = lending.attach(), lending.attach()
    lending.say(first, MOST, Amounts(300, 1, 0), claim=1)
    lending.say(second, MOST, Amounts(250, 1, 0), claim=7)
    assert lending.held(first).blocks >= 300
    assert lending.held(second).blocks == 20, "what is left"
    lending.say(first, MOST, Amounts(300, 1, 0), claim=2)
    assert lending.held(second).blocks >= 250, "the next claim of the same session stands behind"
    lending.say(second, MOST, Amounts(250, 1, 0), claim=8)
    assert lending.held(first).blocks >= 300


def test_a_claim_to_everything_leaves_others_nothing_and_they_stand_in_line_for_their_share() -> None:
    lending = Lending()
    first, second = lending.attach(), lending.attach()
    lending.say(second, MOST, Amounts(5, 1, 0), claim=1)
    lending.say(first, MOST, Amounts(320, 64, 0), claim=1)
    assert lending.held(first)[:2] == MOST[:2]
    lending.say(first, MOST, Amounts(320, 64, 0), claim=2)
    assert lending.held(second)[:2] == (160, 32)
    lending.say(second, MOST, Amounts(5, 1, 0), claim=2)
    assert lending.held(first)[:2] == MOST[:2]
    lending.say(first, NOTHING)
    assert lending.held(second).blocks >= 160


def test_a_recall_that_is_not_served_is_overdue() -> None:
    lending = Lending()
    first = lending.attach()
    lending.stubborn.add(first)
    lending.num_newcomers = 1
    lending.settle()
    lending.now += 1.0
    assert lending.lender.overdue(lending.now, 0.9) == [first]
    assert lending.lender.overdue(lending.now, 1.1) == []
    lending.serve(first)
    assert lending.lender.overdue(lending.now, 0.9) == []


def test_there_are_no_more_sessions_than_can_have_a_row_each() -> None:
    lending = Lending(Amounts(9, 3, 20))
    for _ in range(3):
        lending.attach()
    lending.num_newcomers = 1
    lending.settle()
    assert lending.num_newcomers == 1


amounts = st.builds(Amounts, st.integers(0, 400), st.integers(0, 80), st.integers(0, 800))


class Lenders(RuleBasedStateMachine):
    """Demands, newcomers, ends and sessions that take their time, in any order."""

    @initialize(
        most=st.sampled_from([MOST, Amounts(8, 4, 5), Amounts(40, 3, 9), Amounts(1000, 16, 4096)]),
    )
    def begin(self, most: Amounts) -> None:
        self.lending = Lending(most)
        self.sessions: list[int] = []

    def _settle(self) -> None:
        before = self.lending.last
        self.lending.settle()
        self.sessions += range(before + 1, self.lending.last + 1)

    @rule()
    def attach(self) -> None:
        self.lending.num_newcomers += 1
        self._settle()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), wants=amounts, least=amounts, claim=st.integers(0, 3))
    def say(self, data: st.DataObject, wants: Amounts, least: Amounts, claim: int) -> None:
        most = self.lending.ownership.most
        wants, least = (Amounts(*map(min, said, most)) for said in (wants, least))
        session = data.draw(st.sampled_from(self.sessions))
        self.lending.lender.note_demand(session, wants, Amounts(least.blocks, least.rows, 0), claim, self.lending.now)
        self._settle()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        self.sessions.remove(session)
        self.lending.stubborn.discard(session)
        self.lending.recalls.pop(session, None)
        self.lending.lender.close(session)
        self._settle()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def dawdle(self, data: st.DataObject) -> None:
        self.lending.stubborn.add(data.draw(st.sampled_from(self.sessions)))

    @precondition(lambda self: self.sessions and self.lending.recalls)
    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.lending.recalls)))
        self.lending.stubborn.discard(session)
        self.lending.serve(session)
        self._settle()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.lending.now += seconds
        self._settle()

    @invariant()
    def nothing_is_lent_twice_and_nothing_is_lost(self) -> None:
        ownership = self.lending.ownership
        for session in self.sessions:
            held = ownership.held_by(session)
            assert held.blocks == np.count_nonzero(ownership.of_block == session)
            assert held.rows == np.count_nonzero(ownership.of_row == session)
        lent = [ownership.held_by(session) for session in self.sessions]
        total = [sum(amounts) for amounts in zip(*lent, ownership.free, strict=True)]
        assert total == list(ownership.most)
        assert min(ownership.free) >= 0

    @invariant()
    def every_session_has_more_tokens_than_rows(self) -> None:
        for session in self.sessions:
            held = self.lending.held(session)
            assert held.tokens > held.rows or held.rows == 0

    @invariant()
    def all_blocks_are_lent_once_everything_has_been_returned(self) -> None:
        if self.sessions and not (self.lending.recalls or self.lending.num_newcomers):
            assert self.lending.ownership.free.blocks == 0
            assert self.lending.ownership.free.tokens == 0


TestLenders = Lenders.TestCase
TestLenders.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
