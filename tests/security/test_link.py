"""A scheduler's side of the plan stream with CURVE."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from scheduler_svc.link.curve import CurveKeys, read_curve_keys
from scheduler_svc.link.session import ExecutorSession, LinkOptions, SessionLost
from tests.executor.conftest import SIMULATED
from tests.processes import Service, cleaned_up, start_executor
from tests.security.keys import Keys
from tests.system.engines import engine_over
from tests.system.requests import Call
from tests.system.test_executors import ask, attached

HOSTS = ("127.0.0.1", "127.0.0.2")


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory, made_once: Keys) -> Iterator[list[Service]]:
    """With one key pair and one port, as replicas behind a name have; the last one has neither, and no CURVE."""
    with cleaned_up([]) as services:
        port = "0"
        for host in HOSTS:
            place = tmp_path_factory.mktemp("executor")
            services.append(
                start_executor(place, *SIMULATED, *made_once.executor_flags, endpoint=f"tcp://{host}:{port}")
            )
            port = services[-1].wait_until_ready().address.rpartition(":")[2]
        services.append(start_executor(tmp_path_factory.mktemp("open"), *SIMULATED).wait_until_ready())
        yield services


async def test_executors_are_found_by_name_with_curve(
    executors: list[Service], made_once: Keys, tmp_path: Path
) -> None:
    async def resolve(host: str) -> list[str]:
        assert host == "executor.test"
        return list(HOSTS)

    endpoint = "tcp://executor.test:" + executors[0].address.rpartition(":")[2]
    own, theirs = made_once.curve / "scheduler.key_secret", made_once.curve / "executor.key"
    async with engine_over(
        endpoint, tmp_path, resolve=resolve, curve_key_file=own, curve_executor_key=theirs
    ) as engine:
        async with asyncio.timeout(20):
            while len(attached(engine)) < len(HOSTS):
                await asyncio.sleep(0.01)
        calls = [Call([300 + i] * 20, 12, 0.0, 0, "") for i in range(12)]
        assert await asyncio.gather(*[ask(engine, i, call) for i, call in enumerate(calls)]) == [
            call.expected() for call in calls
        ]


@pytest.mark.parametrize(
    ("case", "hint"),
    [
        ("no keys", "it may want CURVE keys"),
        ("a key that is not allowed", "may not allow our CURVE key"),
        ("another executor's key", "have another itself"),
        ("an executor without CURVE", "or none"),
    ],
)
async def test_a_scheduler_that_is_not_let_in_knows_why(
    case: str, hint: str, executors: list[Service], made_once: Keys, tmp_path: Path
) -> None:
    others = Keys.make(tmp_path / "others")
    mine, theirs = (
        read_curve_keys(keys.curve / "scheduler.key_secret", keys.curve / "executor.key")
        for keys in (made_once, others)
    )
    keys = {
        "no keys": None,
        "a key that is not allowed": CurveKeys(theirs.public, mine.executor, theirs.secret),
        "another executor's key": CurveKeys(mine.public, theirs.executor, mine.secret),
        "an executor without CURVE": mine,
    }[case]
    endpoint = executors[-1 if case == "an executor without CURVE" else 0].address
    context = zmq.Context()
    session = ExecutorSession(context, LinkOptions(endpoint, "one", result_timeout_s=60, keys=keys))
    try:
        with pytest.raises(SessionLost, match=hint) as caught:
            await asyncio.wait_for(session.attach(), 20)
        assert not caught.value.refused  # keys may be put right meanwhile
    finally:
        session.close()
        context.destroy(0)
