"""The engine's limits and habits: how much it holds, how wide a pass is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specdec.config.checks import is_integer, is_number, require
from specdec.config.choices import AUTO, BLOCK_SIZE, KV_FORMATS
from specdec.config.speculation import SpeculationConfig


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's own limits."""

    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
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
        require(isinstance(speculation, SpeculationConfig), "speculation", speculation, "a SpeculationConfig")
        for name in ("self_test", "prefix_cache"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        require(is_number(self.step_seconds) and self.step_seconds > 0, "step_seconds", self.step_seconds, "a number > 0")
        require(
            is_integer(self.max_sequences) and 1 <= self.max_sequences <= 1024,
            "max_sequences",
            self.max_sequences,
            "an integer in [1, 1024]",
        )
        require(
            self.max_len is None or (is_integer(self.max_len) and self.max_len >= 2), "max_len", self.max_len, "an integer >= 2"
        )
        require(
            self.kv_tokens is None or (is_integer(self.kv_tokens) and self.kv_tokens >= BLOCK_SIZE),
            "kv_tokens",
            self.kv_tokens,
            f"an integer >= {BLOCK_SIZE}",
        )
        require(self.kv_format in KV_FORMATS, "kv_format", self.kv_format, f"one of {', '.join(KV_FORMATS)}")
        require(is_integer(self.prefill_rows) and self.prefill_rows >= 1, "prefill_rows", self.prefill_rows, "an integer >= 1")
        if self.pass_seconds is not None:
            rule, given = "a mapping of numbers of rows in [1, 4096] to seconds in [1e-9, 1e9], or None", self.pass_seconds
            require(isinstance(given, Mapping) and bool(given), "pass_seconds", given, rule)
            for rows, seconds in given.items():
                right = is_integer(rows) and 1 <= rows <= 4096 and is_number(seconds) and 1e-9 <= seconds <= 1e9
                require(right, "pass_seconds", given, rule)
            object.__setattr__(self, "pass_seconds", dict(given))
