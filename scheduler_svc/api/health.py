"""grpc.health.v1: "" says that the process is alive, each service's name that it can answer requests, and ACCEPTING
that it takes new ones, which our client goes by."""

import asyncio

from grpc_health.v1 import health, health_pb2

from paged.channel import ACCEPTING
from scheduler_svc.api.engine_face import Engine

SERVICES = ("paged.v1.InferenceService", "paged.v1.ControlService")
POLL_S = 0.05


class EngineHealth:
    """Keeps the health service in step with the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._follower: asyncio.Task[None] | None = None
        self.servicer = health.aio.HealthServicer()

    async def start(self) -> None:
        await self.servicer.set(ACCEPTING, health_pb2.HealthCheckResponse.SERVING)
        await self._publish(self._engine.ready)
        self._follower = asyncio.create_task(self._follow(), name="health")

    async def stop_accepting(self) -> None:
        """Have clients go elsewhere with new requests."""
        await self.servicer.set(ACCEPTING, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self) -> None:
        """From now on everything is NOT_SERVING, and watchers are told."""
        if self._follower is not None:
            self._follower.cancel()
        await self.servicer.enter_graceful_shutdown()

    async def _follow(self) -> None:
        published = self._engine.ready
        while True:
            await asyncio.sleep(POLL_S)
            if self._engine.ready != published:
                published = self._engine.ready
                await self._publish(published)

    async def _publish(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for service in SERVICES:
            await self.servicer.set(service, status.SERVING if ready else status.NOT_SERVING)
