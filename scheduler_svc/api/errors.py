"""How our exceptions look to a gRPC client: a status code, a message, and `google.rpc` details."""

import asyncio
import functools
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from scheduler_svc import errors

ERROR_DOMAIN = "paged"

# gRPC carries the details in the trailing metadata, of which clients surely take 8 KiB in all
# (sent in base64; the message twice, once with three bytes for each that is not ASCII).
MAX_MESSAGE_BYTES = 512
MAX_VIOLATIONS = 16
MAX_FIELD_BYTES = 64
MAX_DESCRIPTION_BYTES = 160


CODES: dict[type[errors.PagedError], tuple[grpc.StatusCode, str]] = {
    errors.InvalidRequest: (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    errors.ModelNotFound: (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
    errors.NotThere: (grpc.StatusCode.NOT_FOUND, "NOT_THERE"),
    errors.Unauthenticated: (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
    errors.PermissionDenied: (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"),
    errors.DuplicateRequest: (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST"),
    errors.QueueFull: (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    errors.TooManyWatchers: (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHERS"),
    errors.TooManyCalls: (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS"),
    errors.ReaderTooSlow: (grpc.StatusCode.RESOURCE_EXHAUSTED, "READER_TOO_SLOW"),
    errors.Unsupported: (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED"),
    errors.Unavailable: (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"),
    errors.RequestAborted: (grpc.StatusCode.CANCELLED, "REQUEST_ABORTED"),
    errors.RequestFailed: (grpc.StatusCode.INTERNAL, "REQUEST_FAILED"),
    errors.DeadlineTooShort: (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_TOO_SHORT"),
    errors.DeadlineExceeded: (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
}

_OTHER = (grpc.StatusCode.INTERNAL, "INTERNAL")


def to_status(error: errors.PagedError) -> status_pb2.Status:
    """The status of an error: ErrorInfo always, BadRequest and RetryInfo where they apply."""
    code, reason = next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), _OTHER)
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN)]
    if isinstance(error, errors.InvalidRequest):
        details.append(_bad_request(error))
    if isinstance(error, errors.QueueFull):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(max(1, round(error.retry_after_s * 1000)))
        details.append(retry)
    return _status(code, str(error), details)


def internal_status(reference: str) -> status_pb2.Status:
    """The status of an unexpected exception: nothing of its text, only what finds it in the log."""
    info = error_details_pb2.ErrorInfo(reason="INTERNAL", domain=ERROR_DOMAIN, metadata={"reference": reference})
    message = f"internal error; the server's log has it under reference {reference}"
    return _status(grpc.StatusCode.INTERNAL, message, [info])


async def abort(context: Any, status: status_pb2.Status) -> NoReturn:
    """End the call of this ServicerContext. Raises gRPC's own abort exception, or CancelledError where the caller has
    gone meanwhile; whoever called this lets either pass."""
    try:
        # Any: the published types of grpc.aio lack this method.
        await context.abort_with_status(rpc_status.to_status(status))
    except grpc.aio.AbortError as error:
        forget_frames_at_the_end(error)
        raise
    except grpc.aio.BaseError:
        raise asyncio.CancelledError("nobody is there to be told") from None
    raise AssertionError("abort_with_status returned")


def forget_frames_at_the_end(error: grpc.aio.AbortError) -> None:
    """Of the current task, in which the exception was raised. gRPC keeps it with the call, and the frames in its
    traceback hold the call: unless it forgets them, all that the call had waits for the collector."""
    task = asyncio.current_task()
    if task is not None:
        task.add_done_callback(functools.partial(_forget_frames, error))


def _forget_frames(error: BaseException, _task: object) -> None:
    error.__traceback__ = error.__context__ = None


def _bad_request(error: errors.InvalidRequest) -> error_details_pb2.BadRequest:
    return error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(
                field=_clipped(violation.field, MAX_FIELD_BYTES),
                description=_clipped(violation.description, MAX_DESCRIPTION_BYTES),
            )
            for violation in error.violations[:MAX_VIOLATIONS]
        ]
    )


def _status(code: grpc.StatusCode, message: str, details: list[Message]) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=_clipped(message, MAX_MESSAGE_BYTES))
    for detail in details:
        status.details.add().Pack(detail)
    return status


def _clipped(text: str, max_bytes: int) -> str:
    return text.encode()[:max_bytes].decode(errors="ignore")
