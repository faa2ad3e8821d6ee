"""What an executor counts, as Prometheus reads it, on a port of its own. Nothing here runs before somebody asks."""

from collections.abc import Iterator
from itertools import accumulate

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from executor_svc.service import Service
from executor_svc.step_counts import Counted
from paged.metrics_server import MetricsServer


class ExecutorCollector(Collector):
    """Reads while the service goes on: numbers of one scrape may be a step apart."""

    def __init__(self, service: Service, model: str) -> None:
        self._service = service
        self._model = model

    def collect(self) -> Iterator[Metric]:
        yield from self._of_lending()
        counts = self._service.counts
        phases = {
            "idle": counts.idle_s,
            "take_in": counts.take_in_s,
            "compute": counts.compute_s,
            "answer": counts.answer_s,
        }
        family = CounterMetricFamily(
            "paged_executor_phase_seconds", "Where the time of steps went, and before them.", labels=["model", "phase"]
        )
        for phase, seconds in phases.items():
            family.add_metric([self._model, phase], seconds)
        yield family
        for name, text, value in (
            ("steps", "Steps run.", counts.steps),
            ("plans", "Plans taken in.", counts.plans),
            ("tokens", "Tokens computed.", counts.tokens),
            ("rows", "Rows of all steps together.", counts.rows),
            ("copied_blocks", "Blocks copied.", counts.copied_blocks),
            ("runner_failures", "Steps that raised, each of which ended an epoch.", counts.runner_failures),
        ):
            yield self._with_model(CounterMetricFamily(f"paged_executor_{name}", text, labels=["model"]), value)
        yield self._histogram("paged_executor_step_seconds", "What steps took.", counts.step_s)
        yield self._histogram("paged_executor_merged_plans", "Plans with work in a step.", counts.merged_plans)

    def _of_lending(self) -> Iterator[Metric]:
        service = self._service
        for name, text, value in (
            ("sessions", "Schedulers that have a lease.", service.num_sessions),
            ("waiting_schedulers", "Schedulers that wait for a first lease.", service.num_waiting),
        ):
            yield self._with_model(GaugeMetricFamily(f"paged_executor_{name}", text, labels=["model"]), value)
        most, free = service.ownership.most, service.ownership.free
        labels = ["model", "state"]
        for name, text, all_there_are, not_lent in (
            ("blocks", "KV blocks.", most.blocks, free.blocks),
            ("leased_rows", "Sequences that may run.", most.rows, free.rows),
            ("leased_step_tokens", "Tokens of a step.", most.tokens, free.tokens),
        ):
            family = GaugeMetricFamily(f"paged_executor_{name}", text, labels=labels)
            family.add_metric([self._model, "lent"], all_there_are - not_lent)
            family.add_metric([self._model, "free"], not_lent)
            yield family

    def _with_model(self, family: CounterMetricFamily | GaugeMetricFamily, value: float) -> Metric:
        family.add_metric([self._model], value)
        return family

    def _histogram(self, name: str, text: str, counted: Counted) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model"])
        bounds = [*(str(float(bound)) for bound in counted.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(list(counted.counts)), strict=True))
        family.add_metric([self._model], buckets, counted.sum)
        return family


def serve_metrics(service: Service, model: str, address: str) -> None:
    """Until the process ends. Raises OSError if the address cannot be had."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(ExecutorCollector(service, model))
    host, _, port = address.rpartition(":")
    server = MetricsServer(host.strip("[]"), int(port), make_wsgi_app(registry))
    server.begin()
    structlog.get_logger().info("metrics_served", address=f"{host}:{server.server_port}")
