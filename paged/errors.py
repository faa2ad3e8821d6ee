"""What a call to Paged can end with, as exceptions with the code, the message and the bad fields."""

import asyncio
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import grpc
import grpc.aio

# The details of a status are messages of googleapis-common-protos, which a client need not have.
HAS_DETAILS = find_spec("google.rpc") is not None
DETAILS_KEY = "grpc-status-details-bin"
NOT_THERE = "NOT_THERE"  # the reason where it is not a model that was not found


@dataclass(frozen=True)
class FieldViolation:
    """One bad field of a request, by its path in the proto, and what is wrong with it."""

    field: str
    description: str


class PagedClientError(Exception):
    """A call that failed. The detail fields are filled where googleapis-common-protos is installed."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.violations = violations
        self.retry_after_s = retry_after_s


class InvalidRequestError(PagedClientError):
    """The request cannot be served as it is: `violations` names the bad fields."""


class NotFoundError(PagedClientError):
    """Nothing of that name is there."""


class ModelNotFoundError(NotFoundError):
    """No model of that name is served."""


class UnauthenticatedError(PagedClientError):
    """The scheduler wants a token, and got none that it knows and that has not expired."""


class PermissionDeniedError(PagedClientError):
    """The token may not make this call, or not for this tenant."""


class DuplicateRequestError(PagedClientError):
    """A live request has that id already."""


class ResourceExhaustedError(PagedClientError):
    """The queue is full (`retry_after_s` says when to try again), or a message is too large."""


class UnavailableError(PagedClientError):
    """No server, or one without an executor; another may answer."""


class DeadlineExceededError(PagedClientError):
    """The call took longer than its deadline or the server's limit."""


class RequestAbortedError(PagedClientError):
    """Somebody ended the request through the control service."""


class ServerError(PagedClientError):
    """The request failed through no fault of its own."""


CLASSES: dict[grpc.StatusCode, type[PagedClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: ModelNotFoundError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.ALREADY_EXISTS: DuplicateRequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: RequestAbortedError,
    grpc.StatusCode.INTERNAL: ServerError,
}


def client_error(code: grpc.StatusCode, message: str | None, trailing_metadata: Any) -> PagedClientError:
    """The exception of a call that ended with this status."""
    details = _details(trailing_metadata) if HAS_DETAILS else {}
    if code is grpc.StatusCode.CANCELLED and not any(key == DETAILS_KEY for key, _ in trailing_metadata or ()):
        # A scheduler says why. gRPC itself says nothing more to a call that comes while its server is closing.
        return UnavailableError(code, message or "the server was closing", **details)
    kind = NotFoundError if details.get("reason") == NOT_THERE else CLASSES.get(code, PagedClientError)
    return kind(code, message or "", **details)


async def translated(call: Any, error: BaseException) -> BaseException:
    """Ours for what a call of gRPC's has raised. A cancellation of the caller's own task stays what it is."""
    if isinstance(error, grpc.aio.AioRpcError):
        return client_error(error.code(), error.details(), error.trailing_metadata())
    task = asyncio.current_task()
    if (task is not None and task.cancelling()) or not call.done():
        return error
    # grpc.aio reports a server's CANCELLED as if this task had been cancelled.
    return client_error(await call.code(), await call.details(), await call.trailing_metadata())


def _details(trailing_metadata: Any) -> dict[str, Any]:
    from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

    found: dict[str, Any] = {}
    data = next((value for key, value in trailing_metadata or () if key == DETAILS_KEY), b"")
    for detail in status_pb2.Status.FromString(data).details:
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest.FromString(detail.value)
            found["violations"] = tuple(FieldViolation(v.field, v.description) for v in bad.field_violations)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            found["retry_after_s"] = (
                error_details_pb2.RetryInfo.FromString(detail.value).retry_delay.ToMilliseconds() / 1e3
            )
        elif detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            found["reason"] = error_details_pb2.ErrorInfo.FromString(detail.value).reason
    return found
