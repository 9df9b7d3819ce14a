"""What a request may say of its tokens: how they are chosen, and when they end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdec.config.checks import is_integer, is_number, items, require

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024


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
    """Keep the most likely tokens that together have this probability, the one that crosses it included; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt and output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it is in the output, in [-2, 2]."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that is in the output, in [-2, 2]."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids, each in [-100, 100]."""
    bad_words: tuple[str, ...] = ()
    """Text that must not be said; a string or several."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be completed."""
    max_tokens: int | None = None
    """None: until the context is full."""
    min_tokens: int = 0
    """End tokens are banned until this many tokens are out."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these; empty strings are ignored."""
    stop_token_ids: tuple[int, ...] = ()
    """The output ends with the first of these, which counts as one of its tokens."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens."""
    seed: int | None = None
    """None draws a fresh one, which the result reports."""
    n: int = 1
    """Answers to each prompt, each with a seed derived from this request's; 1 to 128."""
    logprobs: int | None = None
    """None: no log-probabilities; k: those of the emitted tokens and of the k most likely ones."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, given what precedes each; the first one has none."""

    def __post_init__(self) -> None:
        require(is_number(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "a finite number >= 0")
        require(
            is_integer(self.top_k) and -1 <= self.top_k < 2**63,  # the sampler's integers have 64 bits
            "top_k",
            self.top_k,
            "an integer in [1, 2**63), or 0 or -1 for all tokens",
        )
        require(is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        require(is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        r = self.repetition_penalty
        require(is_number(r) and 1e-3 <= r <= 1e3, "repetition_penalty", r, "in [0.001, 1000]; 1 turns it off")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            require(is_number(value) and -2 <= value <= 2, name, value, "in [-2, 2]")
        biases = {} if self.logit_bias is None else self.logit_bias
        require(isinstance(biases, Mapping), "logit_bias", biases, "a mapping of token ids to numbers")
        for token, bias in biases.items():
            require(is_integer(token) and token >= 0, "logit_bias key", token, "a token id >= 0")
            require(is_number(bias) and -100 <= bias <= 100, f"logit_bias[{token}]", bias, "in [-100, 100]")
        object.__setattr__(self, "logit_bias", dict(biases))
        require(
            self.max_tokens is None or (is_integer(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            self.max_tokens,
            "an integer >= 1",
        )
        require(is_integer(self.min_tokens) and self.min_tokens >= 0, "min_tokens", self.min_tokens, "an integer >= 0")
        if self.max_tokens is not None:
            require(
                self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})"
            )
        require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        require(is_integer(self.n) and 1 <= self.n <= 128, "n", self.n, "an integer in [1, 128]")
        require(
            self.seed is None or (is_integer(self.seed) and 0 <= self.seed < 2**63),
            "seed",
            self.seed,
            "an integer in [0, 2**63)",
        )
        for name in ("logprobs", "prompt_logprobs"):
            k = getattr(self, name)
            require(k is None or (is_integer(k) and 0 <= k <= MAX_LOGPROBS), name, k, f"an integer in [0, {MAX_LOGPROBS}]")
        for name in ("stop", "bad_words"):
            rule, value = "a string or a list of strings", getattr(self, name)
            value = (value,) if isinstance(value, str) else items(name, value, rule)
            require(all(isinstance(s, str) for s in value), name, value, rule)
            object.__setattr__(self, name, tuple(s for s in value if s))
        require(len(self.stop) <= MAX_STOP_STRINGS, "stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings")
        require(
            all(len(s) <= MAX_STOP_CHARACTERS for s in self.stop),
            "stop",
            "a longer string",
            f"strings of at most {MAX_STOP_CHARACTERS} characters",
        )
        rule = "a list of token ids >= 0"
        ids = items("stop_token_ids", self.stop_token_ids, rule)
        require(all(is_integer(t) and t >= 0 for t in ids), "stop_token_ids", ids, rule)
        object.__setattr__(self, "stop_token_ids", ids)
        rule = "a list of non-empty lists of token ids >= 0"
        words = tuple(items("bad_words_ids", word, rule) for word in items("bad_words_ids", self.bad_words_ids, rule))
        require(all(word and all(is_integer(t) and t >= 0 for t in word) for word in words), "bad_words_ids", words, rule)
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
                require(token < vocab_size, name, token, f"a token id below the vocabulary size {vocab_size}")
