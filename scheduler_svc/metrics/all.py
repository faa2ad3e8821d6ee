"""All metrics of a scheduler."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from scheduler_svc.engine import Engine
from scheduler_svc.metrics.ours import our_metrics
from scheduler_svc.metrics.vllm import vllm_metrics


def all_metrics(engine: Engine, *, with_vllm_names: bool) -> Iterator[Metric]:
    """To be called on the engine's event loop."""
    yield from our_metrics(engine)
    if with_vllm_names:
        yield from vllm_metrics(engine)
