"""The one place where exceptions become gRPC statuses, for every method of every service."""

import inspect
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from scheduler_svc.api.errors import abort, internal_status, to_status
from scheduler_svc.errors import FieldViolation, InvalidRequest, PagedError

Parse = Callable[[bytes], Any]

log = structlog.get_logger()


class ErrorBoundary(grpc.aio.ServerInterceptor):
    """Ends a call with the status of the exception that its handler raised.

    Cancellation passes through untouched. An exception that is not ours is logged with its traceback under a reference
    number, and the client is told that number alone.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        parse, serialize = handler.request_deserializer, handler.response_serializer
        # Requests are parsed inside the guard, so that bytes which are no message are a bad request and not UNKNOWN.
        if handler.unary_unary:
            guarded = _guard_unary(handler.unary_unary, parse, method)
            return grpc.unary_unary_rpc_method_handler(guarded, response_serializer=serialize)
        # Health and reflection bring handlers of other shapes, which raise nothing of ours.
        if inspect.isasyncgenfunction(handler.unary_stream):
            guarded = _guard_stream(handler.unary_stream, parse, method)
            return grpc.unary_stream_rpc_method_handler(guarded, response_serializer=serialize)
        return handler


def _guard_unary(handle: Callable[..., Awaitable[Any]], parse: Parse, method: str) -> Callable[..., Any]:
    async def guarded(data: bytes, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await handle(_parsed(parse, data), context)
        except grpc.aio.BaseError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary: logged, and told as a reference number
            return await _end(error, context, method)

    return guarded


def _guard_stream(handle: Callable[..., Any], parse: Parse, method: str) -> Callable[..., Any]:
    async def guarded(data: bytes, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
        try:
            async with aclosing(handle(_parsed(parse, data), context)) as messages:
                async for message in messages:
                    yield message
        except grpc.aio.BaseError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary: logged, and told as a reference number
            await _end(error, context, method)

    return guarded


def _parsed(parse: Parse, data: bytes) -> Any:
    try:
        return parse(data)
    except DecodeError as error:
        # Of the decoder's text, only the class of the fault: the rest may quote what was sent.
        problem = "a text field is not valid UTF-8" if "UTF-8" in str(error) else "its bytes cannot be decoded"
        raise InvalidRequest(FieldViolation("request", f"is no message of this method: {problem}")) from None


async def _end(error: Exception, context: grpc.aio.ServicerContext, method: str) -> NoReturn:
    if isinstance(error, PagedError):
        await abort(context, to_status(error))
    reference = secrets.token_hex(6)
    log.error("call_failed", method=method, reference=reference, exc_info=error)
    await abort(context, internal_status(reference))
