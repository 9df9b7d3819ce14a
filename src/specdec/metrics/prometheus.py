"""The server's metrics in Prometheus' format: vLLM's names where vLLM counts the same thing, under ``specdec:``.

What the engine counts is read from a snapshot that is taken for each scrape; what concerns requests is counted on the event
loop. In these names a *request* is one sequence, as with vLLM: an HTTP request with n answers counts n
times. Only ``requests_refused`` counts HTTP requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.metrics.histogram import Histogram
from specdec.metrics.snapshot import Snapshot

REASONS = ("stop", "length", "abort", "error")
"""How sequences end; ``abort``: the client went, or the server stopped."""

DELIVERY_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
FIRST_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
REQUEST_BUCKETS = (0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 600.0)
LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a time stamp beside each counter doubles the list and tells nothing


class ServerMetrics:
    """Counters of one server; each server has its own registry.

    Args:
        snapshot: gives the engine's numbers.
        up: is the engine alive?
        model_name: a label of every sample.
        drafters: those that run; their counters stand at 0 before their first draft.
        about: what else is known of the server, as labels of ``server_info``.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        up: Callable[[], bool],
        model_name: str,
        drafters: tuple[str, ...],
        about: Mapping[str, str],
    ) -> None:
        self._inner = CollectorRegistry()
        self._inner.register(_Engine(snapshot, up, drafters))
        Info("specdec:server", "The server", registry=self._inner).info(dict(about))
        self.started = self._counter("requests_started", "Sequences given to the engine")
        self.finished = self._counter("request_success", "Sequences that ended, by reason", "finished_reason")
        for reason in REASONS:
            self.finished.labels(reason)
        self.refused = self._counter("requests_refused", "HTTP requests whose response was an error", "status")
        self.first_token = self._histogram(
            "time_to_first_token_seconds",
            "From the arrival of a request to the end of the pass of its first token",
            FIRST_BUCKETS,
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Between tokens: the time from one pass to the next, in equal parts to the tokens that came",
            TOKEN_BUCKETS,
        )
        self.latency = self._histogram(
            "e2e_request_latency_seconds",
            "From arrival to the last token, of those that stopped or were long enough",
            REQUEST_BUCKETS,
        )
        self.queued = self._histogram("request_queue_time_seconds", "From being queued to the first pass", REQUEST_BUCKETS)
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "From the first pass to the end of that of the first token", REQUEST_BUCKETS
        )
        self.decode = self._histogram("request_decode_time_seconds", "From the first token to the last", REQUEST_BUCKETS)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean between tokens of a sequence, of those with two or more",
            TOKEN_BUCKETS,
        )
        self.prompt_length = self._histogram("request_prompt_tokens", "Tokens of prompts", LENGTH_BUCKETS)
        self.output_length = self._histogram("request_generation_tokens", "Tokens of answers", LENGTH_BUCKETS)
        self.delivery = self._histogram(
            "delivery_seconds", "From the end of a pass to the write of its tokens to a client that keeps up", DELIVERY_BUCKETS
        )
        self._registry = CollectorRegistry()
        self._registry.register(_Labelled(self._inner, {"model_name": model_name}))
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The text that a scrape gets."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"specdec:{name}", help, labels, registry=self._inner)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"specdec:{name}", help, buckets)
        self._inner.register(histogram)
        return histogram


class _Labelled(Collector):
    """Adds labels to every sample of a registry."""

    def __init__(self, inner: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._inner, self._labels = inner, labels

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            metric.samples = [sample._replace(labels={**self._labels, **sample.labels}) for sample in metric.samples]
            yield metric

    def describe(self) -> Iterator[Metric]:
        return iter(())


_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts that were read to their end, those found in the prefix cache too"),
    "generation_tokens": ("emitted", "Tokens emitted"),
    "num_preemptions": ("preemptions", "Sequences that had to let go of their blocks and were read again"),
    "prompt_rows": ("prompt_rows", "Rows of passes that read prompts, or read a sequence again"),
    "target_passes": ("target_passes", "Passes over a sequence that gave it tokens"),
    "quiet_passes": ("quiet_passes", "Those of them for which no drafter was asked"),
    "spec_decode_num_drafts": ("drafts", "Those of them with a draft to verify"),
    "spec_decode_num_proposed_tokens": ("proposed", "Drafted tokens, those among them that were not worth verifying"),
    "spec_decode_num_draft_tokens": ("drafted", "Drafted tokens that were verified"),
    "spec_decode_num_accepted_tokens": ("accepted", "Drafted tokens that were emitted"),
}
"""Name -> field of Stats, and what it is."""

_BY_DEPTH = {
    "spec_decode_num_draft_tokens_per_pos": ("drafted", "Drafted tokens that were verified, by position in the draft, from 0"),
    "spec_decode_num_reached_tokens_per_pos": ("reached", "Drafts whose tokens before the position were all accepted"),
    "spec_decode_num_accepted_tokens_per_pos": (
        "accepted",
        "Drafted tokens that were emitted, by position in the draft, from 0",
    ),
}
_BY_DRAFTER = {
    "spec_decode_num_draft_tokens_per_drafter": ("drafted", "Drafted tokens that were verified"),
    "spec_decode_num_accepted_tokens_per_drafter": ("accepted", "Drafted tokens that were emitted"),
    "spec_decode_num_asks_per_drafter": ("asked", "Passes over a sequence for which the drafter was asked"),
    "spec_decode_num_hits_per_drafter": ("hits", "Asks in which some of its tokens agreed with what came"),
    "spec_decode_num_misses_per_drafter": ("misses", "Asks in which no drafter's tokens did"),
}


class _Engine(Collector):
    """Reads the engine's latest snapshot."""

    def __init__(self, snapshot: Callable[[], Snapshot], up: Callable[[], bool], drafters: tuple[str, ...]) -> None:
        self._snapshot, self._up, self._drafters = snapshot, up, drafters

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        for name, (field, help) in _COUNTERS.items():
            yield CounterMetricFamily(f"specdec:{name}", help, value=now.counters[field])
        looked_up = now.counters["prompt_tokens"] if now.cached else 0
        yield CounterMetricFamily("specdec:prefix_cache_queries", "Tokens of prompts looked up in the prefix cache", looked_up)
        yield CounterMetricFamily("specdec:prefix_cache_hits", "Those found there", now.counters["cached_tokens"])
        for name, (field, help) in _BY_DEPTH.items():
            depths = {1: 0, **now.by_depth[field]}
            yield _counters(name, help, "position", {str(depth - 1): n for depth, n in sorted(depths.items())})
        for name, (field, help) in _BY_DRAFTER.items():
            yield _counters(name, help, "drafter", {**dict.fromkeys(self._drafters, 0), **now.by_drafter[field]})
        yield _counters("engine_seconds", "Seconds spent in steps, by phase", "phase", now.seconds)
        yield CounterMetricFamily(
            "specdec:plain_seconds", "Seconds that the same would have taken with speculation off, estimated", now.plain_seconds
        )
        yield from self._gauges(now)

    def _gauges(self, now: Snapshot) -> Iterator[Metric]:
        counts = now.counts
        free = counts.blocks - counts.blocks_used - counts.blocks_cached
        blocks = {"used": counts.blocks_used, "cached": counts.blocks_cached, "free": free}
        alarms = {**dict.fromkeys(self._drafters, False), **now.collapsed}
        yield _gauge("engine_up", "1 while the engine runs, 0 once it has failed", self._up())
        yield _gauge("num_requests_running", "Sequences that run", counts.running)
        yield _gauge("num_requests_waiting", "Sequences that wait", counts.waiting)
        yield _gauge("kv_cache_usage_perc", "Share of the blocks held by sequences, 0 to 1", counts.blocks_used / counts.blocks)
        yield _gauges("kv_cache_blocks", "Blocks by state; cached ones are free to be taken", "state", blocks)
        yield _gauge("tokens_per_pass", "Tokens per target pass over the last minute of passes", now.tokens_per_pass)
        yield _gauge("speedup", "Over speculation off, over the last minute of passes, estimated", now.speedup)
        yield _gauges("acceptance_collapsed", "1 while a drafter is right far less often than usual", "drafter", alarms)


def _counters(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"specdec:{name}", help, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"specdec:{name}", help, value)


def _gauges(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"specdec:{name}", help, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family
