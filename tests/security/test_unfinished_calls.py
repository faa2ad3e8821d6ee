"""Calls that are begun and never finished: nobody without credentials keeps others out or has anything held for long
by them, and those who have some do so within limits."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paged.client import Client, ResourceExhaustedError, Retries
from scheduler_svc.api import call_limits
from scheduler_svc.api.call_limits import MAX_OPEN_CALLS_A_PEER, MAX_OPEN_REQUESTS
from scheduler_svc.api.health import LIVE
from scheduler_svc.api.permissions import OPEN_METHODS
from scheduler_svc.api.server import ApiServer
from scheduler_svc.settings import SchedulerSettings
from tests.api.scripted_engine import ScriptedEngine
from tests.security.http2 import Connection, message
from tests.security.keys import Keys

CHECK = "/grpc.health.v1.Health/Check"
GENERATE = "/paged.v1.InferenceService/Generate"
LOAD = "/paged.v1.ControlService/GetLoad"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SOON_S = 20.0
INVALID, LATE, TOO_MANY, STRANGER = (
    code.value[0]
    for code in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
    )
)
HALF = message(bytes(100), announced=1000)


@asynccontextmanager
async def serving(engine: ScriptedEngine, keys: Keys, **options: Any) -> AsyncIterator[tuple[ApiServer, str]]:
    """With tokens, and without TLS, for callers that speak HTTP/2 by hand."""
    settings = SchedulerSettings(listen_address="127.0.0.1:0", token_file=keys.token_file, **options)
    server = ApiServer(engine, settings)
    try:
        yield server, await server.start()
    finally:
        await server.stop(0.1)


def operator(address: str, keys: Keys) -> Client:
    return Client(address, token=keys.operator, retries=Retries(max_attempts=1))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.01)


async def is_live(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=LIVE), timeout=SOON_S)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def ended(connection: Connection, count: int = 1) -> Awaitable[list[tuple[int, str]]]:
    return asyncio.to_thread(connection.statuses, count)


@pytest.mark.parametrize("data", [b"", HALF], ids=["headers alone", "half a request"])
async def test_a_stranger_who_finishes_no_call_keeps_nobody_out(
    data: bytes, engine: ScriptedEngine, keys: Keys
) -> None:
    async with serving(engine, keys, max_concurrent_calls=4) as (server, address):
        with ExitStack() as connections:
            for _ in range(4):
                connection = connections.enter_context(closing(Connection(address)))
                for method in sorted(OPEN_METHODS) * 6:
                    connection.begin(method, data=data)
            arrivals = server._call_limits.of(CHECK).arrivals
            await until(lambda: len(arrivals._late) == MAX_OPEN_REQUESTS)
            assert await is_live(address)
            async with operator(address, keys) as client:
                assert (await client.complete("hi")).text == "Once!"


async def test_health_requests_on_their_way_are_few_and_the_one_that_takes_longest_goes(
    engine: ScriptedEngine, keys: Keys
) -> None:
    async with serving(engine, keys) as (server, address):
        with closing(Connection(address)) as first, closing(Connection(address)) as second:
            arrivals = server._call_limits.of(CHECK).arrivals
            first.begin(CHECK, data=HALF)
            await until(lambda: len(arrivals._late) == 1)
            for _ in range(MAX_OPEN_REQUESTS):
                second.begin(CHECK, data=HALF)
            ((code, text),) = await ended(first)
            assert (code, "takes longest" in text) == (TOO_MANY, True)
            assert len(arrivals._late) == MAX_OPEN_REQUESTS


async def test_what_of_a_health_request_has_not_come_in_time_is_not_waited_for(
    engine: ScriptedEngine, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_limits, "OPEN_REQUEST_S", 0.2)
    async with serving(engine, keys) as (server, address):
        with closing(Connection(address)) as connection:
            for method in OPEN_METHODS:
                connection.begin(method, data=HALF)
            assert await ended(connection, 3) == [(LATE, "its request has not arrived within 0.2 s")] * 3
            limits = server._call_limits.of(CHECK)
            await until(lambda: not limits._num_calls)
            assert not limits.arrivals._late


async def test_a_connection_has_so_many_calls_of_health_even_if_it_takes_no_answer(
    engine: ScriptedEngine, keys: Keys
) -> None:
    async with serving(engine, keys) as (server, address):
        limits = server._call_limits.of(CHECK)
        with closing(Connection(address, window=0)) as connection:
            for _ in range(MAX_OPEN_CALLS_A_PEER):
                connection.begin(CHECK, data=message(b""), ends=True)
            await until(lambda: limits._num_calls.total() == MAX_OPEN_CALLS_A_PEER and not limits.arrivals._late)
            connection.begin(CHECK, data=message(b""), ends=True)
            ((code, _),) = await ended(connection)
            assert code == TOO_MANY
            assert await is_live(address)
        await until(lambda: not limits._num_calls)


async def test_a_wrong_token_has_nothing_waited_for_or_counted(engine: ScriptedEngine, keys: Keys) -> None:
    async with serving(engine, keys, max_concurrent_calls=1) as (server, address):
        with closing(Connection(address)) as connection:
            for method in (GENERATE, LOAD, REFLECTION):
                connection.begin(method, keys.operator[:-1] + "!", HALF)
            assert [code for code, _ in await ended(connection, 3)] == [STRANGER] * 3
            assert server._call_limits.of(GENERATE)._num_calls == 0


@pytest.mark.parametrize("method", [GENERATE, LOAD, REFLECTION])
async def test_who_has_a_token_may_take_so_long_for_a_request_and_counts_meanwhile(
    method: str, engine: ScriptedEngine, keys: Keys
) -> None:
    async with serving(engine, keys, max_concurrent_calls=2, max_receive_s=2.0) as (server, address):
        limits = server._call_limits.of(method)
        with closing(Connection(address)) as connection:
            for data in (b"", HALF):
                connection.begin(method, keys.operator, data)
            await until(lambda: limits._num_calls == 2)
            assert await is_live(address)
            async with operator(address, keys) as client:
                with pytest.raises(ResourceExhaustedError, match="max_concurrent_calls is 2") as caught:
                    await client.load()
                assert caught.value.retry_after_s
                assert await ended(connection, 2) == [(LATE, "its request has not arrived within 2 s")] * 2
                await until(lambda: limits._num_calls == 0)
                assert (await client.complete("hi")).text == "Once!"


async def test_requests_that_are_late_are_as_many_as_may_be_held_and_the_one_that_takes_longest_goes(
    engine: ScriptedEngine, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_limits, "SPARED_S", 0.2)
    sizes = {"max_message_bytes": 1 << 20, "max_total_request_bytes": 4 << 20}
    async with serving(engine, keys, **sizes) as (server, address):
        late = server._call_limits.of(GENERATE).arrivals._late
        with closing(Connection(address)) as first, closing(Connection(address)) as second:
            first.begin(GENERATE, keys.operator, HALF)
            await until(lambda: len(late) == 1)
            for _ in range(4):
                second.begin(GENERATE, keys.operator, HALF)
            ((code, text),) = await ended(first)
            assert (code, "takes longest" in text) == (TOO_MANY, True)
            assert len(late) <= 4


async def test_a_call_without_a_request_is_told_so(engine: ScriptedEngine, keys: Keys) -> None:
    async with serving(engine, keys) as (_, address):
        with closing(Connection(address)) as connection:
            for method in (CHECK, GENERATE, LOAD):
                connection.begin(method, keys.operator, ends=True)
            assert (
                await ended(connection, 3)
                == [(INVALID, "request: is missing: the call has ended without a message")] * 3
            )


async def test_a_request_for_health_has_few_bytes(engine: ScriptedEngine, keys: Keys) -> None:
    async with serving(engine, keys) as (_, address):
        with closing(Connection(address)) as connection:
            connection.begin(CHECK, data=message(bytes(5000)), ends=True)
            ((code, text),) = await ended(connection)
            assert (code, "has 5000 bytes, above the limit of 4096" in text) == (INVALID, True)
