"""Spans of the steps that compute traced requests. To be imported only where they are wanted: it needs the extra
`tracing`."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import structlog
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Tracer, TracerProvider, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from paged.v1 import executor_pb2

MAX_SINGLE_STEPS = 32  # of a row, each with a span of its own; those that follow have one for all

_PROPAGATOR = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class _Moments:
    """Of one step, in seconds of `time.perf_counter()`."""

    begin: float
    taken_in: float
    computed: float
    end: float


@dataclass(slots=True)
class _TracedRow:
    session: int
    parent: Context
    num_steps: int = 0
    rest_tokens: int = 0
    rest_begin_ns: int = 0
    rest_end_ns: int = 0


class StepTraces:
    """Follows the rows that plans start with a `traceparent`, until they end. What it holds is bounded by the rows that
    the executor lends."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer: Tracer = provider.get_tracer("paged.executor")
        self._rows: dict[int, _TracedRow] = {}
        self._clock_ns = 0  # from perf_counter to nanoseconds since 1970

    def note_step(
        self,
        plans: Iterable[tuple[int, executor_pb2.StepPlan]],
        begin: float,
        taken_in: float,
        computed: float,
        end: float,
    ) -> None:
        """Those of one step that is over, each with its session. Moments in seconds of `time.perf_counter()`."""
        moments = _Moments(begin, taken_in, computed, end)
        self._clock_ns = time.time_ns() - time.perf_counter_ns()
        for session, plan in plans:
            if self._rows and plan.ended_rows:
                for row in _int32s(plan.ended_rows):
                    self._end(row)
            for started in plan.started:
                self._end(started.row)
                if started.traceparent:
                    self._begin(session, started)
            if self._rows and plan.scheduled_rows:
                self._note_rows(session, plan, moments)

    def _begin(self, session: int, started: executor_pb2.StartedRow) -> None:
        parent = _PROPAGATOR.extract({"traceparent": started.traceparent})
        if get_current_span(parent).get_span_context().trace_flags.sampled:
            self._rows[started.row] = _TracedRow(session, parent)

    def _note_rows(self, session: int, plan: executor_pb2.StepPlan, moments: _Moments) -> None:
        rows, tokens = _int32s(plan.scheduled_rows), _int32s(plan.scheduled_tokens)
        for row, num_tokens in zip(rows, tokens, strict=True):
            traced = self._rows.get(row)
            if traced is None:
                continue
            if traced.session != session:  # that one has ended without a word of its rows
                self._end(row)
                continue
            traced.num_steps += 1
            if traced.num_steps > MAX_SINGLE_STEPS:
                self._add_to_rest(traced, num_tokens, moments)
            else:
                self._tell_step(traced, num_tokens, len(rows), moments)

    def _tell_step(self, traced: _TracedRow, num_tokens: int, num_rows: int, moments: _Moments) -> None:
        span = self._tracer.start_span(
            "step",
            context=traced.parent,
            kind=SpanKind.INTERNAL,
            start_time=self._ns(moments.begin),
            attributes={
                "paged.step.tokens": num_tokens,
                "paged.step.rows": num_rows,
                "paged.step.take_in_ms": (moments.taken_in - moments.begin) * 1e3,
                "paged.step.compute_ms": (moments.computed - moments.taken_in) * 1e3,
                "paged.step.answer_ms": (moments.end - moments.computed) * 1e3,
            },
        )
        span.end(self._ns(moments.end))

    def _add_to_rest(self, traced: _TracedRow, num_tokens: int, moments: _Moments) -> None:
        if traced.num_steps == MAX_SINGLE_STEPS + 1:
            traced.rest_begin_ns = self._ns(moments.begin)
        traced.rest_end_ns = self._ns(moments.end)
        traced.rest_tokens += num_tokens

    def _end(self, row: int) -> None:
        traced = self._rows.pop(row, None)
        if traced is None or not traced.rest_end_ns:
            return
        attributes = {
            "paged.step.tokens": traced.rest_tokens,
            "paged.step.count": traced.num_steps - MAX_SINGLE_STEPS,
        }
        begin = traced.rest_begin_ns
        self._tracer.start_span("steps", context=traced.parent, start_time=begin, attributes=attributes).end(
            traced.rest_end_ns
        )

    def _ns(self, seconds: float) -> int:
        return self._clock_ns + round(seconds * 1e9)


def log_library_events() -> None:
    """What OpenTelemetry has to say, as of a collector that is away, becomes events of ours."""
    logger = logging.getLogger("opentelemetry")
    logger.handlers[:] = [_Events()]
    logger.setLevel(logging.WARNING)
    logger.propagate = False


class _Events(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().warning("tracing", reason=record.getMessage())


def _int32s(column: bytes) -> list[int]:
    return np.frombuffer(column, "<i4").tolist()
