"""A histogram that one thread fills, at a price that does not matter beside a token's."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """As Prometheus' own, without its locks: only one thread may observe, while any may collect.

    Args:
        name: of the metric.
        help: what it is.
        bounds: upper bounds of its buckets, rising; one without a bound follows.
    """

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self._name, self._help, self._bounds = name, help, tuple(bounds)
        self._labels = [floatToGoString(bound) for bound in (*bounds, float("inf"))]  # type: ignore[no-untyped-call]
        self._counts = [0] * len(self._labels)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, as often as it was seen."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        counts = list(zip(self._labels, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets=counts, sum_value=self._sum)
