"""What is drafted, and by which rule drafts are accepted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from specdec.config.checks import ConfigError, is_number, require, require_integer, require_probability
from specdec.config.choices import ACCEPTANCES, AUTO, DRAFTERS, Precision, check_precision


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
        require(isinstance(self.drafters, list | tuple), "drafters", self.drafters, rule)
        for name in self.drafters:
            require(name in DRAFTERS, "drafters", name, rule)
        require(len(set(self.drafters)) == len(self.drafters), "drafters", self.drafters, "a list without repeats")
        object.__setattr__(self, "drafters", tuple(self.drafters))
        require(self.acceptance in ACCEPTANCES, "acceptance", self.acceptance, f"one of {', '.join(ACCEPTANCES)}")
        require_integer("max_nodes", self.max_nodes, 1, 64, "an integer in [1, 64]")
        require_integer("ngram_max", self.ngram_max, 1, math.inf, "an integer >= 1")
        require_integer("ngram_min", self.ngram_min, 1, self.ngram_max, f"an integer in [1, ngram_max={self.ngram_max}]")
        depth = self.suffix_depth
        require_integer("suffix_depth", depth, 2, math.inf, "an integer >= 2")
        for name in ("suffix_min_match", "suffix_global_min_match"):
            require_integer(name, getattr(self, name), 1, depth - 1, f"an integer in [1, suffix_depth={depth})")
        require_probability("suffix_min_probability", self.suffix_min_probability)
        factor, prior = self.suffix_factor, self.suffix_prior
        require(is_number(factor) and factor > 0, "suffix_factor", factor, "a finite number > 0")
        require(is_number(prior) and prior >= 0, "suffix_prior", prior, "a finite number >= 0")
        require_integer("suffix_global_tokens", self.suffix_global_tokens, 0, math.inf, "an integer >= 0")
        require_integer("recycling_successors", self.recycling_successors, 1, 32, "an integer in [1, 32]")
        require_integer("recycling_nodes", self.recycling_nodes, 1, 64, "an integer in [1, 64]")
        require_probability("recycling_min_probability", self.recycling_min_probability)
        rule = "a folder, hub id or alias, auto, or None"
        require(self.trained is None or (isinstance(self.trained, str) and self.trained != ""), "trained", self.trained, rule)
        if self.trained not in (None, AUTO) and "trained" not in self.drafters:
            raise ConfigError(f"the trained drafter {self.trained!r} has no effect unless drafters (speculation) name trained")
        for name in ("trained_depth", "trained_width", "trained_nodes"):
            require_integer(name, getattr(self, name), 1, 64, "an integer in [1, 64]")
        require_probability("trained_min_probability", self.trained_min_probability)
        check_precision(self.trained_precision, "trained_precision")

    @classmethod
    def parse(cls, method: str, **settings: Any) -> SpeculationConfig:
        """``off``, ``auto``, or drafter names joined by commas. A trained drafter that is named must be there."""
        require(isinstance(method, str), "speculation", method, "off, auto, or drafter names joined by commas")
        if method == "off":
            return cls(drafters=(), **settings)
        if method == AUTO:
            return cls(**settings)
        names = tuple(name.strip() for name in method.split(","))
        known = ", ".join(DRAFTERS)
        for name in names:
            alone = f"one of off, auto, {known}, or several drafters joined by commas"
            among = f"a list out of {known} (off and auto stand alone)"
            require(name in DRAFTERS, "speculation", name, alone if len(names) == 1 else among)
        if "trained" in names:
            settings = {"trained": None, **settings}
        return cls(drafters=names, **settings)
