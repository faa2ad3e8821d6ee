"""Prometheus' metric families from plain numbers and `Histogram`."""

from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from scheduler_svc.histogram import Histogram

Labels = tuple[str, ...]  # values, in the order of a family's label names


def gauge(name: str, text: str, labels: Labels, values: Mapping[Labels, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def counter(name: str, text: str, labels: Labels, values: Mapping[Labels, float]) -> CounterMetricFamily:
    """`name` without `_total`, which is put at its end."""
    family = CounterMetricFamily(name, text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def histogram(name: str, text: str, labels: Labels, values: Mapping[Labels, Histogram]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for label_values, counts in values.items():
        bounds = [*map(_text, counts.bounds), "+Inf"]
        family.add_metric(label_values, list(zip(bounds, accumulate(counts.counts), strict=True)), counts.sum)
    return family


def together(histograms: Iterable[Histogram]) -> Histogram | None:
    """All values of these, which have the same bounds; None of none."""
    whole: Histogram | None = None
    for each in histograms:
        if whole is None:
            whole = Histogram(each.bounds)
        whole.counts = [total + count for total, count in zip(whole.counts, each.counts, strict=True)]
        whole.sum += each.sum
    return whole


def _text(bound: float) -> str:
    return str(float(bound))
