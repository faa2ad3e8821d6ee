"""Schedulers and executors are killed, stopped, frozen and started at random: no text is wrong, no block is lost.

A call ends with the exact text or, where its scheduler was killed or stopped, with UNAVAILABLE.
"""

import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from executor_svc.model.demo_model import demo_model_path
from paged.client import Client
from tests.margin import MARGIN, reference_model
from tests.processes import cleaned_up
from tests.system.replicas import Replicas, through_disturbances
from tests.system.requests import Call, answer, mixed_calls
from tests.system.test_real_models import REAL_MODEL_MARGIN, Answered, ask, judge, mixed
from tests.tiny_models import VOCAB_SIZE, save_tiny

NUM_BLOCKS = 400
POOL = ["--num-blocks", str(NUM_BLOCKS), "--max-rows", "32", "--tokens-per-step", "256"]
REAL_PAUSE_S = 20  # a real executor takes seconds to start, and must be there for most of the time
# Replicas die at random, and whoever happens to run is not to blame.
PATIENT = ["--max-losses", "1000", "--max-executor-losses", "1000"]


def exact(call: Call) -> Callable[[Client], Awaitable[None]]:
    expected = call.expected()

    async def made(client: Client) -> None:
        assert await answer(client, call) == expected

    return made


async def assert_every_lease_adds_up(replicas: Replicas, num_blocks: int) -> None:
    """Nothing is in use; of each executor's blocks, all are lent, each once."""

    def all_lent(loads: list) -> bool:
        return all(
            sum(part.total_blocks for load in loads for part in load.executors if part.endpoint == endpoint)
            == num_blocks - 1
            for endpoint in replicas.endpoints
        )

    loads = await replicas.idle_loads()
    assert [load.used_blocks for load in loads] == [0] * len(loads)
    await replicas.loads_when(all_lent)
    for service in replicas.services:
        for event in ("audit_failed", "plan_failed", "result_failed", "text_failed", "call_failed", "plan_not_taken"):
            assert event not in service.log, service.log_file


@pytest.mark.parametrize(
    "count", [pytest.param(250, id="short"), pytest.param(2000, id="long", marks=pytest.mark.slow)]
)
async def test_texts_stay_exact_while_replicas_of_both_kinds_come_and_go(tmp_path: Path, count: int) -> None:
    with cleaned_up([]) as services:
        replicas = Replicas(tmp_path, services, ["--simulate", *POOL, "--simulate-fixed-us", "3000"], PATIENT)
        replicas.start(num_schedulers=3, num_executors=2)
        await replicas.idle_loads()
        calls = [exact(call) for call in mixed_calls(count, random.Random(count))]
        unavailable = await through_disturbances(replicas, calls, concurrency=60, seed=count, pause_s=1.5)
        assert unavailable < count / 2
        await assert_every_lease_adds_up(replicas, NUM_BLOCKS)


async def models_hold(
    directory: Path, tmp_path: Path, wanted: list[Answered], pool: list[str], num_tokens: int, margin: float
) -> None:
    def made(one: Answered) -> Callable[[Client], Awaitable[None]]:
        return lambda client: ask(client, one, num_tokens)

    flags = ["--model", str(directory), "--dtype", "float32", *pool]
    with cleaned_up([]) as services:
        replicas = Replicas(tmp_path, services, flags, PATIENT)
        replicas.start(num_schedulers=3, num_executors=2)
        await replicas.all_serve(120)
        await replicas.idle_loads(120)
        unavailable = await through_disturbances(
            replicas, [made(one) for one in wanted], concurrency=12, seed=len(wanted), pause_s=REAL_PAUSE_S
        )
        assert unavailable < len(wanted) / 2
        await assert_every_lease_adds_up(replicas, int(pool[1]))
    reference = reference_model(directory)
    assert sum(len(one.ids) < num_tokens for one in wanted) <= unavailable
    for one in wanted:
        if one.ids:
            judge(reference, one, margin)


@pytest.mark.slow
async def test_margins_hold_on_a_tiny_model_while_replicas_come_and_go(tmp_path: Path) -> None:
    wanted = mixed(100, VOCAB_SIZE, 60, random.Random(5))
    pool = ["--num-blocks", "300", "--block-size", "4", "--max-rows", "8", "--tokens-per-step", "32"]
    await models_hold(save_tiny(tmp_path, "llama"), tmp_path, wanted, pool, 40, MARGIN)


@pytest.mark.slow
@pytest.mark.model
async def test_margins_hold_on_a_real_model_while_replicas_come_and_go(tmp_path: Path) -> None:
    wanted = mixed(40, 200_000, 60, random.Random(6))
    pool = ["--num-blocks", "300", "--max-rows", "8", "--tokens-per-step", "128"]
    await models_hold(demo_model_path(), tmp_path, wanted, pool, 24, REAL_MODEL_MARGIN)
