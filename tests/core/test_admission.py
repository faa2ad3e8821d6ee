"""Who goes first, who gives way, and that nobody waits for ever."""

import pytest

from scheduler_svc.core.accounts import Accounts
from scheduler_svc.core.admission import AdmissionQueue
from scheduler_svc.core.plan import Lease
from scheduler_svc.core.room import Room
from scheduler_svc.core.sequence import Sampling, Sequence, State
from scheduler_svc.core.tenants import TenantLimits, Tenants
from tests.core.run import BLOCK_SIZE, Run, asked, assert_exact


def order_of(queue: AdmissionQueue) -> str:
    return "".join(sequence.request_id for sequence in queue)


def entered(queue: AdmissionQueue, *sequences: Sequence) -> AdmissionQueue:
    for sequence in sequences:
        queue.enter(sequence)
    return queue


class TestOrder:
    def test_one_tenant_is_served_first_come_first_served_whatever_its_requests_cost(self) -> None:
        lengths = [(name, 1 + 7919 * i % 50) for i, name in enumerate("zyxwa")]
        assert order_of(entered(AdmissionQueue(), *(asked(name, 9, length) for name, length in lengths))) == "zyxwa"

    def test_what_a_tenant_did_not_use_never_lets_its_later_requests_pass_earlier_ones(self) -> None:
        queue, unused = AdmissionQueue(), asked("u", 4, 5000)
        entered(queue, unused, asked("a", 4, 100))
        queue.remove(unused)
        queue.settle(unused)
        assert order_of(entered(queue, asked("b", 4, 1))) == "ab"

    def test_a_tenant_that_floods_the_queue_waits_behind_itself(self) -> None:
        queue = entered(AdmissionQueue(), *(asked(name, tenant="many") for name in "ABCDEF"))
        assert order_of(entered(queue, *(asked(name, tenant="few") for name in "ab"))) == "AaBbCDEF"

    def test_tenants_get_in_by_their_weights(self) -> None:
        queue = AdmissionQueue(Accounts(Tenants({"gold": TenantLimits(weight=3.0)})))
        entered(queue, *(asked(name, tenant="gold") for name in "GHIJKL"))
        assert order_of(entered(queue, *(asked(name) for name in "abcd"))) == "GHIaJKLbcd"

    def test_a_tenant_saves_up_nothing_while_it_is_idle(self) -> None:
        queue, early = AdmissionQueue(), asked("e", tenant="idle")
        served = [asked(name, tenant="busy") for name in "ABCD"]
        for sequence in (early, *served):
            queue.enter(sequence)
            queue.remove(sequence)
            sequence.num_cached = 0
            sequence.token_ids += [0] * 8
            queue.settle(sequence)
        late = [asked(name, tenant="idle") for name in "abcd"]
        assert order_of(entered(queue, asked("B", tenant="busy"), *late)) == "Babcd"

    def test_the_higher_priority_goes_first(self) -> None:
        places = [("a", 0), ("b", 2), ("c", -1), ("d", 2), ("e", 1)]
        queue = entered(AdmissionQueue(), *(asked(name, priority=priority) for name, priority in places))
        assert order_of(queue) == "bdeac"

    def test_a_tenants_own_backlog_of_low_priority_does_not_hold_up_its_high_one(self) -> None:
        queue = entered(AdmissionQueue(), *(asked("l", 500, 500, priority=-1) for _ in range(2000)))
        assert order_of(entered(queue, asked("h"))).startswith("hl")

    def test_an_output_without_a_limit_is_charged_like_others(self) -> None:
        many = [asked(name, max_tokens=None, tenant="many") for name in "ABC"]
        queue = entered(AdmissionQueue(), *many, asked("a", max_tokens=500, tenant="few"))
        assert order_of(queue) == "aABC"
        queue.remove(many[0])
        queue.settle(many[0])  # it got none
        assert order_of(entered(queue, asked("b", max_tokens=500, tenant="third"))) == "abBC"

    def test_a_prompt_of_many_samples_is_served_once(self) -> None:
        """Else one such request would age all that wait, and forgive what tenants owe."""
        queue, first = AdmissionQueue(Accounts(ageing_tokens=2000)), asked("n", 1000, 1)
        first.held = [Sequence("n", first.token_ids, 1, Sampling(index=i)) for i in range(1, 100)]
        entered(queue, asked("l", priority=-1, tenant="l"), first)
        queue.remove(first)
        for sample in (first, *first.held):
            sample.num_cached = 0
            sample.token_ids = [*sample.token_ids, 0]
            queue.settle(sample)
        assert order_of(entered(queue, asked("h"))) == "hl"

    def test_samples_have_their_requests_place(self) -> None:
        queue, first = AdmissionQueue(), asked("a")
        first.held = [Sequence("a", [1], 8, Sampling(index=i)) for i in (1, 2)]
        entered(queue, first, asked("b"))
        for sample in reversed(first.held):
            queue.push(sample)
        assert [(s.request_id, s.sampling.index) for s in queue] == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]

    def test_names_of_tenants_are_not_kept_for_ever(self) -> None:
        accounts = Accounts()
        queue = AdmissionQueue(accounts)
        for i in range(10_000):
            sequence = asked("a", tenant=f"tenant {i}")
            queue.enter(sequence)
            queue.remove(sequence)
            sequence.num_cached = 0
            sequence.token_ids += [0] * 8
            queue.settle(sequence)
        assert len(accounts._accounts) <= 2048
        assert not queue.has_tiers

    def test_nor_are_those_of_tenants_that_owe_for_what_they_cancelled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("scheduler_svc.core.accounts.MOST_IDLE_ACCOUNTS", 3000)
        accounts = Accounts()
        queue = entered(AdmissionQueue(accounts), asked("waits"))
        for i in range(20_000):
            sequence = asked("a", 50, tenant=f"tenant {i}")
            queue.enter(sequence)
            queue.remove(sequence)
            queue.settle(sequence)
        assert len(accounts._accounts) <= 6001
        assert order_of(entered(queue, asked("b"))) == "waitsb", "the account of one that waits is kept"


class TestTurns:
    def test_whoever_waits_is_passed_by_higher_priority_only_until_so_much_was_served(self) -> None:
        """Two callers of high priority keep the only row busy for ever; one of low priority gets it all the same."""
        run = Run(num_rows=1, queue=AdmissionQueue(Accounts(ageing_tokens=200)))
        low, passed = asked("low", priority=-1), 0
        run.submit(asked("first", priority=0))
        run.submit(low)
        while low.num_cached is None:
            if sum(s.request_id == "high" for s in run.scheduler.state.queue) < 2:
                run.submit(asked("high", tenant=f"t{passed}"))
                passed += 1
            assert passed < 60, "the low one starves"
            run.step()
        assert passed > 5, "priority was worth nothing"
        run.to_the_end()

    def test_new_tenants_one_after_the_other_cannot_hold_up_anybody_for_ever(self) -> None:
        run = Run(num_rows=1)
        large, passed = asked("large", 20, 40, tenant="a"), 0
        run.submit(asked("first"))
        run.submit(large)
        while large.num_cached is None:
            if run.scheduler.state.num_waiting < 3:
                run.submit(asked("small", 1, 2, tenant=f"t{passed}"))
                passed += 1
            assert passed < 200, "the large one starves"
            run.step()
        run.to_the_end()

    @pytest.mark.parametrize("num_prompt", [4, 40])
    def test_c6_3_the_first_of_higher_priority_takes_a_row_in_the_next_plan_but_one(self, num_prompt: int) -> None:
        run = Run(num_rows=2)
        low = [asked(name, num_prompt, 30) for name in "ab"]
        for sequence in low:
            run.submit(sequence)
        run.step()
        high = asked("h", 4, 5, priority=1)
        run.submit(high)
        plan = run.step()
        assert high.state is State.WAITING
        assert low[1].state is State.WAITING, "the last in the order gives way"
        assert [run.scheduler.state.sequence_in(row) for row in plan.rows.tolist()] == [low[0]]
        assert [start.token_ids for start in run.step().started] == [high.token_ids[:4]]
        run.to_the_end()
        assert run.scheduler.state.counters.preemptions == 1
        for sequence in (*low, high):
            assert_exact([sequence], sequence.token_ids[: sequence.num_prompt], sequence.max_tokens)

    def test_c6_3_equal_priority_takes_nothing_from_those_that_run(self) -> None:
        run = Run(num_rows=1)
        first = asked("first", 4, 30, tenant="a", priority=1)
        run.submit(first)
        run.step()
        run.submit(asked("second", 1, 1, tenant="b", priority=1))
        run.submit(asked("low", 1, 1, priority=0))
        run.to_the_end()
        assert run.scheduler.state.counters.preemptions == 0

    def test_c6_3_a_preempted_request_resumes_before_all_that_came_later(self) -> None:
        run = Run(num_blocks=12, num_rows=4)
        a, b = asked("z", 8, 30), asked("y", 16, 28)
        later = [asked(name, 1, 2) for name in "dc"]
        run.submit(a)
        run.submit(b)
        while b.num_output == 0 or b.state is not State.WAITING:
            run.step()
        for sequence in later:
            run.submit(sequence)
        while b.state is State.WAITING:
            assert all(sequence.state is State.WAITING for sequence in later)
            run.step()
        run.to_the_end()
        for sequence in (a, b, *later):
            assert_exact([sequence], sequence.token_ids[: sequence.num_prompt], sequence.max_tokens)

    @pytest.mark.parametrize("place", range(5))
    def test_c6_2_the_plan_of_a_preemption_holds_all_others_and_nothing_of_the_victim(self, place: int) -> None:
        """Five run; the blocks of one, wherever it is among them, go to one of high priority."""
        run = Run(num_blocks=22, num_rows=6)
        running = [asked(name, 12, 5, priority=-2 if i == place else -1) for i, name in enumerate("abcde")]
        for sequence in running:
            run.submit(sequence)
        run.step()
        free = {b for b in run.lease.block_ids if run.scheduler.state.cache.pool.is_free(b)}
        rows = {sequence.request_id: sequence.row for sequence in running}
        high = asked("h", 12, 5, priority=1)
        run.submit(high)
        plan = run.step()
        assert running[place].state is State.WAITING
        assert set(plan.rows.tolist()) == {rows[s.request_id] for i, s in enumerate(running) if i != place}
        assert plan.num_tokens.tolist() == [1] * 4
        assert plan.ended == [rows[running[place].request_id]]
        assert set(plan.appended_blocks.tolist()) <= free, "a block that was freed in this plan is in it"
        run.to_the_end()
        for sequence in (*running, high):
            assert_exact([sequence], sequence.token_ids[:12], 5)

    @pytest.mark.parametrize("place", range(5))
    def test_c6_2_nor_has_that_of_one_that_gives_way_because_blocks_run_out(self, place: int) -> None:
        run = Run(num_blocks=17, num_rows=6)
        running = [run.submit(asked(name, 9, 8, priority=-2 if i == place else -1)) for i, name in enumerate("abcde")]
        run.step()
        rows = [sequence.row for sequence in running]
        while running[place].state is State.RUNNING:
            free = {b for b in run.lease.block_ids if run.scheduler.state.cache.pool.is_free(b)}
            plan = run.step()
        assert plan.ended == [rows.pop(place)]
        assert sorted(plan.rows.tolist()) == sorted(rows)
        assert plan.num_tokens.tolist() == [1] * 4
        assert set(plan.appended_blocks.tolist()) <= free
        assert run.scheduler.state.counters.preemptions == 1, "more gave way than must"
        run.to_the_end()
        for sequence in running:
            assert_exact([sequence], sequence.token_ids[:9], 8)

    def test_nobody_is_preempted_for_what_would_not_fit_even_so(self) -> None:
        run = Run(num_blocks=20)
        run.submit(asked("equal", 40, 8, priority=1))
        run.submit(asked("low", 8, 8))
        run.step()
        run.submit(asked("large", 60, 8, priority=1))
        run.step()
        assert run.scheduler.state.counters.preemptions == 0
        run.to_the_end()

    def test_nobody_gives_way_while_prompts_before_the_first_take_all_tokens(self) -> None:
        run = Run(num_blocks=300, num_rows=2, tokens_per_step=16)
        low = run.submit(asked("low", 2, 100, priority=-1))
        run.step()
        long = run.submit(asked("long", 600, 4))
        run.step()
        high = run.submit(asked("h", 2, 4))
        while long.num_output == 0:
            before = low.num_output
            run.step()
            if long.row >= 0 and 600 - run.scheduler.state.columns.num_computed[long.row] >= 32:
                assert low.num_output == before + 1
        run.step()
        assert high.num_output > 0, "it starts as soon as there are tokens"
        run.to_the_end()
        assert run.scheduler.state.counters.preemptions == 1

    def test_rows_that_samples_will_join_in_later_cost_nobody_its_row_now(self) -> None:
        run = Run(num_blocks=300, num_rows=8, tokens_per_step=16)
        low = [asked(name, 2, 60, priority=-1) for name in "ab"]
        for sequence in low:
            run.submit(sequence)
        run.step()
        leader = asked("n", 400, 4)
        leader.held = [Sequence("n", leader.token_ids, 4, Sampling(index=i)) for i in range(1, 8)]
        run.submit(leader)
        run.step()
        high = asked("h", 2, 4, priority=1)
        run.submit(high)
        run.step()
        run.step()
        assert high.num_output > 0
        assert run.scheduler.state.counters.preemptions == 0
        run.to_the_end()

    def test_how_many_must_give_way_is_found_without_trying_every_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A try is a pass over the tables of all that run; one for each of hundreds takes half a second a plan."""
        tried, suffice = 0, Room._suffice

        def counted(*given: object) -> bool:
            nonlocal tried
            tried += 1
            return suffice(*given)

        monkeypatch.setattr(Room, "_suffice", counted)
        run = Run(num_blocks=400, num_rows=80, tokens_per_step=400)
        low = [run.submit(asked(f"l{i}", 8, 20)) for i in range(64)]
        run.step()
        run.step()
        run.submit(asked("h", 1400, 4, priority=1))
        run.step()
        assert sum(sequence.state is State.WAITING for sequence in low) > 40
        assert 0 < tried <= 1 + 7
        run.to_the_end()

    def test_no_more_give_way_than_must(self) -> None:
        run = Run(num_blocks=24)
        low = [asked(name, 16, 4) for name in "abcd"]
        for sequence in low:
            run.submit(sequence)
        run.step()
        run.submit(asked("h", 20, 4, priority=1))
        run.step()
        assert [sequence.state for sequence in low] == [State.RUNNING] * 3 + [State.WAITING]
        run.to_the_end()

    def test_a_step_has_tokens_for_higher_priority_before_a_long_prompt_of_lower(self) -> None:
        run = Run(num_blocks=300, tokens_per_step=16)
        run.submit(asked("long", 800, 2))
        run.step()
        high = asked("h", 20, 4, priority=1)
        run.submit(high)
        run.step()
        run.step()
        assert high.num_output == 1
        run.to_the_end()


def test_a_return_of_the_executor_keeps_the_order() -> None:
    run = Run(num_rows=2)
    sequences = [asked(name, priority=priority) for name, priority in [("a", 0), ("b", 1), ("c", 0), ("d", 1)]]
    for sequence in sequences:
        run.submit(sequence)
    run.step()
    run.scheduler.detach()
    assert order_of(run.scheduler.state.queue) == "bdac"
    run.scheduler.attach(Lease([1, 2, 3, 4], [0], 8, BLOCK_SIZE))
    assert order_of(run.scheduler.state.queue) == "bdac"
