"""The server's limits and patience towards its clients."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from specdec.config.checks import is_number, items, require, require_integer

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """How the server meets its clients. None of it changes a token."""

    model_name: str | None = None
    """What clients call the model; None: the name that it was loaded by."""
    api_keys: tuple[str, ...] = ()
    """A client must show one of these; without any, everybody is served. Clients with different keys share no cached prefix."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages of these origins, ``https://example.org`` for instance, may call the server from a browser; ``*``: of all."""
    max_queue: int = 256
    """Most sequences that may wait beside those that run; a request beyond is refused with 429."""
    max_body_bytes: int = 2 * 2**20
    """Parsing a body cannot be interrupted: this bounds how long it may hold up everything else."""
    body_seconds: float = 30.0
    """Longest that a client may take to send a request's body."""
    request_seconds: float = 600.0
    """Longest that a request may take from its arrival to its last token."""
    stalled_seconds: float = 60.0
    """A streaming client that takes nothing for so long is given up."""
    stream_rate: float | None = None
    """Most tokens per second that one stream is sent; None sends them as they come."""
    shutdown_seconds: float = 10.0
    """How long running requests may go on when the server is told to stop."""
    otlp_endpoint: str | None = None
    """Collector that traces are sent to; None: the one that OTEL_EXPORTER_OTLP_ENDPOINT names, if any."""
    trace_sample: float | None = None
    """Share of the traces that begin here and are kept; None: what OTEL_TRACES_SAMPLER says, or all."""

    def __post_init__(self) -> None:
        rule, keys = "a list or tuple of non-empty strings", self.api_keys
        require(isinstance(keys, list | tuple) and all(isinstance(k, str) and k for k in keys), "api_keys", keys, rule)
        object.__setattr__(self, "api_keys", tuple(keys))
        rule = "origins such as https://example.org or http://localhost:3000, without a path, or *"
        origins = items("allowed_origins", self.allowed_origins, rule)
        for origin in origins:
            require(isinstance(origin, str) and _ORIGIN.fullmatch(origin) is not None, "allowed_origins", origin, rule)
        object.__setattr__(self, "allowed_origins", origins)
        name = self.model_name
        require(name is None or (isinstance(name, str) and bool(name)), "model_name", name, "a non-empty string")
        require_integer("max_queue", self.max_queue, 0, math.inf, "an integer >= 0")
        require_integer("max_body_bytes", self.max_body_bytes, 1024, math.inf, "an integer >= 1024")
        for field_name in ("body_seconds", "request_seconds", "stalled_seconds"):
            value = getattr(self, field_name)
            require(is_number(value) and value > 0, field_name, value, "a finite number > 0")
        rate, grace = self.stream_rate, self.shutdown_seconds
        require(rate is None or (is_number(rate) and rate > 0), "stream_rate", rate, "a finite number > 0")
        require(is_number(grace) and grace >= 0, "shutdown_seconds", grace, "a finite number >= 0")
        url, share = self.otlp_endpoint, self.trace_sample
        known = url is None or (isinstance(url, str) and url.startswith(("http://", "https://")))
        require(known, "otlp_endpoint", url, "a URL of http or https")
        require(share is None or (is_number(share) and 0 <= share <= 1), "trace_sample", share, "a number in [0, 1]")
