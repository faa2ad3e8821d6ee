"""How spans of both services leave for a collector of OpenTelemetry. To be imported only where they are wanted: it
needs the extra `tracing`."""

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

MAX_QUEUED_SPANS = 8192  # with more, the oldest are dropped
BETWEEN_BATCHES_MS = 1000
EXPORT_S = 5.0  # for one batch, tries again included; at the end of the process, too


def tracer_provider(endpoint: str, service: str, share: float) -> TracerProvider:
    """Spans go in batches, from a thread of its own, to the URL of an OTLP/HTTP receiver; the last ones when the
    process ends. `share` of the traces that begin here are recorded, and of those that others have begun the ones that
    they record. Headers and certificates are OpenTelemetry's own variables (`OTEL_EXPORTER_OTLP_HEADERS`, ...)."""
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(share)), resource=Resource.create({"service.name": service})
    )
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)
    provider.add_span_processor(
        # One batch holds all that can wait, so the end of the process waits for one that is under way and one more.
        BatchSpanProcessor(
            exporter,
            max_queue_size=MAX_QUEUED_SPANS,
            max_export_batch_size=MAX_QUEUED_SPANS,
            schedule_delay_millis=BETWEEN_BATCHES_MS,
        )
    )
    return provider
