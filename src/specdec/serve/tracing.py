"""Traces of requests for OpenTelemetry: a request, and below it, for each of its sequences, queue, prefill and decode.

Imported only where traces are wanted; needs the extra ``otel``. The request's span begins with its arrival, so whether it is
sampled is known from then on; what lies below is written when the request has ended, from times that are taken anyway. So a
trace costs nothing while tokens are computed, and no span can be left open by an error or a client that goes.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specdec import __version__
from specdec.config import ConfigError

if TYPE_CHECKING:
    from specdec.serve.account import Account
    from specdec.serve.generation import Choice

EVENTS = 12
"""Most that a decode span has. An event tells of a pass, and where there are more passes than that, of several: it costs as
much as a few tokens' frames."""

_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """Begins traces.

    Args:
        provider: where spans go.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("specdec", __version__)

    @classmethod
    def connected(cls, endpoint: str | None, sample: float | None) -> Tracing:
        """Traces sent by OTLP, to be tuned by the standard ``OTEL_`` variables.

        Args:
            endpoint: of the collector, in place of OTEL_EXPORTER_OTLP_ENDPOINT.
            sample: share of the traces that begin here and are kept, in place of OTEL_TRACES_SAMPLER.

        Raises:
            ConfigError: the protocol that OTEL_EXPORTER_OTLP_PROTOCOL names is not spoken here.
        """
        sampler = None if sample is None else ParentBased(TraceIdRatioBased(sample))
        resource = Resource({"service.name": "specdec", "service.version": __version__}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(sampler=sampler, resource=resource)
        provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        return cls(provider)

    def begin(self, account: Account, headers: Mapping[str, str]) -> Trace | None:
        """The trace of a request that has just arrived, a part of the client's own if it sent a traceparent; None where it
        is not sampled."""
        epoch = time.time_ns() - time.perf_counter_ns()
        span = self._tracer.start_span(
            account.route,
            context=_PROPAGATOR.extract(headers, context=Context()) if "traceparent" in headers else Context(),
            kind=SpanKind.SERVER,
            start_time=_ns(account.arrived, epoch),
        )
        return Trace(self, span, epoch) if span.is_recording() else None

    def write(self, parent: Span, name: str, start: int, attributes: Mapping[str, Any]) -> Span:
        """A child that began at a time (ns since the epoch); to be ended by the caller."""
        context = set_span_in_context(parent, Context())
        span: Span = self._tracer.start_span(name, context=context, start_time=start, attributes=dict(attributes))
        return span

    def shut_down(self) -> None:
        """Send what has not been sent; may wait for the collector."""
        self._provider.shutdown()


class Trace:
    """Of one sampled request."""

    def __init__(self, tracing: Tracing, span: Span, epoch: int) -> None:
        self._tracing = tracing
        self._span = span
        self._epoch = epoch

    def end(self, account: Account, facts: Mapping[str, Any], now: float) -> dict[str, Any]:
        """Write all of it.

        Args:
            account: of the request.
            facts: of the account.
            now: when it ended (perf_counter).

        Returns:
            The trace's id, as a fact for the log.
        """
        for choice in account.choices:
            self._write(choice, now)
        self._span.set_attributes(dict(_attributes(facts)))
        if failure := account.failure:
            self._span.set_attribute("error.type", failure.code or str(failure.status))
            if failure.status >= 500:  # others are the client's faults, not this span's
                self._span.set_status(Status(StatusCode.ERROR, failure.message))
        self._span.end(end_time=self._ns(now))
        return {"trace_id": format_trace_id(self._span.get_span_context().trace_id)}

    def _write(self, choice: Choice, now: float) -> None:
        """The parts of a sequence, as far as it came; the last one ends where the sequence did."""
        times, passes = choice.times, choice.passes
        if not times.added:
            return  # the engine never had it
        ends = times.begun, passes[0][0] if passes else None, passes[-1][0] if choice.finish_reason and passes else None
        start = times.added
        for name, end in zip(("queue", "prefill", "decode"), ends, strict=True):
            span = self._tracing.write(self._span, name, self._ns(start), dict(_of_part(name, choice)))
            if name == "decode":
                for at, event in _events(choice):
                    span.add_event("passes", event, self._ns(at))
            if choice.end == "error" and (end is None or name == "decode"):
                span.set_status(Status(StatusCode.ERROR))
            span.end(end_time=self._ns(now if end is None else end))
            if end is None:
                return
            start = end

    def _ns(self, at: float) -> int:
        return _ns(at, self._epoch)


def _ns(at: float, epoch: int) -> int:
    return epoch + int(at * 1e9)


def _attributes(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Of the request's span, by the semantic conventions where they have a name."""
    for name, value in facts.items():
        if name == "accepted_by_drafter":
            yield from ((f"specdec.accepted.{drafter}", n) for drafter, n in value.items())
        elif name == "finish_reason":
            yield _NAMES[name], tuple(value.split(","))
        elif name not in ("error", "code", "seconds"):
            yield _NAMES.get(name, f"specdec.{name}"), value
    yield "gen_ai.operation.name", "chat" if facts["route"].endswith("/chat/completions") else "text_completion"


_NAMES = {
    "route": "http.route",
    "status": "http.response.status_code",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish_reason": "gen_ai.response.finish_reasons",
}


def _of_part(name: str, choice: Choice) -> Iterator[tuple[str, Any]]:
    yield "specdec.choice", choice.index
    if name == "prefill":
        yield "specdec.prompt_tokens", len(choice.prompt)
        if choice.stats:
            yield "specdec.cached_tokens", choice.stats["cached_tokens"]
    if name == "decode":
        yield "specdec.tokens", len(choice.tokens)
        yield "specdec.passes", len(choice.passes)
        yield "specdec.tokens_per_pass", len(choice.tokens) / len(choice.passes)
        yield "specdec.finish_reason", choice.end
        for drafter, n in Counter(source for source in choice.sources if source).items():
            yield f"specdec.accepted.{drafter}", n
        if choice.stats:
            yield "specdec.drafted", choice.stats["drafted"]


def _events(choice: Choice) -> Iterator[tuple[float, dict[str, Any]]]:
    """Passes, one or several at a time, and when they ended: how many tokens they gave, and how many of those each drafter."""
    size = math.ceil(len(choice.passes) / EVENTS)
    start = 0
    for first in range(0, len(choice.passes), size):
        passes = choice.passes[first : first + size]
        at, stop = passes[-1]
        accepted = Counter(source for source in choice.sources[start:stop] if source)
        told = {"passes": len(passes), "tokens": stop - start}
        yield at, {**told, **{f"accepted.{drafter}": n for drafter, n in accepted.items()}}
        start = stop


def _exporter(endpoint: str | None) -> SpanExporter:
    general = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", general)
    if protocol != "http/protobuf":
        raise ConfigError(f"traces are sent as http/protobuf, not {protocol!r}: set OTEL_EXPORTER_OTLP_PROTOCOL to that")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint and endpoint.rstrip("/") + "/v1/traces")
