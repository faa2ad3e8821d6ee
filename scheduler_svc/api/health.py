"""grpc.health.v1, in three answers that must not be mixed up:

* LIVE, and "": the process lives. Its event loop gives the answer, so one that does not turn gives none: probe it with
  a time limit, and restart what fails.
* READY, and each service's name: requests can be answered. An executor is attached, its steps complete, and the
  process was not told to stop. What fails is left alone until it is ready again.
* ACCEPTING: new requests are taken, executor or not. Our client goes by it.
"""

import asyncio

from grpc_health.v1 import health_pb2

from paged.channel import ACCEPTING
from scheduler_svc.api.engine_face import Engine
from scheduler_svc.api.health_servicer import HealthServicer

LIVE = "paged.v1.Live"
READY = "paged.v1.Ready"
SERVICES = ("paged.v1.InferenceService", "paged.v1.ControlService", "vllm.grpc.engine.VllmEngine")
POLL_S = 0.05


class EngineHealth:
    """Keeps the health service in step with the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._follower: asyncio.Task[None] | None = None
        self.servicer = HealthServicer()

    async def start(self) -> None:
        for name in (LIVE, ACCEPTING):
            await self.servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        await self._publish(self._engine.ready)
        self._follower = asyncio.create_task(self._follow(), name="health")

    async def stop_accepting(self) -> None:
        """Have clients go elsewhere with new requests; whoever asks for READY is told the same."""
        if self._follower is not None:
            self._follower.cancel()
        await self._publish(False)
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
        for service in (READY, *SERVICES):
            await self.servicer.set(service, status.SERVING if ready else status.NOT_SERVING)
