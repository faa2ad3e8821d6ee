"""The grpc.health.v1 service, for anybody who can connect: what one of them does must not reach the others.

That of grpcio-health-checking holds a lock of all who watch while it writes to one of them, so a single one that does
not read keeps the status from ever changing again.
"""

import asyncio
from collections import Counter

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_svc.api.errors import abort, to_status
from scheduler_svc.errors import TooManyWatchers

MAX_WATCHERS_A_PEER = 16  # of one connection, which needs one for each service that it follows

_Status = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Tells what `set` has been told. `max_watchers` is for all connections together."""

    def __init__(self, max_watchers: int) -> None:
        self._max_watchers = max_watchers
        self._statuses = {"": _Status.SERVING}
        self._watchers: Counter[str] = Counter()  # by peer
        self._changed = asyncio.Event()
        self._has_ended = False

    async def set(self, service: str, status: "health_pb2.HealthCheckResponse.ServingStatus") -> None:
        """From now on; does nothing after `enter_graceful_shutdown`."""
        if not self._has_ended:
            self._statuses[service] = status
            self._tell()

    async def enter_graceful_shutdown(self) -> None:
        """Nothing is served any more, whatever it is."""
        self._has_ended = True
        self._statuses = dict.fromkeys(self._statuses, _Status.NOT_SERVING)
        self._tell()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return _Status(status=status)

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthListResponse:
        statuses = {service: _Status(status=status) for service, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """Not a generator, which the error boundary would count among the requests that are being served."""
        peer, told = context.peer(), None
        if self._watchers[peer] >= MAX_WATCHERS_A_PEER or self._watchers.total() >= self._max_watchers:
            error = TooManyWatchers("too many watch the health of this server, or do over this connection")
            await abort(context, to_status(error))
        self._watchers[peer] += 1
        try:
            while True:
                changed = self._changed
                status = self._statuses.get(request.service, _Status.SERVICE_UNKNOWN)
                if status != told:
                    told = status
                    await context.write(_Status(status=status))
                await changed.wait()
        finally:
            self._watchers[peer] -= 1
            if not self._watchers[peer]:
                del self._watchers[peer]

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
