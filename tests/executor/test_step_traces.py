"""Spans of steps: a bounded number for each traced row, and none for others."""

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from executor_svc.step_traces import MAX_SINGLE_STEPS, StepTraces
from paged.v1.executor_pb2 import StepPlan
from tests.executor.plans import OTHER_SESSION, SESSION, column, schedule, start

TRACED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = TRACED[:-2] + "00"


class Traced:
    """Notes steps of a millisecond, one after another."""

    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self._traces = StepTraces(provider)
        self._now = 0.0

    def step(self, *plans: tuple[int, StepPlan]) -> None:
        self._now += 1e-3
        self._traces.note_step(plans, self._now, self._now + 1e-4, self._now + 8e-4, self._now + 9e-4)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._spans.get_finished_spans() if span.name == name]


@pytest.fixture
def traced() -> Traced:
    return Traced()


def prefill(row: int, traceparent: str, num_tokens: int = 5) -> StepPlan:
    started = start(row, range(num_tokens), [row + 1])
    started.traceparent = traceparent
    return schedule(StepPlan(started=[started]), (row, num_tokens, True))


def decode(row: int) -> StepPlan:
    return schedule(StepPlan(), (row, 1, True))


@pytest.mark.parametrize("traceparent", ["", UNSAMPLED, "00-zz", "\0" * 9, TRACED[:30]])
def test_rows_without_a_sampled_trace_have_no_spans(traced: Traced, traceparent: str) -> None:
    traced.step((SESSION, prefill(0, traceparent)))
    traced.step((SESSION, decode(0)))
    assert not traced.spans("step")


def test_a_span_tells_of_the_rows_tokens_and_of_the_step(traced: Traced) -> None:
    plan = schedule(prefill(2, TRACED), (3, 7, True), (1, 1, True))
    traced.step((SESSION, plan))
    (span,) = traced.spans("step")
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == (int(TRACED[3:35], 16), int(TRACED[36:52], 16))
    facts = dict(span.attributes or {})
    assert (facts["paged.step.tokens"], facts["paged.step.rows"]) == (5, 3)
    parts = [facts[f"paged.step.{part}_ms"] for part in ("take_in", "compute", "answer")]
    assert parts == pytest.approx([0.1, 0.7, 0.1])
    assert span.end_time is not None
    assert span.start_time is not None
    assert span.end_time - span.start_time == pytest.approx(900_000, abs=2)


def test_steps_beyond_the_first_have_one_span_when_the_row_ends(traced: Traced) -> None:
    traced.step((SESSION, prefill(0, TRACED)))
    for _ in range(MAX_SINGLE_STEPS + 9):
        traced.step((SESSION, decode(0)))
    assert (len(traced.spans("step")), traced.spans("steps")) == (MAX_SINGLE_STEPS, [])
    traced.step((SESSION, StepPlan(ended_rows=column([0]))))
    (rest,) = traced.spans("steps")
    assert dict(rest.attributes or {}) == {"paged.step.tokens": 10, "paged.step.count": 10}
    traced.step((SESSION, prefill(0, "")))
    assert len(traced.spans("step")) == MAX_SINGLE_STEPS


def test_a_row_that_another_session_has_now_is_no_longer_traced(traced: Traced) -> None:
    traced.step((SESSION, prefill(0, TRACED)))
    traced.step((OTHER_SESSION, decode(0)))
    traced.step((SESSION, decode(0)))
    assert len(traced.spans("step")) == 1


def test_a_row_that_ends_and_begins_in_one_plan_is_traced_as_the_new_one(traced: Traced) -> None:
    traced.step((SESSION, prefill(0, "")))
    again = prefill(0, TRACED, num_tokens=3)
    again.ended_rows = column([0])
    traced.step((SESSION, again))
    assert [dict(span.attributes or {})["paged.step.tokens"] for span in traced.spans("step")] == [3]
