"""The server's metrics in Prometheus' format, under ``specdec:``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.metrics.snapshot import Snapshot

REASONS = ("stop", "length", "abort", "error")
"""How sequences end; ``abort``: the client went, or the server stopped."""

DELIVERY_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a time stamp beside each counter doubles the list and tells nothing


class ServerMetrics:
    """Counters of one server; each server has its own registry.

    Args:
        snapshot: gives the engine's numbers.
    """

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Engine(snapshot))
        self.started = Counter("specdec:sequences_started", "Sequences given to the engine", registry=self._registry)
        self.finished = Counter(
            "specdec:sequences_finished", "Sequences that ended, by reason", ("reason",), registry=self._registry
        )
        for reason in REASONS:
            self.finished.labels(reason)
        self.refused = Counter(
            "specdec:requests_refused", "Requests whose response was an error", ("status",), registry=self._registry
        )
        self.delivery = Histogram(
            "specdec:delivery_seconds",
            "From the end of a pass to the write of its tokens to a client that keeps up",
            buckets=DELIVERY_BUCKETS,
            registry=self._registry,
        )

    def render(self) -> bytes:
        """The text that a scrape gets."""
        return generate_latest(self._registry)


class _Engine(Collector):
    """Reads the engine's latest snapshot."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        for name, value in snapshot.counters.items():
            yield CounterMetricFamily(f"specdec:{name}", f"Engine: {name.replace('_', ' ')}", value=value)
        for name, by_drafter in (("drafted", snapshot.drafted), ("accepted", snapshot.accepted)):
            family = CounterMetricFamily(f"specdec:{name}_by_drafter", f"Tokens {name}, by drafter", labels=("drafter",))
            for drafter, value in by_drafter.items():
                family.add_metric((drafter,), value)
            yield family
        for name, value in snapshot.gauges.items():
            yield GaugeMetricFamily(f"specdec:{name}", f"Engine: {name.replace('_', ' ')}", value=value)
