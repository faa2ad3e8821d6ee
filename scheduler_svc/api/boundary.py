"""The one place where exceptions become gRPC statuses, for every method of every service."""

import inspect
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, nullcontext
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError
from google.rpc import status_pb2  # type: ignore[import-untyped]

from scheduler_svc.api.call_limits import AllCallLimits, Limits
from scheduler_svc.api.errors import abort, internal_status, to_status
from scheduler_svc.api.large_requests import Check, LargeRequests
from scheduler_svc.api.live_calls import LiveCalls
from scheduler_svc.errors import FieldViolation, InvalidRequest, PagedError, Unsupported

Read = Callable[[bytes], Awaitable[Any]]  # of one request; raises InvalidRequest and what a Check does

log = structlog.get_logger()


class ErrorBoundary(grpc.aio.ServerInterceptor):
    """Ends a call with the status of the exception that its handler raised.

    Cancellation passes through untouched. An exception that is not ours is logged with its traceback under a reference
    number, and the client is told that number alone. All calls are within `limits`, and noted in `calls`; those of
    callers who were not let in never get here, for what refuses them is no handler that is guarded. Large requests are
    read one after another, and before that `unread`, by method, may refuse their bytes.
    """

    def __init__(self, limits: AllCallLimits, calls: LiveCalls, unread: Mapping[str, Check] | None = None) -> None:
        self._limits = limits
        self._calls = calls
        self._large = LargeRequests()
        self._unread = unread or {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        read, serialize = self._reader(handler.request_deserializer, method), handler.response_serializer
        limits = self._limits.of(method)
        # Requests are received inside the guard, as gRPC would wait for them without a limit; and parsed there, so that
        # bytes which are no message are a bad request and not UNKNOWN.
        if handler.unary_unary:
            guarded = _guard_unary(handler.unary_unary, read, method, limits, self._calls)
            return grpc.stream_unary_rpc_method_handler(guarded, response_serializer=serialize)
        if inspect.isasyncgenfunction(handler.unary_stream):
            guarded = _guard_stream(handler.unary_stream, read, method, limits, self._calls, asks_on=False)
            return grpc.stream_stream_rpc_method_handler(guarded, response_serializer=serialize)
        # Health and reflection bring handlers of other shapes.
        if handler.unary_stream:
            guarded = _guard_unary(handler.unary_stream, read, method, limits, self._calls)
            return grpc.stream_stream_rpc_method_handler(guarded, response_serializer=serialize)
        if inspect.isasyncgenfunction(handler.stream_stream) and handler.request_deserializer is not None:
            guarded = _guard_stream(handler.stream_stream, read, method, limits, self._calls, asks_on=True)
            return grpc.stream_stream_rpc_method_handler(guarded, response_serializer=serialize)
        return handler

    def _reader(self, parse: Callable[[bytes], Any], method: str) -> Read:
        check = self._unread.get(method)

        async def read(data: bytes) -> Any:
            try:
                return await self._large.read(parse, data, check)
            except DecodeError as error:
                # Of the decoder's text, only the class of the fault: the rest may quote what was sent.
                problem = "a text field is not valid UTF-8" if "UTF-8" in str(error) else "its bytes cannot be decoded"
                raise InvalidRequest(FieldViolation("request", f"is no message of this method: {problem}")) from None

        return read


def _guard_unary(
    handle: Callable[..., Awaitable[Any]], read: Read, method: str, limits: Limits, calls: LiveCalls
) -> Callable[..., Any]:
    async def guarded(_requests: object, context: grpc.aio.ServicerContext) -> Any:
        try:
            limits.enter(context)
            data = await _only_request(limits, context)
            with limits.holding(len(data)), calls.going_on(method):
                return await handle(await read(data), context)
        except grpc.aio.BaseError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary: logged, and told as a reference number
            return await _end(error, context, method)

    return guarded


def _guard_stream(
    handle: Callable[..., Any], read: Read, method: str, limits: Limits, calls: LiveCalls, *, asks_on: bool
) -> Callable[..., Any]:
    """`asks_on`: its handler is given requests as they come, not one that has come."""

    async def received(context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
        while (data := await limits.arrivals.receive(context)) is not None:
            yield await read(data)

    async def guarded(_requests: object, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
        try:
            limits.enter(context)
            data = None if asks_on else await _only_request(limits, context)
            with nullcontext() if data is None else limits.holding(len(data)), calls.going_on(method) as call:
                asked = received(context) if data is None else await read(data)
                async with aclosing(handle(asked, context)) as messages:
                    async for message in messages:
                        call.is_sending = True
                        yield message
                        call.is_sending = False
                        call.check()
        except grpc.aio.BaseError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary: logged, and told as a reference number
            await _end(error, context, method)

    return guarded


async def _only_request(limits: Limits, context: grpc.aio.ServicerContext) -> bytes:
    """Raises InvalidRequest where there is none."""
    data = await limits.arrivals.receive(context)
    if data is None:
        raise InvalidRequest(FieldViolation("request", "is missing: the call has ended without a message"))
    return data


async def _end(error: Exception, context: grpc.aio.ServicerContext, method: str) -> NoReturn:
    await abort(context, status_of(error, method))


def status_of(error: Exception, method: str) -> status_pb2.Status:
    """What the client is told of the exception; one that is not ours is logged."""
    if isinstance(error, PagedError):
        return to_status(error)
    if isinstance(error, NotImplementedError):  # what generated servicers raise for what they leave out
        return to_status(Unsupported("this method is not served"))
    reference = secrets.token_hex(6)
    log.error("call_failed", method=method, reference=reference, exc_info=error)
    return internal_status(reference)
