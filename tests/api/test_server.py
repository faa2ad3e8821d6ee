"""The server as a whole: address, health, reflection, message sizes, end."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paged.client import (
    Client,
    InvalidRequestError,
    RequestAbortedError,
    ResourceExhaustedError,
    Retries,
    UnavailableError,
    generate_request,
)
from scheduler_svc.api.health import LIVE, READY
from scheduler_svc.api.server import ApiServer, BindFailed
from scheduler_svc.errors import QueueFull
from scheduler_svc.settings import SchedulerSettings
from tests.api.scripted_engine import ANSWER, ScriptedEngine, forever

SOON_S = 20.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
INFERENCE = "paged.v1.InferenceService"


@pytest.fixture
async def health(address: str) -> Any:
    async with grpc.aio.insecure_channel(address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


async def check(health: Any, service: str) -> int:
    return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status


async def call_until_refused(client: Client) -> None:
    """gRPC tells CANCELLED to a call that comes while the server is closing; the one after that is refused."""
    while True:
        with contextlib.suppress(RequestAbortedError):
            await client.load()


async def test_port_0_takes_a_free_port_and_the_address_file_tells_it(engine: ScriptedEngine, tmp_path: Path) -> None:
    file = tmp_path / "address"
    server = ApiServer(engine, SchedulerSettings(listen_address="127.0.0.1:0", address_file=file))
    address = await server.start()
    assert file.read_text() == f"{address}\n"
    assert list(tmp_path.iterdir()) == [file]
    async with Client(address) as client:
        assert (await client.complete("hi")).text == "Once!"
    await server.stop(SOON_S)


async def test_an_address_in_use_is_refused_by_name(engine: ScriptedEngine, address: str) -> None:
    second = ApiServer(engine, SchedulerSettings(listen_address=address))
    with pytest.raises(BindFailed, match=rf"{address}.*--listen-address"):
        await second.start()


async def test_the_process_is_alive_whether_or_not_an_executor_is_there(health: Any, engine: ScriptedEngine) -> None:
    engine.ready = False
    assert await check(health, "") == SERVING


@pytest.mark.parametrize("service", [INFERENCE, "paged.v1.ControlService"])
async def test_watchers_of_a_service_follow_the_engine(health: Any, engine: ScriptedEngine, service: str) -> None:
    watch = health.Watch(health_pb2.HealthCheckRequest(service=service))
    for ready, expected in ((True, SERVING), (False, NOT_SERVING), (True, SERVING)):
        engine.ready = ready
        assert (await asyncio.wait_for(watch.read(), SOON_S)).status == expected
    watch.cancel()


async def test_watchers_are_told_of_the_end(engine: ScriptedEngine) -> None:
    server = ApiServer(engine, SchedulerSettings(listen_address="127.0.0.1:0"))
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        assert (await watch.read()).status == SERVING
        stopping = asyncio.create_task(server.stop(SOON_S))
        assert (await asyncio.wait_for(watch.read(), SOON_S)).status == NOT_SERVING
        watch.cancel()
        await stopping


async def test_reflection_lists_every_service(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="*")]))
        names = {service.name for service in (await call.read()).list_services_response.service}
    assert names == {
        INFERENCE,
        "paged.v1.ControlService",
        "vllm.grpc.engine.VllmEngine",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_a_prompt_above_grpcs_own_limit_of_4_mib_is_read(client: Client, engine: ScriptedEngine) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await client.complete("x" * (5 * 1024 * 1024))
    assert [violation.field for violation in caught.value.violations] == ["text"]
    assert engine.submitted == []


async def test_a_message_above_our_limit_is_refused_with_the_limit(client: Client, settings: SchedulerSettings) -> None:
    with pytest.raises(ResourceExhaustedError, match=str(settings.max_message_bytes)):
        await client.complete("x" * (settings.max_message_bytes + 1))
    assert (await client.complete("hi")).text == "Once!"


@pytest.mark.parametrize(("truncated", "told"), [(False, "text: has "), (True, "not valid UTF-8")])
async def test_a_text_that_is_certain_to_be_too_long_is_not_even_read(
    address: str, engine: ScriptedEngine, truncated: bool, told: str
) -> None:
    """Who reads this one finds out that it is no text at all."""
    request = generate_request("", truncate_prompt_tokens=8) if truncated else generate_request("")
    request.ClearField("text")
    text = b"\xff" * 1_000_000
    data = request.SerializeToString() + b"\x1a" + bytes([0xC0, 0x84, 0x3D]) + text  # field 3, and its length
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream("/paged.v1.InferenceService/Generate")(data)
        with pytest.raises(grpc.aio.AioRpcError, match=told) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert engine.submitted == []


async def test_requests_of_all_calls_together_have_a_limit_and_one_alone_is_always_taken(
    engine: ScriptedEngine,
) -> None:
    goes_on = asyncio.Event()
    engine.script = [ANSWER[0], goes_on.wait, *ANSWER[1:]]
    server = ApiServer(engine, SchedulerSettings(listen_address="127.0.0.1:0", max_total_request_bytes=1024 * 1024))
    async with Client(await server.start(), retries=Retries(max_attempts=1)) as client:
        large = client.generate("x" * 2 * 1024 * 1024, truncate_prompt_tokens=8)
        await anext(large)
        with pytest.raises(ResourceExhaustedError, match="max_total_request_bytes is 1048576") as caught:
            await client.load()
        assert caught.value.retry_after_s
        goes_on.set()
        assert "".join([message.text async for message in large]) == "ce!"
        await client.load()
    await server.stop(SOON_S)


async def test_what_would_be_refused_for_want_of_room_is_not_even_looked_at(
    address: str, engine: ScriptedEngine
) -> None:
    engine.room_error = QueueFull("4096 sequences wait", retry_after_s=60.0)
    engine.tokenize_error = AssertionError("it was tokenized")
    async with Client(address, retries=Retries(max_attempts=1)) as client:
        with pytest.raises(ResourceExhaustedError, match="4096 sequences wait"):
            await client.complete("hi", temperature=-1)


@pytest.mark.parametrize(
    ("service", "when_ready", "without"), [(LIVE, SERVING, SERVING), (READY, SERVING, NOT_SERVING)]
)
async def test_life_and_readiness_are_told_apart(
    health: Any, engine: ScriptedEngine, service: str, when_ready: int, without: int
) -> None:
    for ready, expected in ((True, when_ready), (False, without)):
        engine.ready = ready
        async with asyncio.timeout(SOON_S):
            while await check(health, READY) != (SERVING if ready else NOT_SERVING):
                await asyncio.sleep(0.01)
        assert await check(health, service) == expected


async def test_a_running_call_has_the_grace_period_to_end(engine: ScriptedEngine) -> None:
    finish = asyncio.Event()
    engine.script = [ANSWER[0], finish.wait, *ANSWER[1:]]
    server = ApiServer(engine, SchedulerSettings(listen_address="127.0.0.1:0"))
    async with Client(await server.start()) as client:
        answer = client.generate("hi")
        texts = [(await anext(answer)).text]
        stopping = asyncio.create_task(server.stop(SOON_S))
        with pytest.raises(UnavailableError):
            await call_until_refused(client)
        finish.set()
        texts += [message.text async for message in answer]
        await stopping
    assert "".join(texts) == "Once!"


async def test_a_call_that_outlives_the_grace_period_ends_unavailable(engine: ScriptedEngine) -> None:
    engine.script = [ANSWER[0], forever]
    server = ApiServer(engine, SchedulerSettings(listen_address="127.0.0.1:0"))
    async with Client(await server.start()) as client:
        answer = client.generate("hi")
        await anext(answer)
        stopping = asyncio.create_task(server.stop(0.1))
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(anext(answer), SOON_S)
        await stopping
    assert engine.live == set()
