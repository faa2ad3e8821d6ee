"""The same under vLLM's names, where they mean the same, so that dashboards made for vLLM show something true.

Off unless asked for: two names for one thing cost twice. All executors of a model are told of together, as engine 0.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import InfoMetricFamily, Metric

from scheduler_svc.driver import Driver
from scheduler_svc.engine import Engine
from scheduler_svc.histogram import Histogram
from scheduler_svc.metrics.families import Labels, counter, gauge, histogram, together
from scheduler_svc.request_times import RequestTimes

LABELS = ("model_name", "engine")
ENGINE = "0"
# As vLLM says how a request has ended; it counts what was cancelled as aborted.
REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "failed": "error"}


def vllm_metrics(engine: Engine) -> Iterator[Metric]:
    """To be called on the engine's event loop."""
    drivers: defaultdict[Labels, list[Driver]] = defaultdict(list)
    for _, driver in sorted(engine.fleet.drivers.items()):
        if driver.attached is not None:
            drivers[driver.attached.model.name, ENGINE].append(driver)
    yield from _of_executors(drivers, engine)
    yield from _of_requests({(model, ENGINE): times for model, times in sorted(engine.times.items())})


def _of_executors(drivers: Mapping[Labels, list[Driver]], engine: Engine) -> Iterator[Metric]:
    def total(read: Callable[[Driver], float]) -> dict[Labels, float]:
        return {labels: sum(map(read, of_model)) for labels, of_model in drivers.items()}

    running, waiting = total(lambda d: d.scheduler.state.num_running), total(lambda d: d.scheduler.state.num_waiting)
    for model in engine.fleet.models:
        labels = (model.name, ENGINE)
        waiting[labels] = waiting.get(labels, 0) + model.waiting.state.num_waiting
    used, leased = (
        total(lambda d: d.scheduler.state.cache.pool.num_used),
        total(lambda d: d.scheduler.state.cache.pool.num_leased),
    )
    yield gauge("vllm:num_requests_running", "Sequences that run.", LABELS, running)
    yield gauge("vllm:num_requests_waiting", "Sequences that wait.", LABELS, waiting)
    usage = {labels: used[labels] / max(leased[labels], 1) for labels in used}
    yield gauge("vllm:kv_cache_usage_perc", "Share of the leased blocks that sequences hold, 0 to 1.", LABELS, usage)
    counts: dict[str, tuple[str, Callable[[Driver], float]]] = {
        "vllm:prefix_cache_queries": ("Tokens of prompts.", lambda d: d.scheduler.state.counters.prompt_tokens),
        "vllm:prefix_cache_hits": ("Of these, cached.", lambda d: d.scheduler.state.counters.cached_prompt_tokens),
        "vllm:prompt_tokens": ("Tokens of prompts.", lambda d: d.scheduler.state.counters.prompt_tokens),
        "vllm:generation_tokens": ("Tokens sampled.", lambda d: d.scheduler.state.counters.generated_tokens),
        "vllm:num_preemptions": ("Sequences that gave way.", lambda d: d.scheduler.state.counters.preemptions),
    }
    for name, (text, read) in counts.items():
        yield counter(name, text, LABELS, total(read))
    intervals = _all(drivers, lambda d: d.counts.token_interval_s)
    yield histogram("vllm:inter_token_latency_seconds", "From one token to the next.", LABELS, intervals)
    scheduled = _all(drivers, lambda d: d.counts.scheduled_tokens)
    yield histogram("vllm:iteration_tokens_total", "Tokens of a step.", LABELS, scheduled)
    config = InfoMetricFamily("vllm:cache_config", "How KV memory is kept.", labels=LABELS)
    for model in engine.fleet.models:
        blocks = str(int(leased.get((model.name, ENGINE), 0)))
        facts = {"block_size": str(model.facts.block_size), "num_gpu_blocks": blocks}
        config.add_metric((model.name, ENGINE), facts)
    yield config


def _all(drivers: Mapping[Labels, list[Driver]], read: Callable[[Driver], Histogram]) -> dict[Labels, Histogram]:
    whole = {labels: together(map(read, of_model)) for labels, of_model in drivers.items()}
    return {labels: each for labels, each in whole.items() if each is not None}


def _of_requests(times: Mapping[Labels, RequestTimes]) -> Iterator[Metric]:
    ended = {
        (*labels, REASONS[how]): float(count)
        for labels, of_model in times.items()
        for how, count in of_model.ended.items()
    }
    yield counter("vllm:request_success", "Requests that have ended.", (*LABELS, "finished_reason"), ended)
    for name, read in REQUEST_HISTOGRAMS.items():
        yield histogram(name, "Of requests.", LABELS, {labels: read(of_model) for labels, of_model in times.items()})


REQUEST_HISTOGRAMS: dict[str, Callable[[RequestTimes], Histogram]] = {
    "vllm:time_to_first_token_seconds": lambda t: t.first_token_s,
    "vllm:request_time_per_output_token_seconds": lambda t: t.mean_token_s,
    "vllm:e2e_request_latency_seconds": lambda t: t.whole_s,
    "vllm:request_queue_time_seconds": lambda t: t.queue_s,
    "vllm:request_prefill_time_seconds": lambda t: t.prefill_s,
    "vllm:request_decode_time_seconds": lambda t: t.decode_s,
    "vllm:request_inference_time_seconds": lambda t: t.inference_s,
    "vllm:request_prompt_tokens": lambda t: t.prompt_tokens,
    "vllm:request_generation_tokens": lambda t: t.output_tokens,
    "vllm:request_params_n": lambda t: t.num_samples,
    "vllm:request_params_max_tokens": lambda t: t.max_tokens,
}
