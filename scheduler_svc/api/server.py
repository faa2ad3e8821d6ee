"""The gRPC server: services, health, reflection, limits, and how it begins and ends."""

import asyncio
import os
import ssl
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from paged.addresses import is_loopback
from paged.followed import Followed
from paged.v1 import control_pb2_grpc, inference_pb2_grpc
from scheduler_svc.api.authentication import Authentication
from scheduler_svc.api.boundary import ErrorBoundary
from scheduler_svc.api.call_limits import MAX_OPEN_CALLS_A_PEER, AllCallLimits
from scheduler_svc.api.caller import Caller
from scheduler_svc.api.control import ControlServicer
from scheduler_svc.api.engine_face import Engine
from scheduler_svc.api.health import SERVICES, EngineHealth
from scheduler_svc.api.inference import InferenceServicer
from scheduler_svc.api.live_calls import LOOK_S, LiveCalls
from scheduler_svc.api.permissions import check_may_call
from scheduler_svc.api.tls import server_context, server_credentials
from scheduler_svc.api.tokens import Tokens, read_tokens
from scheduler_svc.api.vllm_engine import VllmEngineServicer
from scheduler_svc.settings import SchedulerSettings

if TYPE_CHECKING:
    from scheduler_svc.api.block_map import BlockMapServer

GENERATE = "/paged.v1.InferenceService/Generate"

log = structlog.get_logger()


class BindFailed(Exception):
    """The listening address cannot be taken, or not told; or what is to guard it cannot be read."""


class ApiServer:
    """Serves one engine. `start` once, then `stop` once; `innermost` interceptors come after our own. Raises
    BindFailed."""

    def __init__(
        self, engine: Engine, settings: SchedulerSettings, innermost: Sequence[grpc.aio.ServerInterceptor] = ()
    ) -> None:
        self._settings = settings
        self.block_map_address: str | None = None  # the real one, once it is served
        self._health = EngineHealth(engine)
        try:
            self._credentials, tls = server_credentials(settings), server_context(settings)
            self._tokens = _follow_tokens(settings.token_file, engine) if settings.token_file is not None else None
        except (OSError, ValueError) as error:
            raise BindFailed(f"cannot use what is to guard {settings.listen_address}: {error}") from error
        self._calls, self._call_limits = LiveCalls(), AllCallLimits(settings)
        self._looking: asyncio.Task[None] | None = None
        self._block_map = _block_map(engine, settings.block_map_address, self._tokens, tls)
        self._inference = inference = InferenceServicer(engine, settings, self._call_limits.requests)
        unread = {GENERATE: inference.check_unread}
        self._server = grpc.aio.server(
            interceptors=[
                ErrorBoundary(self._call_limits, self._calls, unread),
                Authentication(self._tokens),
                *innermost,
            ],
            options=server_options(settings),
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, self._server)
        control_pb2_grpc.add_ControlServiceServicer_to_server(ControlServicer(engine, settings), self._server)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineServicer(engine, settings), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._server)
        if not settings.reflection:
            return
        names = (*SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> str:
        """Take calls; returns the real address as HOST:PORT. Raises BindFailed."""
        host = self._settings.listen_address.rpartition(":")[0]
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(self._settings.listen_address)
            else:
                port = self._server.add_secure_port(self._settings.listen_address, self._credentials)
        except RuntimeError as error:
            raise BindFailed(
                f"cannot listen on {self._settings.listen_address}: {error}; "
                "stop what holds the port or choose another one with --listen-address"
            ) from error
        address = f"{host}:{port}"
        await self._server.start()
        await self._health.start()
        await self._start_block_map()
        if self._tokens is not None:
            self._looking = asyncio.create_task(self._look(self._tokens), name="live calls")
        if self._settings.address_file is not None:
            self._tell_address(self._settings.address_file, address)
        settings = self._settings
        guards = {"tls": self._credentials is not None, "tokens": settings.token_file is not None}
        if settings.insecure and not is_loopback(host):
            log.warning("listening_insecurely", address=address, **guards)
        log.info("listening", address=address, client_certificates=settings.tls_client_ca is not None, **guards)
        return address

    async def _start_block_map(self) -> None:
        if self._block_map is None:
            return
        try:
            self.block_map_address = await self._block_map.start()
        except OSError as error:
            where = self._settings.block_map_address
            raise BindFailed(f"cannot listen on --block-map-address {where}: {error.strerror or error}") from error

    def _tell_address(self, file: Path, address: str) -> None:
        try:
            write_atomically(file, address + "\n")
        except OSError as error:
            raise BindFailed(f"cannot write --address-file {file}: {error.strerror}") from error

    async def stop_accepting(self) -> None:
        """Have clients that follow our health go elsewhere with new requests; those that come here are still taken."""
        self._inference.close_many()
        await self._health.stop_accepting()

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, give running ones this time, then cancel them."""
        await self._health.stop()
        if self._looking is not None:
            self._looking.cancel()
        if self._block_map is not None:
            await self._block_map.stop()
        self._inference.close_many()
        await self._server.stop(grace_s)

    async def _look(self, tokens: Callable[[], Tokens]) -> None:
        """End the calls of those whose tokens have expired, or are others' or nobody's by now."""

        def check(caller: Caller, method: str) -> None:
            check_may_call(tokens().again(caller), method)

        while True:
            await asyncio.sleep(LOOK_S)
            self._calls.look(check)


def _block_map(
    engine: Engine, address: str | None, tokens: Callable[[], Tokens] | None, tls: ssl.SSLContext | None
) -> "BlockMapServer | None":
    if address is None:
        return None
    from scheduler_svc.api.block_map import BlockMapServer  # brings aiohttp, a fifth of all that is imported

    return BlockMapServer(engine, address, tokens, tls)


def _follow_tokens(path: Path, engine: Engine) -> Callable[[], Tokens]:
    """Those there are now; the engine is told what tenants may have whenever the file says otherwise."""

    def changed(tokens: Tokens) -> None:
        tenants = engine.tenants
        tenants.replace({tenant.name: tenant.over(tenants.stated(tenant.name)) for tenant in tokens.file.tenants})
        log.info("tokens_read", tokens=len(tokens.file.tokens), tenants=len(tokens.file.tenants))

    def failed(error: Exception) -> None:
        log.error("tokens_not_reloaded", reason=str(error))

    followed = Followed([path], lambda: read_tokens(path), failed, on_change=changed)
    changed(followed.current)
    return lambda: followed.current


def server_options(settings: SchedulerSettings) -> list[tuple[str, Any]]:
    """gRPC's own names for our settings."""
    return [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        # Of one connection. It is more than are taken, so that whoever has too many is told: what is above this, gRPC's
        # clients keep to themselves.
        ("grpc.max_concurrent_streams", settings.max_concurrent_calls + 2 * MAX_OPEN_CALLS_A_PEER),
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
