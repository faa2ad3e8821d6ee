"""The gRPC server: services, health, reflection, limits, and how it begins and ends."""

import os
import tempfile
from pathlib import Path
from typing import Any

import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paged.v1 import control_pb2_grpc, inference_pb2_grpc
from scheduler_svc.api.boundary import ErrorBoundary
from scheduler_svc.api.control import ControlServicer
from scheduler_svc.api.engine_face import Engine
from scheduler_svc.api.health import SERVICES, EngineHealth
from scheduler_svc.api.inference import InferenceServicer
from scheduler_svc.settings import SchedulerSettings

log = structlog.get_logger()

LOOPBACK = ("127.", "localhost:", "[::1]:")


class BindFailed(Exception):
    """The listening address cannot be taken, or not told."""


class ApiServer:
    """Serves one engine. `start` once, then `stop` once."""

    def __init__(self, engine: Engine, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._health = EngineHealth(engine)
        self._server = grpc.aio.server(
            interceptors=[ErrorBoundary()],
            options=server_options(settings),
            maximum_concurrent_rpcs=settings.max_concurrent_calls,
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(engine, settings), self._server)
        control_pb2_grpc.add_ControlServiceServicer_to_server(ControlServicer(engine, settings), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._server)
        names = (*SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> str:
        """Take calls; returns the real address as HOST:PORT. Raises BindFailed."""
        host = self._settings.listen_address.rpartition(":")[0]
        try:
            port = self._server.add_insecure_port(self._settings.listen_address)
        except RuntimeError as error:
            raise BindFailed(
                f"cannot listen on {self._settings.listen_address}: {error}; "
                "stop what holds the port or choose another one with --listen-address"
            ) from error
        address = f"{host}:{port}"
        await self._server.start()
        await self._health.start()
        if self._settings.address_file is not None:
            self._tell_address(self._settings.address_file, address)
        if not address.startswith(LOOPBACK):
            log.warning("listening_without_authentication", address=address)
        log.info("listening", address=address)
        return address

    def _tell_address(self, file: Path, address: str) -> None:
        try:
            write_atomically(file, address + "\n")
        except OSError as error:
            raise BindFailed(f"cannot write --address-file {file}: {error.strerror}") from error

    async def stop_accepting(self) -> None:
        """Have clients that follow our health go elsewhere with new requests; those that come here are still taken."""
        await self._health.stop_accepting()

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, give running ones this time, then cancel them."""
        await self._health.stop()
        await self._server.stop(grace_s)


def server_options(settings: SchedulerSettings) -> list[tuple[str, Any]]:
    """gRPC's own names for our settings."""
    return [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        # Without this, two schedulers on one port would share its calls in silence.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", round(settings.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients that ping more often than this are sent away.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.max_connection_age_ms", round(settings.max_connection_age_s * 1000)),
        ("grpc.max_connection_age_grace_ms", round(settings.max_connection_age_grace_s * 1000)),
    ]


def write_atomically(path: Path, text: str) -> None:
    """Whoever reads the file sees all of the text or no file."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(temporary, path)
