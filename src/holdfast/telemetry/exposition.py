"""Formats metrics as Prometheus text or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from holdfast.telemetry.instruments import Counter, Histogram, MetricDeclaration, Role
from holdfast.telemetry.metrics import Metrics, Reading, Readings

# The version of the text format that all scrapers support.
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

Format = Literal["prometheus", "json"]


def wanted_format(asked: str | None, accept: str | None) -> Format:
    """Choose the format by the parameter `format`, else by the header `Accept`; the default is Prometheus text."""
    if asked is not None:
        return "json" if asked == "json" else "prometheus"
    kinds = [kind.partition(";")[0].strip().lower() for kind in (accept or "").split(",")]
    return "json" if "application/json" in kinds and "text/plain" not in kinds else "prometheus"


def as_text(metrics: Metrics, role: Role, readings: Readings) -> bytes:
    return families_as_text(_families(metrics, role, readings))


def as_json(metrics: Metrics, role: Role, readings: Readings) -> dict[str, list[dict[str, Any]]]:
    """Samples by name, each with its labels and its value."""
    return families_as_json(_families(metrics, role, readings))


def merged_families(texts: Mapping[str, str], label: str) -> list[Metric]:
    """Merge the metrics of several processes: each family once, and each sample with `label` set to the key of its
    process. `texts` are responses of `/metrics`. A response that cannot be parsed is left out."""
    merged: dict[str, Metric] = {}
    for key, text in texts.items():
        try:
            families = list(text_string_to_metric_families(text))
        except ValueError:
            continue  # One bad response must not hide the metrics of other processes.
        for family in families:
            known = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known.samples += [sample._replace(labels={label: key, **sample.labels}) for sample in family.samples]
    return list(merged.values())


def families_as_text(families: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(families))
    return generate_latest(registry)


def families_as_json(families: Iterable[Metric]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, []).append({"labels": dict(sample.labels), "value": sample.value})
    return found


class _Once(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _families(metrics: Metrics, role: Role, readings: Readings) -> Iterator[Metric]:
    for instrument in metrics.instruments(role):
        yield _histogram(instrument) if isinstance(instrument, Histogram) else _counter(instrument)
    for declared, reading in readings.items():
        yield _reading(declared, reading)


def _counter(counter: Counter) -> Metric:
    return _reading(counter.declared, counter.values())


def _reading(declared: MetricDeclaration, reading: Reading) -> Metric:
    kind = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
    family = kind(declared.name, declared.what, labels=declared.labels)
    for labels, value in ({(): reading} if isinstance(reading, int | float) else reading).items():
        family.add_metric(labels, value)
    return family


def _histogram(histogram: Histogram) -> Metric:
    declared = histogram.declared
    family = HistogramMetricFamily(declared.name, declared.what, labels=declared.labels)
    bounds = [*map(str, declared.buckets), "+Inf"]
    for labels, counts, total in histogram.tallies():
        family.add_metric(labels, list(zip(bounds, accumulate(counts), strict=True)), total)
    return family
