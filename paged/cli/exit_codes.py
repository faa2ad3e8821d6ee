"""What the command ends with, for scripts."""

from enum import IntEnum

from paged.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    InvalidRequestError,
    NotFoundError,
    PagedClientError,
    PermissionDeniedError,
    RequestAbortedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)


class ExitCode(IntEnum):
    """All there are; docs/command_line.md has the same table."""

    OK = 0
    FAILED = 1  # anything that is not below
    USAGE = 2  # the command line itself
    UNAVAILABLE = 3  # nobody is there, or nobody has an executor: later, it may go
    REFUSED = 4  # the request is bad, or its caller may not: the same again will fail again
    DEADLINE = 5
    BUSY = 6  # a queue is full, or too many are there already: later, it may go
    ENDED = 7  # somebody has ended the request
    INTERRUPTED = 130  # Ctrl-C


_CODES: dict[type[PagedClientError], ExitCode] = {
    UnavailableError: ExitCode.UNAVAILABLE,
    InvalidRequestError: ExitCode.REFUSED,
    NotFoundError: ExitCode.REFUSED,
    DuplicateRequestError: ExitCode.REFUSED,
    UnauthenticatedError: ExitCode.REFUSED,
    PermissionDeniedError: ExitCode.REFUSED,
    DeadlineExceededError: ExitCode.DEADLINE,
    ResourceExhaustedError: ExitCode.BUSY,
    RequestAbortedError: ExitCode.ENDED,
}


def exit_code(error: Exception) -> ExitCode:
    """Of what has gone wrong."""
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), ExitCode.FAILED)
