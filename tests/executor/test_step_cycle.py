"""The device begins its next step before the results of the last one leave; and whatever happens meanwhile, each
scheduler hears what it would have heard otherwise."""

import time
from pathlib import Path

import pytest

from executor_svc import step_cycle
from executor_svc.recording.files import read_recording
from executor_svc.service import MAX_EPOCHS_WITHOUT_STEP
from executor_svc.simulated.text import simulated_continuation
from paged.v1.executor_pb2 import Demand, Fault, StepPlan, StepResult
from tests.executor.device import SETTINGS, Executor, Peer
from tests.executor.plans import column, ids_of, sampling, schedule
from tests.executor.plans import start as start_row
from tests.system.network import Clock

VOCAB = 1000
PROMPT = [5, 17, 999, 0, 3]


def prefill(peer: Peer, **parameters: object) -> StepPlan:
    row, block = own(peer)
    plan = StepPlan(started=[start_row(row, PROMPT, [block], parameters=sampling(**parameters))])
    return schedule(plan, (row, len(PROMPT), True))


def decode(peer: Peer) -> StepPlan:
    return schedule(StepPlan(), (own(peer)[0], 1, True))


def own(peer: Peer) -> tuple[int, int]:
    """A row and a block that are the peer's."""
    return ids_of(peer.attached.lease.row_ids)[0], ids_of(peer.attached.lease.block_ids)[0]


def exclusive(plan: StepPlan) -> StepPlan:
    plan.exclusive = True
    return plan


def said(results: list[StepResult]) -> list[int]:
    return [token for result in results for token in ids_of(result.sampled_ids)]


def oracle(count: int) -> list[int]:
    return simulated_continuation(PROMPT, count, vocab_size=VOCAB)


@pytest.fixture(autouse=True)
def _nobody_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cycle, "STEPS_IN_TIME", 0)
    monkeypatch.setattr(step_cycle, "ANNOUNCE_S", 0.0)


@pytest.fixture
def executor() -> Executor:
    return Executor()


@pytest.fixture
def one(executor: Executor) -> Peer:
    return attached(executor)


@pytest.fixture
def both(executor: Executor) -> tuple[Peer, Peer]:
    return two_attached(executor)


def two_attached(executor: Executor) -> tuple[Peer, Peer]:
    """Each has blocks, rows and tokens of its own; nothing is under way."""
    one = attached(executor)
    two = Peer("two", executor)
    give_back(one, slice(62, 63), slice(7, 8), 2)
    executor.turn()
    two.plan(StepPlan(demand=Demand(blocks=30, rows=4, tokens_per_step=16)))
    executor.turn()
    give_back(one, slice(30, 62), slice(4, 7), 14)
    executor.turn()
    assert (one.num_tokens, two.num_tokens) == (16, 16)
    executor.journal.clear()
    return one, two


def give_back(peer: Peer, blocks: slice, rows: slice, num_tokens: int) -> None:
    """Of its first lease."""
    lease = peer.attached.lease
    peer.plan(
        StepPlan(
            returned_blocks=column(ids_of(lease.block_ids)[blocks]),
            returned_rows=column(ids_of(lease.row_ids)[rows]),
            returned_tokens_per_step=num_tokens,
            demand=Demand(blocks=30, rows=4, tokens_per_step=16),
        )
    )


def attached(executor: Executor) -> Peer:
    peer = Peer("one", executor)
    executor.turn()
    assert peer.is_attached
    return peer


def test_the_next_step_begins_before_the_last_results_leave(executor: Executor, one: Peer) -> None:
    executor.journal.clear()
    one.plan(prefill(one))
    one.plan(decode(one))
    assert executor.turn() == ["launch 1"]
    one.plan(decode(one))
    assert executor.turn() == ["result 1", "launch 2", "one: 1"]
    assert executor.turn() == ["result 2", "launch 3", "one: 2"]
    assert executor.turn() == ["result 3", "one: 3"], "no plan is at hand"
    assert said(one.results) == oracle(3)


def test_where_the_host_computes_results_leave_first() -> None:
    executor = Executor(overlaps=False)
    one = attached(executor)
    one.plan(prefill(one))
    one.plan(decode(one))
    assert executor.turn() == ["launch 1", "result 1", "one: 1"]
    assert executor.turn() == ["launch 2", "result 2", "one: 2"]


def test_who_has_no_plan_at_hand_gets_its_result_before_the_next_step_begins(
    executor: Executor, both: tuple[Peer, Peer]
) -> None:
    """It may be what it waits for: a scheduler whose rows have masks has one plan under way, and no more."""
    for peer in both:
        peer.plan(prefill(peer))
    both[0].plan(decode(both[0]))
    executor.turn()
    assert executor.turn() == ["result 1", "two: 2", "launch 2", "one: 3"]


def test_who_was_late_hears_of_each_step_at_once_until_it_has_been_in_time_for_a_while(
    executor: Executor, one: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_cycle, "STEPS_IN_TIME", 2)
    one.plan(prefill(one))
    one.plan(decode(one))
    assert executor.turn() == ["launch 1"]
    one.plan(decode(one))
    assert executor.turn() == ["result 1", "one: 1", "launch 2"]
    one.plan(decode(one))
    assert executor.turn() == ["result 2", "one: 2", "launch 3"]
    assert executor.turn() == ["result 3", "launch 4", "one: 3"]
    assert executor.turn() == ["result 4", "one: 4"], "it is late"
    one.plan(decode(one))
    one.plan(decode(one))
    assert executor.turn() == ["launch 5"]
    assert executor.turn() == ["result 5", "one: 5", "launch 6"]


def test_a_sign_of_life_is_answered_at_once(executor: Executor, one: Peer) -> None:
    one.plan(prefill(one))
    executor.turn()
    one.plan(StepPlan())
    assert executor.turn() == ["result 1", "one: 1", "one: 2"], "the device has nothing to do with it"


def test_nothing_waits_for_a_step_that_may_be_the_last_nor_does_its_result(
    executor: Executor, both: tuple[Peer, Peer]
) -> None:
    """If it takes the process down, it is known whose it was, and what was computed before and after it has left."""
    one, two = both
    one.plan(prefill(one))
    executor.turn()
    one.plan(exclusive(decode(one)))
    one.plan(decode(one))
    two.plan(prefill(two))
    assert executor.turn() == ["result 1", "one: 3", "one: begun 4", "launch 2"]
    assert executor.turn() == ["result 2", "one: 4", "launch 3"]


@pytest.mark.parametrize("lost", [0, 1])
def test_what_a_session_that_ends_under_way_had_is_others_and_they_get_what_is_theirs(
    executor: Executor, both: tuple[Peer, Peer], lost: int
) -> None:
    gone, other = both[lost], both[1 - lost]
    gone.plan(prefill(gone))
    other.plan(prefill(other, logprobs=1))
    executor.turn()
    gone.plan(decode(gone))
    decoding = decode(other)
    decoding.demand.CopyFrom(Demand(blocks=63, rows=8, tokens_per_step=32))
    other.plan(decoding)
    executor.router.full.add(gone.connection.peer)
    executor.turn()
    assert executor.service.num_sessions == 1, "its result could not be sent while the device computed its rows"
    row, block = own(gone)
    again = StepPlan(started=[start_row(row, PROMPT, [block], parameters=sampling(logprobs=0))])
    other.plan(schedule(schedule(again, (row, len(PROMPT), True)), (own(other)[0], 1, True)))
    for _ in range(3):
        executor.turn()
    first, second, third = other.results[-3:]
    assert [ids_of(result.sampled_ids) for result in (first, second, third)] == [
        oracle(1), oracle(2)[1:], [oracle(1)[0], oracle(3)[2]],
    ]  # fmt: skip
    assert ids_of(second.logprob_ids)[0] == oracle(2)[1]
    assert (len(second.logprob_ids), len(second.logprobs), len(second.logprob_ranks)) == (8, 8, 4)
    assert sum(line.startswith(gone.name) for line in executor.journal) == 1, "of the first step, which it did not read"


def test_a_step_is_recorded_with_its_results_though_a_session_has_ended_since_it_began(tmp_path: Path) -> None:
    executor = Executor(settings=SETTINGS.model_copy(update={"record_dir": tmp_path}))
    gone, other = two_attached(executor)
    for peer in (gone, other):
        peer.plan(prefill(peer))
        peer.plan(decode(peer))
    executor.turn()
    executor.router.full.add(gone.connection.peer)
    executor.turn()
    executor.turn()
    executor.service._recorder.write("a test", wait=True)
    (file,) = tmp_path.iterdir()
    *_, step, ended = read_recording(file)[1]
    assert ended.HasField("ended_session")
    assert [merged.HasField("result") for merged in step.step.plans] == [True, True]


def test_who_waits_for_a_step_that_takes_long_is_not_silent(executor: Executor, both: tuple[Peer, Peer]) -> None:
    one, two = both
    one.plan(prefill(one))
    executor.runner.on_launch = lambda number: two.plan(prefill(two)) if number == 1 else None
    executor.turn()
    executor.clock.now += 2 * SETTINGS.session_timeout_s
    executor.turn()
    assert executor.service.num_sessions == 2


def test_a_rule_that_the_next_plan_breaks_is_told_of_after_the_last_result(executor: Executor, one: Peer) -> None:
    one.plan(prefill(one))
    one.plan(schedule(StepPlan(), (own(one)[0], 2, True)))
    executor.turn()
    assert executor.turn() == ["result 1", "one: 1", "one: fault 2"]
    assert one.attach_again().session == 2


def test_whoever_says_goodbye_gets_what_was_computed(executor: Executor, one: Peer) -> None:
    one.plan(prefill(one))
    one.plan(decode(one))
    executor.turn()
    one.detach()
    assert executor.turn() == ["result 1", "one: 1"]
    assert not executor.service.num_sessions


def test_a_launch_that_fails_ends_the_epoch_and_nothing_that_came_before(executor: Executor, one: Peer) -> None:
    one.plan(prefill(one))
    one.plan(decode(one))
    executor.turn()
    executor.runner.on_launch = fail
    assert executor.turn() == ["result 1", "launch 2", "one: 1", "one: fault 2"]
    assert said(one.results) == oracle(1)
    assert one.heard[-1].fault.scope == Fault.SCOPE_EPOCH
    assert executor.service.counts.steps == 1


def test_of_a_step_that_fails_under_way_nothing_is_said(executor: Executor, one: Peer) -> None:
    one.plan(prefill(one))
    one.plan(decode(one))
    executor.turn()
    executor.turn()
    executor.runner.on_result = fail
    assert executor.turn() == ["result 2", "one: fault 2"]
    assert said(one.results) == oracle(1)
    executor.runner.on_result = lambda number: None
    one.attach_again()
    one.plan(prefill(one))
    executor.turn()
    executor.turn()
    assert said(one.results[-1:]) == oracle(1)
    assert (executor.service.counts.runner_failures, executor.service.counts.steps) == (1, 2)


def fail(number: int) -> None:
    raise RuntimeError("the device is gone")


def test_an_epoch_in_which_a_step_has_ended_is_no_reason_to_give_up_though_its_result_had_not_left() -> None:
    executor = Executor()
    one = attached(executor)
    for _ in range(MAX_EPOCHS_WITHOUT_STEP + 1):
        one.plan(prefill(one))
        one.plan(decode(one))
        executor.turn()
        executor.runner.on_launch = fail
        executor.turn()
        executor.runner.on_launch = lambda number: None
        one.attach_again()


def test_a_service_that_stops_tells_what_was_computed() -> None:
    executor = Executor(settings=SETTINGS.model_copy(update={"shutdown_grace_s": 0.0}))
    one = attached(executor)
    one.plan(prefill(one))
    one.plan(decode(one))
    executor.turn()
    executor.turn()
    executor.requested = True
    executor.journal.clear()
    assert executor.service.run() == 0
    assert executor.journal == ["result 2", "one: 2", "one: fault 2"]
    assert said(one.results) == oracle(2)


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_phases_of_steps_follow_one_another_as_the_device_sees_them(
    monkeypatch: pytest.MonkeyPatch, *, overlaps: bool
) -> None:
    """A step takes 10 s and a message 1 s. What is sent while the device computes is no phase of its own."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    executor = Executor(overlaps=overlaps)
    launched_at = []
    executor.runner.on_launch = lambda number: launched_at.append(clock.now)
    executor.runner.on_result = lambda number: setattr(clock, "now", max(clock.now, launched_at[-1] + 10))
    executor.router.on_send = lambda: setattr(clock, "now", clock.now + 1)
    one = attached(executor)
    began = clock.now
    clock.now += 5
    one.plan(prefill(one))
    one.plan(decode(one))
    for _ in range(3):
        executor.turn()
    first, second = one.results
    assert (first.wait_us, first.step_us) == (6e6, 10e6)
    assert (second.wait_us, second.step_us) == (0, 10e6)
    counts = executor.service.counts
    assert (counts.idle_s, counts.compute_s, counts.answer_s) == (6, 20, 1 if overlaps else 2)
    assert clock.now - began == 5 + 20 + counts.answer_s
