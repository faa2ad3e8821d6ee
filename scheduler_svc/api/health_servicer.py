"""The grpc.health.v1 service, for anybody who can connect: what one of them does must not reach the others.

That of grpcio-health-checking holds a lock of all who watch while it writes to one of them, so a single one that does
not read keeps the status from ever changing again.
"""

import asyncio

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_svc.api.errors import abort, to_status
from scheduler_svc.errors import NotThere

_Status = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Tells what `set` has been told. How many may ask or watch is limited outside, as for all calls."""

    def __init__(self) -> None:
        self._statuses = {"": _Status.SERVING}
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
            await abort(context, to_status(NotThere("no such service")))
        return _Status(status=status)

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthListResponse:
        statuses = {service: _Status(status=status) for service, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """Not a generator, which the error boundary would count among the requests that are being served."""
        told = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _Status.SERVICE_UNKNOWN)
            if status != told:
                told = status
                await context.write(_Status(status=status))
            await changed.wait()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
