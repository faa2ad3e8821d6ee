"""One more plan is in flight than usual only while the executor has waited for the plans of short steps."""

import asyncio
import contextlib
import itertools
import time
from pathlib import Path

import pytest

from paged.v1 import executor_pb2 as pb
from scheduler_svc.lead import LATE_SHARE, LATE_STEPS, SHORT_STEP_US, STAYS_S, WITHIN_S, Lead
from tests.processes import cleaned_up, start_executor
from tests.system.engines import engine_over, only_scheduler
from tests.system.test_delivery import request

MOST = 5
STEP_US = 4_000
WAIT_US = int(STEP_US * LATE_SHARE)  # the longest that is in time
NOW = 100.0


def num_plans(lead: Lead, now: float, *, most: int = MOST, tokens_are_awaited: bool = False) -> int:
    return lead.num_plans(most, now, tokens_are_awaited=tokens_are_awaited)


def after(
    wait_us: int,
    step_us: int = STEP_US,
    *,
    num_in_flight: int = 1,
    num_steps: int = LATE_STEPS,
    over_s: float = WITHIN_S,
) -> Lead:
    """So many steps, each planned when so many others were in flight, came after such a wait, the last of them now."""
    lead = Lead()
    for step in range(num_steps):
        lead.note_plan(step, num_in_flight)
        at = NOW - over_s * (1 - step / max(num_steps - 1, 1))
        lead.note_result(pb.StepResult(step=step, wait_us=wait_us, step_us=step_us), at)
    return lead


@pytest.mark.parametrize(("most", "usual"), [(1, 1), (2, 2), (3, 2), (4, 3), (16, 15)])
def test_as_a_rule_there_is_one_fewer_than_the_lease_has_and_two_at_least(most: int, usual: int) -> None:
    assert num_plans(Lead(), NOW, most=most) == usual


def test_plans_that_were_late_make_room_for_one_more_for_a_while() -> None:
    lead = after(WAIT_US + 1)
    assert num_plans(lead, NOW) == num_plans(lead, NOW + 0.99 * STAYS_S) == MOST
    assert num_plans(lead, NOW, most=1) == 1
    assert num_plans(lead, NOW + STAYS_S) == MOST - 1


@pytest.mark.parametrize(
    "lead",
    [
        pytest.param(after(WAIT_US), id="in time"),
        pytest.param(after(10 * STEP_US, num_in_flight=0), id="nothing was asked for"),
        pytest.param(after(SHORT_STEP_US, SHORT_STEP_US + 1), id="long steps"),
        pytest.param(after(WAIT_US + 1, num_steps=LATE_STEPS - 1), id="too few"),
        pytest.param(after(WAIT_US + 1, over_s=1.01 * WITHIN_S), id="too far between"),
    ],
)
def test_there_is_no_more_room_after(lead: Lead) -> None:
    assert num_plans(lead, NOW) == MOST - 1


def test_whose_next_token_depends_on_the_last_has_it_as_often_as_ever() -> None:
    assert num_plans(after(WAIT_US + 1), NOW, tokens_are_awaited=True) == MOST - 1


async def test_a_scheduler_that_was_kept_from_planning_has_more_plans_in_flight_then(tmp_path: Path) -> None:
    flags = ["--simulate", "--simulate-fixed-us", "3000", "--plans-in-flight", str(MOST)]
    with cleaned_up([start_executor(tmp_path, *flags)]) as (executor,):
        address = executor.wait_until_ready().address
        async with engine_over(address, tmp_path) as engine, asyncio.timeout(60):
            answer = engine.generate(request("r", 4000))
            async with contextlib.aclosing(answer):
                await anext(answer)
                in_flight = only_scheduler(engine).state.in_flight
                for turn in itertools.count():
                    if turn % 50 == 0:
                        time.sleep(0.03)  # what keeps it
                    if len(in_flight) == MOST:
                        break
                    await asyncio.sleep(0.001)
