"""The figures of several replicas as those of one server, each with the name of its replica."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def labelled(texts: Iterable[tuple[str, str]]) -> list[Metric]:
    """Metrics of several replicas as one list: each sample with its replica's name, each metric once.

    Args:
        texts: the name of each replica, and its figures in Prometheus' format.
    """
    families: dict[str, Metric] = {}
    for replica, text in texts:
        for found in text_string_to_metric_families(text):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            for sample in found.samples:
                family.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    return list(families.values())


def rendered(metrics: list[Metric]) -> bytes:
    """Metrics in Prometheus' format."""
    registry = CollectorRegistry()
    registry.register(_Collected(metrics))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)
