"""The HTTP server behind both services' metrics. Nobody who connects there can keep threads, or fill the log."""

import socket
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

MAX_CONNECTIONS = 16  # at once, each with a thread; more are closed at once
SILENCE_S = 5.0  # of a peer, then its connection is closed


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves a WSGI application from `begin` until `end`."""

    daemon_threads = True
    request_queue_size = 128  # that wait to be let in; of more than socketserver's five, one would wait for a second

    def __init__(self, host: str, port: int, app: Callable[..., Iterable[bytes]]) -> None:
        """Binds; port 0 means any. Raises OSError, and OverflowError where there is no such port."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        self._room = BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(app)
        self._thread = Thread(target=self.serve_forever, name="metrics", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Returns when nobody is let in any more."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who breaks off, says nothing or speaks no HTTP is no concern of anybody else. Faults of the application do
        not come here."""


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Not of every scrape."""
