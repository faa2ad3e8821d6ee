"""Our metrics of executors, by endpoint and model: each is a name, a sentence, and what it reads of a driver."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import Metric

from scheduler_svc.core.state import CoreState, Counters
from scheduler_svc.driver import Driver
from scheduler_svc.histogram import Histogram
from scheduler_svc.metrics.families import Labels, counter, gauge, histogram

EXECUTOR = ("executor", "model")
Read = Callable[[Driver], float]


def executor_metrics(drivers: Mapping[Labels, Driver]) -> Iterator[Metric]:
    """`drivers` by the values of EXECUTOR."""
    for name, (text, read) in GAUGES.items():
        yield gauge(name, text, EXECUTOR, {labels: read(driver) for labels, driver in drivers.items()})
    for name, (text, label, reads) in GAUGES_BY.items():
        yield gauge(name, text, (*EXECUTOR, label), _by(drivers, reads))
    for name, (text, read) in COUNTERS.items():
        yield counter(name, text, EXECUTOR, {labels: read(driver) for labels, driver in drivers.items()})
    yield counter("paged_preemptions", PREEMPTIONS, (*EXECUTOR, "cause"), _by(drivers, PREEMPTIONS_BY_CAUSE))
    for name, (text, read_counts) in HISTOGRAMS.items():
        yield histogram(name, text, EXECUTOR, {labels: read_counts(driver) for labels, driver in drivers.items()})


def _by(drivers: Mapping[Labels, Driver], reads: Mapping[str, Read]) -> dict[Labels, float]:
    return {(*labels, key): read(driver) for labels, driver in drivers.items() for key, read in reads.items()}


def _state(driver: Driver) -> CoreState:
    return driver.scheduler.state


def _counted(driver: Driver) -> Counters:
    return driver.scheduler.state.counters


GAUGES: dict[str, tuple[str, Read]] = {
    "paged_executor_attached": ("1 while there is a session.", lambda d: d.is_attached),
    "paged_rows": ("Leased rows: sequences that may run.", lambda d: _state(d).columns.num_leased),
    "paged_step_tokens": ("Leased tokens of a step.", lambda d: _state(d).tokens_per_step),
    "paged_unused_slots": ("Slots of used blocks that hold no token.", lambda d: _state(d).unused_slots),
    "paged_waiting_tokens": ("Known tokens of the sequences that wait.", lambda d: _state(d).queue.num_tokens),
}

GAUGES_BY: dict[str, tuple[str, str, dict[str, Read]]] = {
    "paged_sequences": (
        "Sequences that run, and that wait, with the executor.",
        "state",
        {"running": lambda d: _state(d).num_running, "waiting": lambda d: _state(d).num_waiting},
    ),
    "paged_blocks": (
        "Leased KV blocks: held by sequences, free with a cached prefix, or free and blank.",
        "state",
        {
            "used": lambda d: _state(d).cache.pool.num_used,
            "cached": lambda d: _state(d).cache.pool.num_cached,
            "blank": lambda d: _state(d).cache.pool.num_blank,
        },
    ),
}

COUNTERS: dict[str, tuple[str, Read]] = {
    "paged_prompt_tokens": ("Tokens of admitted prompts.", lambda d: _counted(d).prompt_tokens),
    "paged_cached_prompt_tokens": ("Of these, cached.", lambda d: _counted(d).cached_prompt_tokens),
    "paged_generated_tokens": ("Tokens sampled.", lambda d: _counted(d).generated_tokens),
    "paged_samples_joined": ("Samples that began with another one's prompt.", lambda d: d.counts.joined),
    "paged_forks": ("Rows that went on as another one's copy: beams.", lambda d: d.counts.forks),
    "paged_copied_blocks": ("Blocks copied because others hold them, too.", lambda d: d.counts.copies),
    "paged_returned_blocks": ("Blocks given back to the executor for others.", lambda d: d.counts.returned_blocks),
    "paged_granted_blocks": ("Blocks lent after the session's begin.", lambda d: d.counts.granted_blocks),
    "paged_executor_losses": ("Sessions that were lost.", lambda d: d.num_losses),
    "paged_steps": ("Steps whose results have come.", lambda d: d.num_steps),
    "paged_step_seconds": ("What those steps took.", lambda d: d.step_us / 1e6),
    "paged_executor_idle_seconds": ("What the executor had waited before them.", lambda d: d.wait_us / 1e6),
}

PREEMPTIONS = "Sequences that gave way: to others' growth, a higher priority, a recall of the lease, or at a loss."
PREEMPTIONS_BY_CAUSE: dict[str, Read] = {
    "blocks": lambda d: _counted(d).preemptions - _counted(d).yielded - _counted(d).recalled,
    "priority": lambda d: _counted(d).yielded,
    "recall": lambda d: _counted(d).recalled,
    "loss": lambda d: d.counts.lost_sequences,
}

HISTOGRAMS: dict[str, tuple[str, Callable[[Driver], Histogram]]] = {
    "paged_plan_bytes": ("Sizes of plans.", lambda d: d.counts.plan_bytes),
    "paged_result_bytes": ("Sizes of results.", lambda d: d.counts.result_bytes),
    "paged_scheduled_tokens": ("Tokens that plans had computed.", lambda d: d.counts.scheduled_tokens),
    "paged_token_interval_seconds": ("From one token of a sequence to its next.", lambda d: d.counts.token_interval_s),
}
