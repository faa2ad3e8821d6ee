"""Two plans are in flight, and more only while the executor has waited for the plan of a short step."""

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from paged.v1 import executor_pb2 as pb
from scheduler_svc.lead import LATE_SHARE, SHORT_STEP_US, STAYS_S, USUAL_PLANS, Lead
from tests.processes import cleaned_up, start_executor
from tests.system.engines import engine_over, only_scheduler
from tests.system.test_delivery import request

MOST = 5
STEP_US = 4_000
WAIT_US = int(STEP_US * LATE_SHARE)  # the longest that is in time
NOW = 100.0


def num_plans(lead: Lead, now: float, *, most: int = MOST, tokens_are_awaited: bool = False) -> int:
    return lead.num_plans(most, now, tokens_are_awaited=tokens_are_awaited)


def after(wait_us: int, step_us: int = STEP_US, *, num_in_flight: int = 1) -> Lead:
    """One whose step 8, planned when so many were in flight, came after such a wait."""
    lead = Lead()
    lead.note_plan(7, 0)
    lead.note_plan(8, num_in_flight)
    lead.note_result(pb.StepResult(step=8, wait_us=wait_us, step_us=step_us), NOW)
    return lead


def test_there_are_two_before_anything_is_known_and_no_more_than_the_lease_has() -> None:
    assert [num_plans(Lead(), NOW, most=most) for most in (1, 2, 3)] == [1, USUAL_PLANS, USUAL_PLANS]


def test_a_plan_that_was_late_makes_room_for_as_many_as_the_lease_has_and_for_a_while() -> None:
    lead = after(WAIT_US + 1)
    assert num_plans(lead, NOW) == num_plans(lead, NOW + 0.99 * STAYS_S) == MOST
    assert num_plans(lead, NOW, most=1) == 1
    assert num_plans(lead, NOW + STAYS_S) == USUAL_PLANS
    lead.note_plan(9, 1)
    lead.note_result(pb.StepResult(step=9, wait_us=WAIT_US + 1, step_us=STEP_US), NOW + STAYS_S)
    assert num_plans(lead, NOW + STAYS_S) == MOST


@pytest.mark.parametrize(
    "lead",
    [
        pytest.param(after(WAIT_US), id="in time"),
        pytest.param(after(10 * STEP_US, num_in_flight=0), id="nothing was asked for"),
        pytest.param(after(SHORT_STEP_US, SHORT_STEP_US + 1), id="a long step"),
    ],
)
def test_there_is_no_more_room_after(lead: Lead) -> None:
    assert num_plans(lead, NOW) == USUAL_PLANS


def test_whose_next_token_depends_on_the_last_has_it_every_other_step_still() -> None:
    assert num_plans(after(WAIT_US + 1), NOW, tokens_are_awaited=True) == USUAL_PLANS


async def test_a_scheduler_that_was_kept_from_planning_has_more_plans_in_flight_then(tmp_path: Path) -> None:
    flags = ["--simulate", "--simulate-fixed-us", "3000", "--plans-in-flight", str(MOST)]
    with cleaned_up([start_executor(tmp_path, *flags)]) as (executor,):
        address = executor.wait_until_ready().address
        async with engine_over(address, tmp_path) as engine, asyncio.timeout(60):
            answer = engine.generate(request("r", 4000))
            async with contextlib.aclosing(answer):
                await anext(answer)
                in_flight = only_scheduler(engine).state.in_flight
                time.sleep(0.05)
                while len(in_flight) < MOST:
                    await anext(answer)
