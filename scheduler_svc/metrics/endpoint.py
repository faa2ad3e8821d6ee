"""A port of its own for Prometheus. It answers in threads; what it tells is read on the engine's event loop."""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from paged.metrics_server import MetricsServer

READ_TIMEOUT_S = 5.0  # for the event loop to come to it

log = structlog.get_logger()


class OnLoop(Collector):
    """`read` is called on the running loop, wherever it is asked for. Nothing is told while that loop does not turn, or
    once it has ended."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._read = read

    def collect(self) -> Iterable[Metric]:
        async def on_loop() -> list[Metric]:
            return list(self._read())

        if self._loop.is_closed():
            return []
        reading = asyncio.run_coroutine_threadsafe(on_loop(), self._loop)
        try:
            return reading.result(READ_TIMEOUT_S)
        except (TimeoutError, CancelledError):
            reading.cancel()
            log.warning("metrics_not_read", waited_s=READ_TIMEOUT_S)
            return []

    def describe(self) -> Iterable[Metric]:
        """Nothing: names need not be checked for being unique, and reading them here would wait for this very loop."""
        return []


class MetricsEndpoint:
    """Serves from `start` until `stop`."""

    def __init__(self, address: str, read: Callable[[], Iterable[Metric]]) -> None:
        self._address = address
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(OnLoop(read))
        self._server: MetricsServer | None = None

    def start(self) -> str:
        """The real address as HOST:PORT. Raises OSError if it cannot be had."""
        host, _, port = self._address.rpartition(":")
        self._server = MetricsServer(host.strip("[]"), int(port), make_wsgi_app(self._registry))
        self._server.begin()
        address = f"{host}:{self._server.server_port}"
        log.info("metrics_served", address=address)
        return address

    def stop(self) -> None:
        if self._server is not None:
            self._server.end()
