"""Sizing: its arithmetic by hand, and a simulation that loses nothing and is as fast as its pieces."""

import json

import numpy as np
import pytest

from benchmarks.capacity.costs import SchedulerCosts, TaskCosts, Work
from benchmarks.capacity.latency import StepLatency
from benchmarks.capacity.observed import Room, System
from benchmarks.capacity.on_paper import LINK_S, Clock
from benchmarks.capacity.pieces import Pieces, PiecesFileError
from benchmarks.capacity.plans import Kind, for_a_rate, for_an_executor
from benchmarks.capacity.simulation import Fleet, Simulation
from benchmarks.capacity.sizing import Cell, Lengths, TooFast, at_rate, cell_for, loop_share, most_running, with_running
from benchmarks.capacity.steps import measured
from benchmarks.claims.paper import StepWork
from benchmarks.claims.requests import Mix
from executor_svc.settings import parse
from executor_svc.simulated.runner import Latency

FREE = TaskCosts()
COSTS = TaskCosts(request_s=3e-4, prompt_token_s=1e-7, step_s=2e-4, message_s=3e-5, token_s=4e-6)
EQUAL = Mix("equal", ((32, 16),))
VARIED = Mix("varied", tuple((1 + 37 * i % 300, 1 + 23 * i % 90) for i in range(50)))
FOREVER = float("inf")


def _drained(fleet: Fleet, mix: Mix, rate: float, count: int) -> Simulation:
    simulation = Simulation(fleet, mix, rate)
    simulation.come(count)
    simulation.clock.run_until(FOREVER)
    return simulation


def test_what_happens_at_one_time_happens_in_the_order_in_which_it_was_asked_for() -> None:
    clock, seen = Clock(), []
    clock.after(2.0, lambda: seen.append(("late", clock.now)))
    clock.after(1.0, lambda: clock.after(1.0, lambda: seen.append(("last", clock.now))))
    clock.after(1.0, lambda: seen.append(("first", clock.now)))
    clock.run_until(1.5)
    assert (seen, clock.now) == ([("first", 1.0)], 1.5)
    clock.run_until(2.0)
    assert seen == [("first", 1.0), ("late", 2.0), ("last", 2.0)]


@pytest.mark.parametrize(("schedulers", "executors", "cells"), [(1, 1, 1), (3, 1, 1), (1, 3, 1), (2, 2, 2)])
def test_every_request_ends_with_all_of_its_tokens(schedulers: int, executors: int, cells: int) -> None:
    room = Room(max_rows=24, num_blocks=135, tokens_per_step=96)  # so little that sequences are preempted
    fleet = Fleet(StepLatency(1000, 5, 1), COSTS, room, schedulers, executors, cells)
    simulation = _drained(fleet, VARIED, 400.0, 300)
    tally = simulation.tally
    assert tally.came == tally.ended == len(tally.ttft_s) == 300
    assert tally.tokens == sum(VARIED.lengths[i % 50][1] for i in range(300))
    assert tally.messages == len(tally.ttft_s) + len(tally.gaps_s)
    cores = [session.core for loop in simulation.loops for session in loop.sessions]
    assert all(core.state.cache.pool.num_used == 0 for core in cores)
    if (schedulers, executors) == (1, 1):
        assert sum(core.state.counters.preemptions for core in cores) > 0


def test_streams_rest_where_there_are_many_and_nothing_of_them_is_lost() -> None:
    room = Room(max_rows=128, num_blocks=2000, tokens_per_step=4096)
    tally = _drained(Fleet(StepLatency(2000), FREE, room), VARIED, 4000.0, 300).tally
    assert tally.tokens == sum(VARIED.lengths[i % 50][1] for i in range(300))
    assert tally.messages < tally.tokens / 1.5


def test_a_request_alone_takes_what_its_steps_and_messages_take() -> None:
    latency = StepLatency(10_000, 100, 1000)
    simulation = _drained(Fleet(latency, COSTS), EQUAL, 1e-3, 1)
    message_s = COSTS.message_s + COSTS.token_s
    # There and back, and what the loop does: the request, the result with the next plan in it, and the message.
    around_s = COSTS.request_s + 32 * COSTS.prompt_token_s + 2 * LINK_S + COSTS.step_s + message_s
    assert simulation.tally.ttft_s == pytest.approx([latency.step_s(32, 32) + around_s])
    # Later steps are planned ahead, so neither the way nor the scheduler is between them.
    gaps = simulation.tally.gaps_s
    assert gaps[1:] == pytest.approx([latency.step_s(1, context) for context in range(34, 48)])
    assert len(gaps) == 15


def test_where_schedulers_cost_nothing_the_executor_decides() -> None:
    room, latency = Room(max_rows=8), StepLatency(5000)
    lengths = Lengths.of(EQUAL)
    most = with_running(latency, lengths, most_running(room, lengths))
    outcome = _window(Fleet(latency, FREE, room), EQUAL, 3 * most.rate)
    assert outcome.executor_share == pytest.approx(1.0, abs=0.02)
    # A row is empty for the plan in which its next sequence begins, and for the one in flight besides.
    assert 0.8 * most.tokens_s < outcome.tokens_s <= 1.001 * most.tokens_s


def test_a_slow_scheduler_puts_several_tokens_into_a_message() -> None:
    slow = TaskCosts(message_s=1e-3)
    outcome = _window(Fleet(StepLatency(1000), slow, Room(max_rows=32)), EQUAL, 400.0)
    assert outcome.loop_share == pytest.approx(1.0, abs=0.02)
    assert outcome.tokens_per_message > 2
    assert outcome.work.messages <= 1001 * outcome.seconds


def test_more_load_makes_answers_later_and_more_schedulers_less_so() -> None:
    latency = StepLatency(2000, 10)
    by_rate = [np.mean(_window(Fleet(latency, COSTS), EQUAL, rate).ttft_s) for rate in (20.0, 200.0, 800.0)]
    assert by_rate == sorted(by_rate)
    shares = [_window(Fleet(latency, COSTS, schedulers=count), EQUAL, 800.0).loop_share for count in (1, 2, 4)]
    assert shares == sorted(shares, reverse=True)
    assert shares[1] > shares[0] / 2  # each takes part in every step


def _window(fleet: Fleet, mix: Mix, rate: float):
    simulation = Simulation(fleet, mix, rate)
    simulation.come()
    simulation.clock.run_until(1.0)
    return simulation.window(2.0)


def test_a_simulation_that_begins_with_what_runs_is_steady_at_once() -> None:
    latency, lengths = StepLatency(4000, 20, 20), Lengths.of(VARIED)
    steady = at_rate(latency, lengths, 60.0)
    simulation = Simulation(Fleet(latency, COSTS, cells=4), VARIED, 240.0)
    simulation.begin_with(round(4 * steady.running))
    states = [session.core.state for loop in simulation.loops for session in loop.sessions]
    # But for those to which one token was to come: that comes with the prompt.
    assert 0.9 * 4 * steady.running <= sum(state.num_running for state in states) <= round(4 * steady.running)
    simulation.come()
    first, later = simulation.window(2.0), simulation.window(2.0)
    assert first.tokens_s == pytest.approx(4 * steady.tokens_s, rel=0.15)
    assert later.tokens_s == pytest.approx(first.tokens_s, rel=0.15)
    assert {state.tokens_per_step for state in states} == {Room().tokens_per_step}


def test_a_steady_load_by_hand() -> None:
    lengths = Lengths(prompt=20.0, output=10.0, held=25.0)
    latency = StepLatency(1000, 10, 400)
    # 100 rows: 300 tokens and 2,500 of context in a step, so 1 + 3 + 1 ms; each row's request ends after 10 steps.
    steady = with_running(latency, lengths, 100)
    assert steady.step_s == pytest.approx(5e-3)
    assert steady.rate == pytest.approx(2000)
    assert steady.work.amounts == pytest.approx((2000, 40_000, 200, 20_000, 20_000))
    assert at_rate(latency, lengths, 2000).running == pytest.approx(100)
    with pytest.raises(ValueError, match=r"1\.20 of the executor's time"):
        at_rate(latency, lengths, 3000)
    costs = TaskCosts(request_s=1e-4, step_s=1e-3, message_s=1e-5)
    assert loop_share(costs, steady) == pytest.approx(0.2 + 0.2 + 0.2)
    assert loop_share(costs, steady, schedulers=2) == pytest.approx(0.2 + 0.1 + 0.1)
    assert loop_share(costs, steady, executors=3) == pytest.approx(1.8)
    assert cell_for(costs, steady, busy=0.7) == Cell(1, 1)
    assert cell_for(costs, steady, busy=1.21) == Cell(1, 2)
    assert cell_for(costs, steady, busy=0.35) == Cell(3, 1)
    with pytest.raises(TooFast, match=r"plans alone take 0\.20 .* must be below 0\.1"):
        cell_for(costs, steady, busy=0.1)


def test_means_of_a_mix_weigh_what_a_sequence_holds_by_how_long_it_runs() -> None:
    assert Lengths.of(Mix("two", ((10, 2), (20, 8)))) == Lengths(15.0, 5.0, (2 * 11 + 8 * 24) / 10)


def test_rows_or_blocks_bound_what_runs() -> None:
    lengths = Lengths(prompt=20.0, output=10.0, held=152.0)  # ten blocks with the half that is empty
    assert most_running(Room(max_rows=64, num_blocks=1000), lengths) == 64
    assert most_running(Room(max_rows=256, num_blocks=1000), lengths) == pytest.approx(95)


def test_costs_are_found_again_in_what_they_add_up_to() -> None:
    works = [Work(10, 500, 100, 900, 900), Work(200, 100, 90, 800, 800), Work(5, 50, 900, 3000, 9000)]
    works += [Work(9, 9, 9, 9, 99), Work(1, 4000, 30, 60, 60)]
    found = TaskCosts.fitted(works, [COSTS.of(work) for work in works])
    for name in TaskCosts.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name), rel=1e-6)
    assert works[0] + works[2] == Work(15, 550, 1000, 3900, 9900)


def test_a_latency_is_found_again_and_is_that_of_the_simulated_executor() -> None:
    latency = StepLatency(1500, 12, 340)
    works = [StepWork(count, 1, context) for count, context in ((1, 5), (1, 4000), (300, 300), (64, 9000), (7, 80))]
    found = StepLatency.of_steps(works, [latency.step_s(work.num_tokens, work.num_context) for work in works])
    assert (found.fixed_us, found.per_token_us, found.per_context_token_ns) == pytest.approx((1500, 12, 340))
    settings = parse(["--simulate", *latency.flags()])
    told = Latency(settings.simulate_fixed_us, settings.simulate_per_token_us, settings.simulate_per_context_token_ns)
    assert (told.fixed_us, told.per_token_us, told.per_context_token_ns) == (1500, 12, 340)


def test_pieces_are_kept_in_a_file(tmp_path) -> None:
    pieces = Pieces(StepLatency(1.5, 2), SchedulerCosts(COSTS, FREE, 1e8, 1e4), [{"schedulers": 1}])
    pieces.save(tmp_path / "pieces.json")
    assert Pieces.load(tmp_path / "pieces.json") == pieces


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"latency": {}, "costs": {}, "validation": []}'])
def test_a_file_without_pieces_is_refused(tmp_path, text: str) -> None:
    (tmp_path / "pieces.json").write_text(text)
    with pytest.raises(PiecesFileError, match=r"pieces\.json"):
        Pieces.load(tmp_path / "pieces.json")
    with pytest.raises(PiecesFileError, match="No such file"):
        Pieces.load(tmp_path / "none.json")


async def test_steps_of_a_real_executor_process_are_measured() -> None:
    found = await measured(["--simulate", "--simulate-fixed-us", "2000"])
    assert found.num_steps > 50
    # No step is shorter than it must be, and how much longer depends on the machine.
    assert found.latency.fixed_us >= 1000


async def test_a_window_of_real_processes_counts_what_clients_got() -> None:
    async with System.started(StepLatency(2000), Room(), num_schedulers=2) as system:
        found = await system.observe(40.0, [(16, 8)], settle_s=0.5, seconds=1.0)
    assert found.work.requests > 0
    assert found.work.tokens >= found.work.messages > 0
    assert found.work.prompt_tokens == 16 * found.work.requests
    assert 0 < found.loop_s <= found.process_s
    assert found.work.steps > 0
    assert min(found.seen.ttft_s) > 0


def test_sizing_answers_for_an_executor_and_for_a_rate() -> None:
    costs = SchedulerCosts(COSTS, COSTS, 1e8, 1e4)
    kind = Kind(StepLatency(9000, 20, 20), VARIED, Room(max_rows=64))
    told = for_an_executor(kind, costs)
    assert told["cell"] == {"schedulers": 1, "executors": 4}
    # With more streams each rests for longer, and a message has more tokens.
    assert 0.7 < told["loop_share"] / (4 * told["loop_share_of_one"]) < 0.9
    assert told["simulated_tokens_s"] == pytest.approx(told["tokens_s"], rel=0.1)  # both of one executor
    assert told["scheduler_cores"] == pytest.approx(told["loop_share"] / 4, rel=0.1)
    one, ten = for_a_rate(kind, costs, [10.0, 100.0], 0.5)
    assert one["executors"] == one["schedulers"] * cell_for(COSTS, kind.highest).executors
    assert ten["executors"] >= one["executors"]
    assert ten["executors"] * kind.highest.rate > 100
    assert json.loads(json.dumps([told, one, ten]))
    assert for_a_rate(kind, costs, [10.0], ttft_p99_s=1e-3) == []
    assert for_an_executor(kind, SchedulerCosts(TaskCosts(step_s=0.1), COSTS, 0, 0))["cell"] is None
