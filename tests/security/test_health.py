"""Health needs no token, so whoever connects can ask; nobody who does must be able to spoil it for others."""

import asyncio
from collections import Counter
from contextlib import closing
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_svc.api.call_limits import MAX_OPEN_CALLS_A_PEER
from scheduler_svc.api.server import ApiServer
from scheduler_svc.settings import SchedulerSettings
from tests.api.scripted_engine import ScriptedEngine
from tests.security.http2 import Connection, message

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "paged.v1.InferenceService"
SOON_S = 10.0
WATCH = "/grpc.health.v1.Health/Watch"


def open_calls(server: ApiServer) -> Counter[str]:
    """Calls of health that are going on, by connection."""
    return server._call_limits.of(WATCH)._num_calls


async def test_a_watcher_who_does_not_read_keeps_no_status_from_changing(engine: ScriptedEngine) -> None:
    server = ApiServer(engine, SchedulerSettings(listen_address="127.0.0.1:0"))
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def becomes(service: str, wanted: int) -> None:
            async with asyncio.timeout(SOON_S):
                request = health_pb2.HealthCheckRequest(service=service)
                while (await stub.Check(request)).status != wanted:
                    await asyncio.sleep(0.01)

        await becomes(SERVICE, SERVING)
        request = health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString()
        with closing(Connection(address, window=0)) as takes_nothing:
            takes_nothing.begin(WATCH, data=message(request), ends=True)
            async with asyncio.timeout(SOON_S):  # until it is watched from there
                while open_calls(server).total() < 1:
                    await asyncio.sleep(0.01)
            for ready, wanted in ((False, NOT_SERVING), (True, SERVING), (False, NOT_SERVING)):
                engine.ready = ready
                await becomes(SERVICE, wanted)
            await asyncio.wait_for(server.stop_accepting(), SOON_S)
            await asyncio.wait_for(server.stop(0.1), SOON_S)


async def test_who_watches_too_much_is_refused_and_others_are_not(engine: ScriptedEngine) -> None:
    server = ApiServer(engine, SchedulerSettings(listen_address="127.0.0.1:0"))
    address = await server.start()
    try:
        async with (
            grpc.aio.insecure_channel(address) as channel,
            grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as other,
        ):
            stub: Any = health_pb2_grpc.HealthStub(channel)
            names = [f"service {i}" for i in range(MAX_OPEN_CALLS_A_PEER)]
            calls = [stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in names]
            for call in calls:
                assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            one_more = health_pb2.HealthCheckRequest(service=SERVICE)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Watch(one_more).read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            elsewhere: Any = health_pb2_grpc.HealthStub(other)
            assert (await elsewhere.Watch(one_more).read()).status == SERVING
            for call in calls:
                call.cancel()
            async with asyncio.timeout(SOON_S):
                while open_calls(server).total() > 1:
                    await asyncio.sleep(0.01)
            assert (await stub.Watch(one_more).read()).status == SERVING
    finally:
        await server.stop(0.1)


async def test_all_services_are_listed(engine: ScriptedEngine) -> None:
    server = ApiServer(engine, SchedulerSettings(listen_address="127.0.0.1:0"))
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        listed = (await stub.List(health_pb2.HealthListRequest())).statuses
    await server.stop(0.1)
    assert listed[""].status == SERVING
    assert listed[SERVICE].status == SERVING
