"""The scheduler service: `paged-scheduler` or `python -m scheduler_svc`."""

import asyncio
import os
import signal
import sys

import structlog
import uvloop

from scheduler_svc.api.server import ApiServer, BindFailed
from scheduler_svc.engine import Engine
from scheduler_svc.errors import Unavailable
from scheduler_svc.logs import configure_logs
from scheduler_svc.parent import exit_with_parent
from scheduler_svc.settings import SchedulerSettings, parse_settings

LAST_MESSAGES_S = 1.0  # for calls to end once their answers have

log = structlog.get_logger()


async def serve(settings: SchedulerSettings) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends at once. Raises BindFailed."""
    stopped = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, _on_signal, stopped)
    engine = Engine(settings)
    server = ApiServer(engine, settings)
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
        waiting.cancel()
        driving.cancel()
        await asyncio.wait([driving])


def _on_signal(stopped: asyncio.Event) -> None:
    if stopped.is_set():
        os._exit(1)  # callers see a broken connection, UNAVAILABLE; an orderly way would tell them CANCELLED
    stopped.set()


def main() -> None:
    settings = parse_settings()
    configure_logs(settings.log_level, settings.log_format)
    if settings.exit_with_parent:
        exit_with_parent()
    try:
        uvloop.run(serve(settings))
    except BindFailed as error:
        print(f"paged-scheduler: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
