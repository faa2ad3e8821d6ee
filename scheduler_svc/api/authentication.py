"""Lets in who may come in: before a call's request is read, its token is looked up, and its roles with its method."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import structlog

from scheduler_svc.api.caller import ANYBODY, CALLER
from scheduler_svc.api.errors import abort, to_status
from scheduler_svc.api.permissions import OPEN_METHODS, check_may_call
from scheduler_svc.api.tokens import Tokens
from scheduler_svc.errors import PagedError, Unauthenticated

_HEADER = "authorization"
_SCHEME = "bearer "
_BETWEEN_LINES_S = 1.0

Metadata = Sequence[tuple[str, str | bytes]]

log = structlog.get_logger()


class Authentication(grpc.aio.ServerInterceptor):
    """`tokens` gives those there are now; None lets everybody in, and is for where the transport has let them in."""

    def __init__(self, tokens: Callable[[], Tokens] | None) -> None:
        self._tokens = tokens
        self._refused = RefusedCalls()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = str(handler_call_details.method)
        if method in OPEN_METHODS:
            return await continuation(handler_call_details)
        caller = ANYBODY
        if self._tokens is not None:
            name = ""
            try:
                caller = self._tokens().caller(_bearer_token(handler_call_details.invocation_metadata))
                name = caller.name
                check_may_call(caller, method)
            except PagedError as error:
                return self._refusing(error, method, name)
        CALLER.set(caller)  # this and the handler run in one task
        return await continuation(handler_call_details)

    def _refusing(self, error: PagedError, method: str, name: str) -> grpc.RpcMethodHandler:
        """Of the one kind that need not read any request, whatever the method's own is."""

        async def refuse(_requests: object, context: grpc.aio.ServicerContext) -> None:
            self._refused.note(context.peer(), method, name, str(error))
            await abort(context, to_status(error))

        return grpc.stream_stream_rpc_method_handler(refuse)


def _bearer_token(metadata: Metadata | None) -> str:
    """Raises Unauthenticated."""
    values = [value for key, value in metadata or () if key == _HEADER]
    if len(values) != 1 or not isinstance(values[0], str) or not values[0].lower().startswith(_SCHEME):
        raise Unauthenticated("a token is needed: send it as metadata, authorization: Bearer TOKEN")
    return values[0][len(_SCHEME) :].strip()


class RefusedCalls:
    """Counts refused calls, and logs one of them a second at most."""

    def __init__(self) -> None:
        self._num = 0
        self._next_line = 0.0

    def note(self, peer: str, method: str, name: str, reason: str) -> None:
        self._num += 1
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _BETWEEN_LINES_S
            log.warning("call_refused", peer=peer, method=method, token=name, reason=reason, refused_so_far=self._num)
