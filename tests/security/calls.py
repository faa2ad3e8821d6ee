"""Every method that a server has, by its own account, and a call to it with nothing in it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paged.many import CORE_ERROR

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Method:
    """One of them. `path` as gRPC names it."""

    path: str
    streams_requests: bool
    streams_answers: bool

    @classmethod
    def of(cls, found: MethodDescriptor) -> "Method":
        proto = descriptor_pb2.MethodDescriptorProto()
        found.CopyToProto(proto)
        path = f"/{found.containing_service.full_name}/{found.name}"
        return cls(path, proto.client_streaming, proto.server_streaming)


async def methods_of(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> list[Method]:
    """By reflection, so that none is forgotten."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="*")
    call = stub.ServerReflectionInfo(iter([request]), metadata=metadata)
    names = [service.name for service in (await call.read()).list_services_response.service]
    pool = descriptor_pool.Default()
    return [Method.of(method) for name in names for method in pool.FindServiceByName(name).methods]


async def status_of(
    channel: grpc.aio.Channel, method: Method, metadata: tuple[tuple[str, str], ...] = (), request: bytes = b""
) -> tuple[grpc.StatusCode, str]:
    """What a call ends with; one that has an answer is ended there, with OK.

    Asked again where a refusal came before a request was sent: grpc.aio forgets it then (grpc/grpc issue 36066).
    """
    while True:
        code, details = await _status_of(channel, method, metadata, request)
        if not (method.streams_requests and code is grpc.StatusCode.INTERNAL and details == CORE_ERROR):
            return code, details


async def _status_of(
    channel: grpc.aio.Channel, method: Method, metadata: tuple[tuple[str, str], ...], request: bytes
) -> tuple[grpc.StatusCode, str]:
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    call_method = kinds[method.streams_requests, method.streams_answers](method.path)
    given = iter([request]) if method.streams_requests else request
    call = call_method(given, metadata=metadata, timeout=TIMEOUT_S)
    try:
        if method.streams_answers:
            answer = await call.read()
            if answer is not grpc.aio.EOF:
                return grpc.StatusCode.OK, ""
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    finally:
        call.cancel()
    return await call.code(), await call.details()


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@asynccontextmanager
async def channel_to(address: str, credentials: grpc.ChannelCredentials | None) -> AsyncIterator[grpc.aio.Channel]:
    channel = (
        grpc.aio.insecure_channel(address) if credentials is None else grpc.aio.secure_channel(address, credentials)
    )
    try:
        yield channel
    finally:
        await channel.close()
