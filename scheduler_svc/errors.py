"""What can go wrong with a request, as the few exceptions that the API maps to gRPC status codes."""

from dataclasses import dataclass


class PagedError(Exception):
    """Base of all errors that a client is told about."""


@dataclass(frozen=True)
class FieldViolation:
    """One bad field: its path as in the proto (`sampling.top_p`), and what is wrong, with value, limit and remedy."""

    field: str
    description: str


class InvalidRequest(PagedError):
    """The request cannot be served as it is (INVALID_ARGUMENT)."""

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = violations


class ModelNotFound(PagedError):
    """No model of that name is served (NOT_FOUND)."""


class NotThere(PagedError):
    """No request or executor of that name is known (NOT_FOUND)."""


class Unauthenticated(PagedError):
    """Nobody knows who makes the call (UNAUTHENTICATED)."""


class PermissionDenied(PagedError):
    """Whoever makes the call may not (PERMISSION_DENIED)."""


class DuplicateRequest(PagedError):
    """A live request has that id already (ALREADY_EXISTS)."""


class QueueFull(PagedError):
    """Too many requests wait (RESOURCE_EXHAUSTED)."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooManyWatchers(PagedError):
    """Too many watch already (RESOURCE_EXHAUSTED)."""


class TooManyCalls(PagedError):
    """A caller has begun too many calls, or too many that it does not finish (RESOURCE_EXHAUSTED)."""


class ReaderTooSlow(PagedError):
    """Too much of an answer waits for its reader (RESOURCE_EXHAUSTED)."""


class Unsupported(PagedError):
    """A method of another engine's API that there is nothing here for (UNIMPLEMENTED)."""


class Unavailable(PagedError):
    """No executor, or shutting down; another scheduler may serve the request (UNAVAILABLE)."""


class DeadlineExceeded(PagedError):
    """The request's time is over: its own deadline, or the server's limit (DEADLINE_EXCEEDED)."""


class DeadlineTooShort(DeadlineExceeded):
    """The request's deadline could not be met, and it was not begun (DEADLINE_EXCEEDED)."""


class RequestAborted(PagedError):
    """Somebody ended the request through the control service (CANCELLED)."""


class RequestFailed(PagedError):
    """The request failed through no fault of its own (INTERNAL)."""
