"""The scheduler service: `paged-scheduler` or `python -m scheduler_svc`."""

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

import grpc.aio
import structlog
import uvloop

if TYPE_CHECKING:
    from scheduler_svc.metrics.endpoint import MetricsEndpoint

from scheduler_svc.api.server import ApiServer, BindFailed
from scheduler_svc.collecting import collect_rarely
from scheduler_svc.engine import Engine
from scheduler_svc.errors import Unavailable
from scheduler_svc.event_loop import EventLoop
from scheduler_svc.link.curve import BadKeys
from scheduler_svc.logs import configure_logs
from scheduler_svc.parent import exit_with_parent
from scheduler_svc.settings import EXIT_BAD_SETTING, SchedulerSettings, parse_settings
from scheduler_svc.text.memory import keep_little_memory, keep_numpys_pieces_together

LAST_MESSAGES_S = 1.0  # for calls to end once their answers have

log = structlog.get_logger()


async def serve(settings: SchedulerSettings) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends at once. Raises BindFailed, BadKeys."""
    stopped = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, _on_signal, stopped)
    engine = Engine(settings)
    server = ApiServer(engine, settings, _tracing(settings))
    metrics = _serve_metrics(engine, settings)
    await server.start()
    driving = asyncio.create_task(engine.run())
    waiting = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait([driving, waiting], return_when=asyncio.FIRST_COMPLETED)
        if driving.done():
            driving.result()  # raises: it never ends by itself
        log.info("stopping")
        # The engine refuses new requests by itself, so the server goes on taking calls until the last answer has ended:
        # one that came while the server was closing would be told CANCELLED.
        await server.stop_accepting()
        engine.stop()
        await engine.drained(settings.shutdown_grace_s)
        engine.fail_all(Unavailable("the scheduler is shutting down"))
        await server.stop(LAST_MESSAGES_S)
    finally:
        if metrics is not None:
            metrics.stop()
        waiting.cancel()
        driving.cancel()
        await asyncio.wait([driving])


def _serve_metrics(engine: Engine, settings: SchedulerSettings) -> "MetricsEndpoint | None":
    if settings.metrics_address is None:
        return None
    from scheduler_svc.metrics.all import all_metrics
    from scheduler_svc.metrics.endpoint import MetricsEndpoint

    endpoint = MetricsEndpoint(
        settings.metrics_address, lambda: all_metrics(engine, with_vllm_names=settings.metrics_vllm_names)
    )
    try:
        endpoint.start()
    except OSError as error:
        found = f"cannot serve metrics on {settings.metrics_address}: {error.strerror}"
        raise BindFailed(f"{found}; choose another address with --metrics-address") from error
    return endpoint


def _tracing(settings: SchedulerSettings) -> list[grpc.aio.ServerInterceptor]:
    if settings.traces_endpoint is None:
        return []
    try:
        from paged.tracing import tracer_provider
        from scheduler_svc.api.tracing import Tracing
    except ModuleNotFoundError as error:
        print(f"paged-scheduler: --traces-endpoint needs the extra tracing: {error}", file=sys.stderr)
        raise SystemExit(EXIT_BAD_SETTING) from None
    return [Tracing(tracer_provider(settings.traces_endpoint, "paged-scheduler", settings.traces_share))]


def _on_signal(stopped: asyncio.Event) -> None:
    if stopped.is_set():
        os._exit(1)  # callers see a broken connection, UNAVAILABLE; an orderly way would tell them CANCELLED
    stopped.set()


def main() -> None:
    settings = parse_settings()
    configure_logs(settings.log_level, settings.log_format)
    if settings.exit_with_parent:
        if os.getppid() == 1:  # as with executors: the parent died while we were being started
            raise SystemExit(1)
        exit_with_parent()
    collect_rarely()
    keep_little_memory()
    keep_numpys_pieces_together()
    try:
        uvloop.run(serve(settings), loop_factory=EventLoop)
    except (BindFailed, BadKeys) as error:
        print(f"paged-scheduler: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
