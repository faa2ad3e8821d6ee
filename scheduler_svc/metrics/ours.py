"""Metrics under our own names, `paged_*`. Of executors by endpoint and model, of requests by model."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import Metric

from scheduler_svc.driver import Driver
from scheduler_svc.engine import Engine
from scheduler_svc.histogram import Histogram
from scheduler_svc.metrics.families import Labels, counter, gauge, histogram
from scheduler_svc.metrics.of_executors import executor_metrics
from scheduler_svc.request_times import RequestTimes

MODEL = ("model",)


def our_metrics(engine: Engine) -> Iterator[Metric]:
    """To be called on the engine's event loop."""
    yield from executor_metrics({_labels(driver): driver for _, driver in sorted(engine.fleet.drivers.items())})
    yield from _of_requests({(model,): times for model, times in sorted(engine.times.items())})
    waiting: Mapping[Labels, float] = {(model.name,): model.waiting.state.num_waiting for model in engine.fleet.models}
    yield gauge("paged_unplaced_sequences", "Sequences that wait for an executor of their model.", MODEL, waiting)
    yield from _of_process(engine)


def _labels(driver: Driver) -> Labels:
    return driver.endpoint, "" if driver.attached is None else driver.attached.model.name


def _of_requests(times: Mapping[Labels, RequestTimes]) -> Iterator[Metric]:
    ended = {
        (*labels, how): float(count) for labels, of_model in times.items() for how, count in of_model.ended.items()
    }
    yield counter("paged_requests", "Requests that have ended, by how.", (*MODEL, "ended"), ended)
    for name, (text, read) in REQUEST_HISTOGRAMS.items():
        yield histogram(name, text, MODEL, {labels: read(of_model) for labels, of_model in times.items()})


def _of_process(engine: Engine) -> Iterator[Metric]:
    delivery = engine.delivery
    nothing: Labels = ()
    yield gauge("paged_unread_bytes", "Answers that wait for slow readers.", nothing, {nothing: delivery.unread_bytes})
    yield gauge("paged_ready", "1 while requests can be served.", nothing, {nothing: engine.ready})
    messages: Mapping[Labels, float] = {nothing: delivery.num_messages}
    yield counter("paged_stream_messages", "Messages of streams handed to gRPC.", nothing, messages)
    yield counter("paged_streamed_tokens", "Tokens in those messages.", nothing, {nothing: delivery.num_tokens})
    written = {nothing: delivery.result_to_write_s}
    yield histogram("paged_result_to_write_seconds", "From a token's result to its message.", nothing, written)


REQUEST_HISTOGRAMS: dict[str, tuple[str, Callable[[RequestTimes], Histogram]]] = {
    "paged_request_queue_seconds": ("From a request's arrival to its admission.", lambda t: t.queue_s),
    "paged_request_prefill_seconds": ("From admission to the first token.", lambda t: t.prefill_s),
    "paged_time_to_first_token_seconds": ("From arrival to the first token.", lambda t: t.first_token_s),
    "paged_request_decode_seconds": ("From the first token to the end.", lambda t: t.decode_s),
    "paged_request_inference_seconds": ("From admission to the end.", lambda t: t.inference_s),
    "paged_request_seconds": ("From arrival to the end.", lambda t: t.whole_s),
    "paged_time_per_output_token_seconds": ("Mean of a request, after its first token.", lambda t: t.mean_token_s),
    "paged_request_prompt_tokens": ("Of each request.", lambda t: t.prompt_tokens),
    "paged_request_output_tokens": ("Of each answer.", lambda t: t.output_tokens),
    "paged_request_max_tokens": ("As requests have asked for.", lambda t: t.max_tokens),
    "paged_request_samples": ("Answers that requests have asked for.", lambda t: t.num_samples),
}
