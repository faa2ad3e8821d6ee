"""A collector: takes spans as OTLP over HTTP, as OpenTelemetry's own messages."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True)
class Received:
    service: str
    span: Span

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            entry.key: getattr(entry.value, entry.value.WhichOneof("value") or "") for entry in self.span.attributes
        }


@dataclass
class Collector:
    endpoint: str
    payloads: list[bytes] = field(default_factory=list)

    def spans(self) -> list[Received]:
        """All that have come."""
        return [
            Received(resource.resource.attributes[names.index("service.name")].value.string_value, span)
            for payload in list(self.payloads)
            for resource in ExportTraceServiceRequest.FromString(payload).resource_spans
            for names in [[entry.key for entry in resource.resource.attributes]]
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def named(self, name: str) -> list[Received]:
        return [received for received in self.spans() if received.span.name == name]


@contextmanager
def collector() -> Iterator[Collector]:
    """One that listens on loopback until the block is left."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.payloads.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
