"""Every setting of the engine and of a request, with its default and its range. No default is written elsewhere."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, cast

Precision = Literal["auto", "blocks", "q4", "q8", "bf16", "fp32"]
PRECISIONS: tuple[Precision, ...] = ("auto", "blocks", "q4", "q8", "bf16", "fp32")
DRAFTERS: tuple[str, ...] = ("ngram", "suffix", "recycling", "trained")
ACCEPTANCES: tuple[str, ...] = ("coupled", "greedy", "rejection", "block", "recursive", "multistep", "traversal", "typical")
"""Rules by which drafted tokens are accepted; docs/rules.md says what each keeps."""
KV_FORMATS: tuple[str, ...] = ("auto", "fp32", "bf16", "int8", "int4")
"""What keys and values may be held in; ``auto`` is fp32 where the weights are, and bf16 elsewhere."""
AUTO = "auto"

DEFAULT_MODEL = "smollm2-135m-instruct"

BLOCK_SIZE = 16
"""Tokens in a block of the key and value pool; the attention kernels are written for it."""

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024

_Config = TypeVar("_Config")


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type or out of range; the message names it and says what is allowed."""


def from_dict(cls: type[_Config], values: Mapping[str, Any]) -> _Config:
    """Build a config dataclass from a mapping; an unknown key is an error that lists the known ones."""
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - known):
        raise ConfigError(f"unknown {cls.__name__} setting {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return cls(**values)


def _require(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{name} must be {rule}, got {value!r}")


def check_precision(precision: object, name: str = "precision") -> None:
    """Raise ConfigError unless it is one of PRECISIONS."""
    _require(precision in PRECISIONS, name, precision, f"one of {', '.join(PRECISIONS)}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _require_integer(name: str, value: object, low: int, high: float, rule: str) -> None:
    _require(_is_int(value) and low <= cast(int, value) <= high, name, value, rule)


def _require_probability(name: str, value: object) -> None:
    _require(_is_number(value) and 0 < cast(float, value) <= 1, name, value, "a number in (0, 1]")


def _items(name: str, value: object, rule: str) -> tuple[Any, ...]:
    """The items of a list of any kind, and none for None."""
    if value is None:
        return ()
    _require(isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping), name, value, rule)
    return tuple(cast(Iterable[Any], value))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends, with the names and meanings that vLLM and Hugging Face use.

    Order of application (docs/exactness.md): penalties, bias and bans, then temperature, top-k, top-p, min-p.
    Reported log-probabilities are the model's own, before any of this.
    None stands for an empty list or mapping too. What is given is copied.

    Raises:
        ConfigError: a value is of the wrong type or out of range; the message names the parameter.
    """

    temperature: float = 1.0
    """0 takes the most likely token (lowest id on a tie)."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt and output."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be completed."""
    max_tokens: int | None = None
    """None: until the context is full."""
    min_tokens: int = 0
    """End tokens are banned until this many tokens are out."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these; empty strings are ignored."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    """None draws a fresh one, which the result reports."""
    n: int = 1
    logprobs: int | None = None
    """None: no log-probabilities; k: those of the emitted tokens and of the k most likely ones."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, given what precedes each; the first one has none."""

    def __post_init__(self) -> None:
        _require(
            _is_number(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "a finite number >= 0"
        )
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "an integer >= 1, or 0 or -1 for all tokens")
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        r = self.repetition_penalty
        _require(_is_number(r) and 1e-3 <= r <= 1e3, "repetition_penalty", r, "in [0.001, 1000]; 1 turns it off")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(_is_number(value) and -2 <= value <= 2, name, value, "in [-2, 2]")
        biases = {} if self.logit_bias is None else self.logit_bias
        _require(isinstance(biases, Mapping), "logit_bias", biases, "a mapping of token ids to numbers")
        for token, bias in biases.items():
            _require(_is_int(token) and token >= 0, "logit_bias key", token, "a token id >= 0")
            _require(_is_number(bias) and -100 <= bias <= 100, f"logit_bias[{token}]", bias, "in [-100, 100]")
        object.__setattr__(self, "logit_bias", dict(biases))
        _require(
            self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            self.max_tokens,
            "an integer >= 1",
        )
        _require(_is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens", self.min_tokens, "an integer >= 0")
        if self.max_tokens is not None:
            _require(
                self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})"
            )
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        _require(_is_int(self.n) and 1 <= self.n <= 128, "n", self.n, "an integer in [1, 128]")
        _require(
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**63), "seed", self.seed, "an integer in [0, 2**63)"
        )
        for name in ("logprobs", "prompt_logprobs"):
            k = getattr(self, name)
            _require(k is None or (_is_int(k) and 0 <= k <= MAX_LOGPROBS), name, k, f"an integer in [0, {MAX_LOGPROBS}]")
        for name in ("stop", "bad_words"):
            rule, value = "a string or a list of strings", getattr(self, name)
            value = (value,) if isinstance(value, str) else _items(name, value, rule)
            _require(all(isinstance(s, str) for s in value), name, value, rule)
            object.__setattr__(self, name, tuple(s for s in value if s))
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings")
        _require(
            all(len(s) <= MAX_STOP_CHARACTERS for s in self.stop),
            "stop",
            "a longer string",
            f"strings of at most {MAX_STOP_CHARACTERS} characters",
        )
        rule = "a list of token ids >= 0"
        ids = _items("stop_token_ids", self.stop_token_ids, rule)
        _require(all(_is_int(t) and t >= 0 for t in ids), "stop_token_ids", ids, rule)
        object.__setattr__(self, "stop_token_ids", ids)
        rule = "a list of non-empty lists of token ids >= 0"
        words = tuple(_items("bad_words_ids", word, rule) for word in _items("bad_words_ids", self.bad_words_ids, rule))
        _require(all(word and all(_is_int(t) and t >= 0 for t in word) for word in words), "bad_words_ids", words, rule)
        object.__setattr__(self, "bad_words_ids", words)

    def replace(self, **changes: Any) -> SamplingParams:
        return dataclasses.replace(self, **changes)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ConfigError where a token id lies outside the model's vocabulary."""
        named = {
            "logit_bias": tuple(self.logit_bias),
            "stop_token_ids": self.stop_token_ids,
            "bad_words_ids": tuple(t for word in self.bad_words_ids for t in word),
        }
        for name, ids in named.items():
            for token in ids:
                _require(token < vocab_size, name, token, f"a token id below the vocabulary size {vocab_size}")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Which drafters run, how wide a burst may be, and how it is judged. Only ``acceptance`` can change a token."""

    drafters: tuple[str, ...] = ("suffix", "trained", "recycling")
    """Names from DRAFTERS, best first; empty is plain decoding."""
    acceptance: str = "coupled"
    """The rule, from ACCEPTANCES, by which drafted tokens are accepted. Above temperature 0 all but ``coupled`` give other
    tokens than plain decoding, and all but ``typical``, which is lossy, of the same law; ``greedy`` is for temperature 0."""
    max_nodes: int = 16
    """Most drafted nodes a sequence verifies in one pass; how many really are is decided by what they cost and bring."""

    ngram_max: int = 4
    ngram_min: int = 2
    """Longest and shortest tail of tokens that prompt lookup matches."""

    suffix_depth: int = 48
    """Longest match, and longest continuation, that the suffix drafter follows."""
    suffix_min_match: int = 1
    """Shortest tail looked for in the request's own text."""
    suffix_global_min_match: int = 4
    """Shortest tail looked for in past outputs, which say less about this one."""
    suffix_min_probability: float = 0.25
    """Continuations less likely than this, by their counts, are not drafted."""
    suffix_factor: float = 2.0
    """Tokens drafted per token of match."""
    suffix_prior: float = 1.0
    """Imagined failures, per token of match, against which the counts of a continuation are weighed."""
    suffix_global_tokens: int = 100_000
    """Most tokens of past outputs kept for later requests; 0 keeps none."""

    recycling_successors: int = 8
    """Most likely successors remembered per token."""
    recycling_nodes: int = 4
    """Most nodes that token recycling adds to a tree."""
    recycling_min_probability: float = 0.25
    """Successors less likely than this, by their own record, are not drafted."""

    trained: str | None = AUTO
    """Which trained drafter: a folder, an id on the Hugging Face hub, an alias, or a model to draft with. ``auto`` is the one
    that ships for the model, and none where none does; None is the one that ships, and its absence is an error."""
    trained_depth: int = 5
    """Most tokens ahead that a trained drafter looks."""
    trained_width: int = 4
    """Most nodes that a trained drafter keeps at each depth of its tree."""
    trained_nodes: int = 10
    """Most nodes that a trained drafter adds to a tree."""
    trained_min_probability: float = 0.08
    """Nodes that are less likely to be accepted than this, by the trained drafter's own estimate, are not drafted."""
    trained_precision: Precision = "auto"
    """What the weights of a trained drafter are held in: as for a model, ``auto`` keeps blocks and makes 8-bit ones of anything
    else on a CPU, and is ``bf16`` elsewhere."""

    def __post_init__(self) -> None:
        rule = f"a list or tuple of names out of {', '.join(DRAFTERS)}"
        _require(isinstance(self.drafters, list | tuple), "drafters", self.drafters, rule)
        for name in self.drafters:
            _require(name in DRAFTERS, "drafters", name, rule)
        _require(len(set(self.drafters)) == len(self.drafters), "drafters", self.drafters, "a list without repeats")
        object.__setattr__(self, "drafters", tuple(self.drafters))
        _require(self.acceptance in ACCEPTANCES, "acceptance", self.acceptance, f"one of {', '.join(ACCEPTANCES)}")
        _require_integer("max_nodes", self.max_nodes, 1, 64, "an integer in [1, 64]")
        _require_integer("ngram_max", self.ngram_max, 1, math.inf, "an integer >= 1")
        _require_integer("ngram_min", self.ngram_min, 1, self.ngram_max, f"an integer in [1, ngram_max={self.ngram_max}]")
        depth = self.suffix_depth
        _require_integer("suffix_depth", depth, 2, math.inf, "an integer >= 2")
        for name in ("suffix_min_match", "suffix_global_min_match"):
            _require_integer(name, getattr(self, name), 1, depth - 1, f"an integer in [1, suffix_depth={depth})")
        _require_probability("suffix_min_probability", self.suffix_min_probability)
        factor, prior = self.suffix_factor, self.suffix_prior
        _require(_is_number(factor) and factor > 0, "suffix_factor", factor, "a finite number > 0")
        _require(_is_number(prior) and prior >= 0, "suffix_prior", prior, "a finite number >= 0")
        _require_integer("suffix_global_tokens", self.suffix_global_tokens, 0, math.inf, "an integer >= 0")
        _require_integer("recycling_successors", self.recycling_successors, 1, 32, "an integer in [1, 32]")
        _require_integer("recycling_nodes", self.recycling_nodes, 1, 64, "an integer in [1, 64]")
        _require_probability("recycling_min_probability", self.recycling_min_probability)
        rule = "a folder, hub id or alias, auto, or None"
        _require(self.trained is None or (isinstance(self.trained, str) and self.trained != ""), "trained", self.trained, rule)
        if self.trained not in (None, AUTO) and "trained" not in self.drafters:
            raise ConfigError(f"the trained drafter {self.trained!r} has no effect unless drafters (speculation) name trained")
        for name in ("trained_depth", "trained_width", "trained_nodes"):
            _require_integer(name, getattr(self, name), 1, 64, "an integer in [1, 64]")
        _require_probability("trained_min_probability", self.trained_min_probability)
        check_precision(self.trained_precision, "trained_precision")

    @classmethod
    def parse(cls, method: str, **settings: Any) -> SpeculationConfig:
        """``off``, ``auto``, or drafter names joined by commas. A trained drafter that is named must be there."""
        _require(isinstance(method, str), "speculation", method, "off, auto, or drafter names joined by commas")
        if method == "off":
            return cls(drafters=(), **settings)
        if method == AUTO:
            return cls(**settings)
        names = tuple(name.strip() for name in method.split(","))
        known = ", ".join(DRAFTERS)
        for name in names:
            alone = f"one of off, auto, {known}, or several drafters joined by commas"
            among = f"a list out of {known} (off and auto stand alone)"
            _require(name in DRAFTERS, "speculation", name, alone if len(names) == 1 else among)
        if "trained" in names:
            settings = {"trained": None, **settings}
        return cls(drafters=names, **settings)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's own limits."""

    speculation: SpeculationConfig = SpeculationConfig()
    max_sequences: int = 8
    """Most sequences that run at once; further ones wait in order of arrival."""
    max_len: int | None = None
    """Longest prompt and output together; None takes the model's context."""
    kv_tokens: int | None = None
    """Tokens that the key and value pool holds; None: four of the longest sequences, or as many as fit 32,768, at least one."""
    kv_format: str = AUTO
    """What keys and values are held in, from KV_FORMATS. int8 and int4 take about half and a quarter of the memory of bf16 and
    make another, declared model of it: docs/quality.md says what that costs."""
    prefill_rows: int = 128
    """Most prompt rows in one step."""
    step_seconds: float = 0.1
    """Seconds that a step should not exceed, by the measured costs of passes, when prompts are read beside sequences that
    decode: so many prompt rows it has, though never fewer than a block."""
    prefix_cache: bool = True
    """Keep what full blocks hold when their sequence ends, and begin later sequences of the same prefix with them."""
    self_test: bool = True
    """Check at start-up that rows are bitwise independent of the company they run in."""
    pass_seconds: Mapping[int, float] | None = None
    """Seconds of a pass by its number of rows, straight lines in between, by which drafting is planned; None measures them
    at start-up and follows the passes that run."""

    def __post_init__(self) -> None:
        speculation = self.speculation
        _require(isinstance(speculation, SpeculationConfig), "speculation", speculation, "a SpeculationConfig")
        for name in ("self_test", "prefix_cache"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        _require(_is_number(self.step_seconds) and self.step_seconds > 0, "step_seconds", self.step_seconds, "a number > 0")
        _require(
            _is_int(self.max_sequences) and 1 <= self.max_sequences <= 1024,
            "max_sequences",
            self.max_sequences,
            "an integer in [1, 1024]",
        )
        _require(
            self.max_len is None or (_is_int(self.max_len) and self.max_len >= 2), "max_len", self.max_len, "an integer >= 2"
        )
        _require(
            self.kv_tokens is None or (_is_int(self.kv_tokens) and self.kv_tokens >= BLOCK_SIZE),
            "kv_tokens",
            self.kv_tokens,
            f"an integer >= {BLOCK_SIZE}",
        )
        _require(self.kv_format in KV_FORMATS, "kv_format", self.kv_format, f"one of {', '.join(KV_FORMATS)}")
        _require(_is_int(self.prefill_rows) and self.prefill_rows >= 1, "prefill_rows", self.prefill_rows, "an integer >= 1")
        if self.pass_seconds is not None:
            rule, given = "a mapping of numbers of rows in [1, 4096] to seconds in [1e-9, 1e9], or None", self.pass_seconds
            _require(isinstance(given, Mapping) and bool(given), "pass_seconds", given, rule)
            for rows, seconds in given.items():
                right = _is_int(rows) and 1 <= rows <= 4096 and _is_number(seconds) and 1e-9 <= seconds <= 1e9
                _require(right, "pass_seconds", given, rule)
            object.__setattr__(self, "pass_seconds", dict(given))


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """How the server meets its clients. None of it changes a token."""

    model_name: str | None = None
    """What clients call the model; None: the name that it was loaded by."""
    api_keys: tuple[str, ...] = ()
    """A client must show one of these; without any, everybody is served. Clients with different keys share no cached prefix."""
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
        _require(isinstance(keys, list | tuple) and all(isinstance(k, str) and k for k in keys), "api_keys", keys, rule)
        object.__setattr__(self, "api_keys", tuple(keys))
        name = self.model_name
        _require(name is None or (isinstance(name, str) and bool(name)), "model_name", name, "a non-empty string")
        _require_integer("max_queue", self.max_queue, 0, math.inf, "an integer >= 0")
        _require_integer("max_body_bytes", self.max_body_bytes, 1024, math.inf, "an integer >= 1024")
        for field_name in ("body_seconds", "request_seconds", "stalled_seconds"):
            value = getattr(self, field_name)
            _require(_is_number(value) and value > 0, field_name, value, "a finite number > 0")
        rate, grace = self.stream_rate, self.shutdown_seconds
        _require(rate is None or (_is_number(rate) and rate > 0), "stream_rate", rate, "a finite number > 0")
        _require(_is_number(grace) and grace >= 0, "shutdown_seconds", grace, "a finite number >= 0")
        url, share = self.otlp_endpoint, self.trace_sample
        known = url is None or (isinstance(url, str) and url.startswith(("http://", "https://")))
        _require(known, "otlp_endpoint", url, "a URL of http or https")
        _require(share is None or (_is_number(share) and 0 <= share <= 1), "trace_sample", share, "a number in [0, 1]")
