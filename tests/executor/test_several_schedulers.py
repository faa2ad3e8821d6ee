"""Several schedulers on one executor: each has a lease of its own, and their plans run in the same steps."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from executor_svc.simulated.text import simulated_continuation
from paged.v1.executor_pb2 import Demand, Fault, StepPlan
from tests.executor.client import PlanClient
from tests.executor.oracle import PROMPT, VOCAB
from tests.executor.plans import column, ids_of, schedule
from tests.executor.plans import start as start_row
from tests.processes import Service, wait_for

ALL = Demand(blocks=63, rows=8, tokens_per_step=32)


def serve(client: PlanClient) -> None:
    """Return what was recalled, the highest ids; none of it is in use."""
    recall = client.change().recall
    lease = client.attached.lease
    blocks, rows = ids_of(lease.block_ids), ids_of(lease.row_ids)
    plan = StepPlan(
        returned_blocks=column(blocks[recall.blocks :]),
        returned_rows=column(rows[recall.rows :]),
        returned_tokens_per_step=max(0, lease.tokens_per_step - recall.tokens_per_step),
        demand=ALL,
    )
    client.run(plan)
    lease.block_ids, lease.row_ids = column(blocks[: recall.blocks]), column(rows[: recall.rows])
    lease.tokens_per_step = min(lease.tokens_per_step, recall.tokens_per_step)


def own(client: PlanClient) -> tuple[int, int]:
    """A row and a block that are the client's."""
    return ids_of(client.attached.lease.row_ids)[0], ids_of(client.attached.lease.block_ids)[0]


def prefill(client: PlanClient) -> StepPlan:
    row, block = own(client)
    return schedule(StepPlan(started=[start_row(row, PROMPT, [block])]), (row, len(PROMPT), True))


def decode(client: PlanClient) -> StepPlan:
    return schedule(StepPlan(), (own(client)[0], 1, True))


@pytest.fixture
def both(executor: Service, client: PlanClient) -> Iterator[tuple[PlanClient, PlanClient]]:
    with PlanClient(executor.address) as second:
        second.ask_to_attach("two")
        serve(client)
        second.wait_attached()
        yield client, second


def test_a_newcomer_is_let_in_as_soon_as_a_floor_was_returned(both: tuple[PlanClient, PlanClient]) -> None:
    first, second = (client.attached.lease for client in both)
    assert ids_of(second.block_ids) == [63]
    assert ids_of(second.row_ids) == [7]
    assert second.tokens_per_step >= 2
    assert first.tokens_per_step + second.tokens_per_step == 32
    assert (second.most_blocks, second.most_rows, second.most_tokens_per_step) == (63, 8, 32)


def test_a_lease_grows_by_what_the_other_returns(both: tuple[PlanClient, PlanClient]) -> None:
    first, second = both
    second.run(StepPlan(demand=ALL))
    serve(first)
    granted = second.change()
    assert len(ids_of(granted.granted_blocks)) == 63 // 2 - 1
    assert not set(ids_of(granted.granted_blocks)) & set(ids_of(first.attached.lease.block_ids))


def test_plans_of_both_run_in_the_same_steps_and_say_what_each_would_alone(start: Callable[..., Service]) -> None:
    executor = start("--simulate-fixed-us", "100000")
    with PlanClient(executor.address) as first, PlanClient(executor.address) as second:
        first.attach("one")
        second.ask_to_attach("two")
        serve(first)
        second.wait_attached()
        second.run(StepPlan(demand=ALL))
        serve(first)
        assert second.change().granted_tokens_per_step > len(PROMPT)
        said: dict[PlanClient, list[int]] = {first: [], second: []}
        took_us: dict[PlanClient, list[int]] = {first: [], second: []}
        for make in (prefill, decode, decode, decode, decode):
            for client in said:
                client.send_plan(make(client))
            for client in said:
                result = client.result()
                said[client] += ids_of(result.sampled_ids)
                took_us[client].append(result.step_us)
        expected = simulated_continuation(PROMPT, 5, vocab_size=VOCAB)
        assert list(said.values()) == [expected, expected]
        assert set(took_us[first]) & set(took_us[second]), "no step was of both"


def test_an_exclusive_plan_shares_its_step_with_nobody_and_is_announced(start: Callable[..., Service]) -> None:
    executor = start("--simulate-fixed-us", "100000")
    with PlanClient(executor.address) as first, PlanClient(executor.address) as second:
        first.attach("one")
        second.ask_to_attach("two")
        serve(first)
        second.wait_attached()
        second.run(StepPlan(demand=ALL))
        serve(first)
        second.change()
        took_us: list[set[int]] = [set(), set()]
        for make in (prefill, decode, decode):
            first.send_plan(make(first))
            second.send_plan(exclusive(make(second)))
            took_us[0].add(first.result().step_us)
            begun = second.receive().begun
            assert (begun.session, begun.step) == (second.attached.session, second.step)
            took_us[1].add(second.result().step_us)
        assert not took_us[0] & took_us[1]


def exclusive(plan: StepPlan) -> StepPlan:
    plan.exclusive = True
    return plan


def used_block(client: PlanClient) -> StepPlan:
    return StepPlan(returned_blocks=column([own(client)[1]]))


def live_row(client: PlanClient) -> StepPlan:
    return StepPlan(returned_rows=column([own(client)[0]]))


def twice(client: PlanClient) -> StepPlan:
    return StepPlan(returned_blocks=column([5, 5]))


def foreign_block(client: PlanClient) -> StepPlan:
    return StepPlan(returned_blocks=column([63]))


def foreign_row(client: PlanClient) -> StepPlan:
    return StepPlan(returned_rows=column([7]))


def block_that_is_none(client: PlanClient) -> StepPlan:
    return StepPlan(returned_blocks=column([-1]))


def too_many_tokens(client: PlanClient) -> StepPlan:
    return StepPlan(returned_tokens_per_step=33)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (used_block, "returned_blocks"),
        (live_row, "returned_rows"),
        (twice, "returned_blocks"),
        (foreign_block, "returned_blocks"),
        (foreign_row, "returned_rows"),
        (block_that_is_none, "returned_blocks"),
        (too_many_tokens, "returned_tokens_per_step"),
    ],
)
def test_what_is_not_free_to_be_returned_ends_the_session_and_no_other(
    both: tuple[PlanClient, PlanClient], make: Callable[[PlanClient], StepPlan], named: str
) -> None:
    first, second = both
    first.run(prefill(first))
    first.send_plan(make(first))
    fault = first.fault()
    assert fault.scope == Fault.SCOPE_SESSION
    assert named in fault.reason
    change = second.change()
    assert len(ids_of(change.granted_blocks)) == 62
    assert ids_of(second.run(prefill(second)).sampled_ids) == simulated_continuation(PROMPT, 1, vocab_size=VOCAB)


def test_a_block_that_was_returned_is_the_sessions_no_more(both: tuple[PlanClient, PlanClient]) -> None:
    first, second = both
    row, _ = own(first)
    first.send_plan(schedule(StepPlan(started=[start_row(row, PROMPT, [63])]), (row, len(PROMPT), True)))
    assert "started.blocks" in first.fault().reason
    assert ids_of(second.run(prefill(second)).sampled_ids) == simulated_continuation(PROMPT, 1, vocab_size=VOCAB)


def test_a_recall_that_is_not_served_ends_the_session(start: Callable[..., Service]) -> None:
    executor = start("--recall-timeout-s", "0.3", "--session-timeout-s", "60")
    with PlanClient(executor.address) as first, PlanClient(executor.address) as second:
        first.attach("one")
        second.ask_to_attach("two")
        second.wait_attached()
        assert "recall was not served" in first.fault().reason
        assert len(ids_of(second.attached.lease.block_ids)) == 63


@pytest.mark.parametrize(("fate", "session_timeout_s"), [(signal.SIGKILL, "60"), (signal.SIGSTOP, "3")])
def test_what_a_lost_scheduler_had_is_granted_to_the_other_which_goes_on_meanwhile(
    start: Callable[..., Service], fate: signal.Signals, session_timeout_s: str
) -> None:
    executor = start("--session-timeout-s", session_timeout_s)
    command = [sys.executable, "-m", "tests.executor.client", executor.address, "two"]
    with PlanClient(executor.address) as client:
        client.attach("one")
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as second:
            try:
                serve_when_asked(client)
                assert second.stdout is not None
                assert second.stdout.readline().strip() == b"2"
                second.send_signal(fate)
                client.run(prefill(client))
                wait_for(lambda: client.run() and client.changes, "a grant of what the lost one had")
                assert ids_of(client.change().granted_blocks) == [63]
            finally:
                second.kill()


def serve_when_asked(client: PlanClient) -> None:
    """Alive until something is recalled."""
    wait_for(lambda: client.run() and client.changes, "a recall")
    serve(client)
