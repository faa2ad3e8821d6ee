"""Spans of calls that generate: each call's own, as a child of its caller's, and in it those of its phases. To be
imported only where they are wanted: it needs the extra `tracing`."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, TracerProvider, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from scheduler_svc.api.errors import to_status
from scheduler_svc.errors import PagedError
from scheduler_svc.trace import TRACE, Fact

Metadata = Sequence[tuple[str, str | bytes]]

TRACED_METHODS = frozenset({"/paged.v1.InferenceService/Generate", "/vllm.grpc.engine.VllmEngine/Generate"})

# Those that OpenTelemetry's conventions call a server's errors; the others are its callers'.
_FAULTS = frozenset(
    code.value[0]
    for code in (
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    )
)
_PROPAGATOR = TraceContextTextMapPropagator()
_CONTEXT_KEYS = ("traceparent", "tracestate")


class Tracing(grpc.aio.ServerInterceptor):
    """Begins and ends the span of each such call; where it is recorded, `TRACE` is set meanwhile. It is the innermost
    interceptor: what it hears of errors is what handlers raise."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("paged.scheduler")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method not in TRACED_METHODS:
            return handler
        begin = handler.unary_stream
        metadata = handler_call_details.invocation_metadata

        async def traced(request: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
            with CallTrace(self._tracer, method, metadata) as trace:
                if trace.is_recorded:
                    TRACE.set(trace)  # the call is a task of its own
                async with aclosing(begin(request, context)) as messages:
                    async for message in messages:
                        yield message

        return grpc.unary_stream_rpc_method_handler(traced, handler.request_deserializer, handler.response_serializer)


class CallTrace:
    """One call's. Its span ends when it is left, with the status that the call ends with."""

    def __init__(self, tracer: Tracer, method: str, metadata: Metadata | None) -> None:
        self._tracer = tracer
        self._clock_ns = time.time_ns() - time.perf_counter_ns()  # from one clock to the other
        carrier = {key: value for key, value in metadata or () if key in _CONTEXT_KEYS and isinstance(value, str)}
        service, _, name = method.strip("/").partition("/")
        self._span: Span = tracer.start_span(
            f"{service}/{name}",
            context=_PROPAGATOR.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": name},
        )

    @property
    def is_recorded(self) -> bool:
        return self._span.is_recording()

    @property
    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(self._span))
        return carrier["traceparent"]

    def note_phase(self, name: str, begin: float, end: float) -> None:
        context = set_span_in_context(self._span)
        self._tracer.start_span(name, context=context, start_time=self._ns(begin)).end(self._ns(end))

    def describe(self, facts: Mapping[str, Fact]) -> None:
        self._span.set_attributes(facts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        code = _status_code(error)
        self._span.set_attribute("rpc.grpc.status_code", code)
        if error is not None:
            # Nothing of its text, which may quote the request.
            self._span.set_attribute("error.type", type(error).__name__)
        if code in _FAULTS:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _ns(self, seconds: float) -> int:
        return self._clock_ns + round(seconds * 1e9)


def _status_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, PagedError):
        return to_status(error).code
    gone = isinstance(error, GeneratorExit | asyncio.CancelledError | grpc.aio.BaseError)
    return (grpc.StatusCode.CANCELLED if gone else grpc.StatusCode.INTERNAL).value[0]
