"""The one place where exceptions become gRPC statuses, for every method of every service."""

import inspect
import secrets
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from scheduler_svc.api.errors import abort, internal_status, to_status
from scheduler_svc.api.large_requests import LargeRequests
from scheduler_svc.api.live_calls import LiveCalls
from scheduler_svc.errors import FieldViolation, InvalidRequest, PagedError, QueueFull

Read = Callable[[bytes], Awaitable[Any]]  # of one request; raises InvalidRequest

RETRY_AFTER_S = 1.0

log = structlog.get_logger()


class ErrorBoundary(grpc.aio.ServerInterceptor):
    """Ends a call with the status of the exception that its handler raised.

    Cancellation passes through untouched. An exception that is not ours is logged with its traceback under a reference
    number, and the client is told that number alone. Requests of all calls that are going on have `max_total_bytes` at
    most; a call with which there would be more is refused, unless it is the only one. Large ones are read one after
    another. All are noted in `calls`.
    """

    def __init__(self, max_total_bytes: int, calls: LiveCalls) -> None:
        self._in_hand = _InHand(max_total_bytes)
        self._calls = calls
        self._large = LargeRequests()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        read, serialize = self._reader(handler.request_deserializer), handler.response_serializer
        # Requests are parsed inside the guard, so that bytes which are no message are a bad request and not UNKNOWN.
        if handler.unary_unary:
            guarded = _guard_unary(handler.unary_unary, read, method, self._in_hand, self._calls)
            return grpc.unary_unary_rpc_method_handler(guarded, response_serializer=serialize)
        if inspect.isasyncgenfunction(handler.unary_stream):
            guarded = _guard_stream(handler.unary_stream, read, method, self._in_hand, self._calls)
            return grpc.unary_stream_rpc_method_handler(guarded, response_serializer=serialize)
        # Health and reflection bring handlers of other shapes. Who watches for hours is not a request being served.
        if handler.unary_stream:
            guarded = _guard_unary(handler.unary_stream, read, method, _InHand(sys.maxsize), self._calls)
            return grpc.unary_stream_rpc_method_handler(guarded, response_serializer=serialize)
        if inspect.isasyncgenfunction(handler.stream_stream) and handler.request_deserializer is not None:
            guarded = _guard_both(handler.stream_stream, read, method, self._calls)
            return grpc.stream_stream_rpc_method_handler(guarded, response_serializer=serialize)
        return handler

    def _reader(self, parse: Callable[[bytes], Any]) -> Read:
        async def read(data: bytes) -> Any:
            try:
                return await self._large.read(parse, data)
            except DecodeError as error:
                # Of the decoder's text, only the class of the fault: the rest may quote what was sent.
                problem = "a text field is not valid UTF-8" if "UTF-8" in str(error) else "its bytes cannot be decoded"
                raise InvalidRequest(FieldViolation("request", f"is no message of this method: {problem}")) from None

        return read


class _InHand:
    """Bytes of the requests of calls that are going on."""

    def __init__(self, max_total_bytes: int) -> None:
        self._max_total_bytes = max_total_bytes
        self._num_bytes = 0

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Raises QueueFull."""
        if self._num_bytes and self._num_bytes + num_bytes > self._max_total_bytes:
            found = f"requests of {self._num_bytes} bytes are being served, and this one has {num_bytes}"
            limit = f"max_total_request_bytes is {self._max_total_bytes}"
            raise QueueFull(f"{found}; {limit}", RETRY_AFTER_S)
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_bytes -= num_bytes


def _guard_unary(
    handle: Callable[..., Awaitable[Any]], read: Read, method: str, in_hand: _InHand, calls: LiveCalls
) -> Callable[..., Any]:
    async def guarded(data: bytes, context: grpc.aio.ServicerContext) -> Any:
        try:
            with in_hand.holding(len(data)), calls.going_on(method):
                return await handle(await read(data), context)
        except grpc.aio.BaseError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary: logged, and told as a reference number
            return await _end(error, context, method)

    return guarded


def _guard_stream(
    handle: Callable[..., Any], read: Read, method: str, in_hand: _InHand, calls: LiveCalls
) -> Callable[..., Any]:
    async def guarded(data: bytes, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
        try:
            with in_hand.holding(len(data)), calls.going_on(method) as call:
                async with aclosing(handle(await read(data), context)) as messages:
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


def _guard_both(handle: Callable[..., Any], read: Read, method: str, calls: LiveCalls) -> Callable[..., Any]:
    async def parsed(requests: AsyncIterator[bytes]) -> AsyncGenerator[Any, None]:
        async for data in requests:
            yield await read(data)

    async def guarded(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
        try:
            with calls.going_on(method) as call:
                async with aclosing(handle(parsed(requests), context)) as messages:
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


async def _end(error: Exception, context: grpc.aio.ServicerContext, method: str) -> NoReturn:
    if isinstance(error, PagedError):
        await abort(context, to_status(error))
    if isinstance(error, NotImplementedError):  # what generated servicers raise for what they leave out
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this method is not served")
    reference = secrets.token_hex(6)
    log.error("call_failed", method=method, reference=reference, exc_info=error)
    await abort(context, internal_status(reference))
