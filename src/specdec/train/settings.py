"""Every setting of a training run, with its default and its range."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from specdec.config import ConfigError
from specdec.models.head_config import Correction, HeadKind

Kind = Literal["medusa", "eagle", "mtp", "draft"]
KINDS: tuple[Kind, ...] = ("medusa", "eagle", "mtp", "draft")
GIGABYTE = 2**30
MOST_CACHE = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How a drafter is made.

    Raises:
        ConfigError: a value is out of range; the message names it.
    """

    kind: HeadKind | Literal["draft"]
    steps: int = 4
    """Tokens ahead that training looks; Medusa: heads."""
    taps: tuple[int, ...] | None = None
    """Layers whose outputs are the features; None: the last one, for EAGLE-3 layer 2, the middle and the third from last."""
    vocabulary: int = 8192
    """Most tokens that the head can draft: the most frequent ones of the answers. 0 for all."""
    ffn_size: int | None = None
    """None: the target's."""
    modules: int = 1
    """MTP: modules of their own before the last is applied again."""
    layers: tuple[int, ...] | None = None
    """Draft model: layers of the target that it starts as; None: the first three."""
    blocks: int = 1
    correction: Correction = "hydra"
    rank: int = 64

    epochs: float = 3.0
    """Passes over the answers, at most."""
    minutes: float | None = None
    """Of training, at most; the learning rate falls accordingly. None: as long as the epochs take."""
    batch: int = 256
    """Anchors in a step (see batch.py): fewer learn more from as many, until the optimiser's own work counts."""
    rate: float = 1e-3
    """Highest learning rate."""
    warmup: float = 0.03
    """Share of the run in which the rate rises."""
    alone: float = 0.4
    """Share of the run in which a head that goes on from its own states learns the first step only; then the others join, one
    by one. A step costs as much as the first, and until that is right they have little to go on from."""
    decay: float = 0.8
    """Step j weighs decay^j in the loss."""
    hard: float = 0.3
    """Share of the target's likeliest token in what is imitated; the rest is its law."""
    noise: float = 0.0
    """Uniform noise on the features (EAGLE-1: 0.1)."""
    regression: float = 0.0
    """Weight of the distance between states and features (EAGLE-1: 1)."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Longest gradient."""
    seed: int = 0

    held_out: float = 0.03
    """Share of the prompts that training never sees and that everything reported is measured on."""
    evaluations: int = 12
    """Measurements in the course of a run."""
    patience: int = 4
    """Measurements without improvement after which it stops; 0 for never."""
    cache_gb: float = 6.0
    """Most disk for hidden states of the target; what does not fit is computed anew in each epoch."""

    def __post_init__(self) -> None:
        self._require(1 <= self.steps <= 16, "steps", "an integer in [1, 16]")
        self._require(self.vocabulary >= 0, "vocabulary", "an integer >= 0")
        self._require(self.epochs > 0, "epochs", "a number > 0")
        self._require(self.minutes is None or self.minutes > 0, "minutes", "a number > 0")
        self._require(self.batch >= 1, "batch", "an integer >= 1")
        self._require(0 < self.rate < 1, "rate", "a number in (0, 1)")
        self._require(0 <= self.hard <= 1, "hard", "a number in [0, 1]")
        self._require(0 <= self.alone < 1, "alone", "a number in [0, 1)")
        self._require(0 < self.decay <= 1, "decay", "a number in (0, 1]")
        self._require(0 < self.held_out <= 0.5, "held_out", "a number in (0, 0.5]")
        self._require(0 <= self.cache_gb <= MOST_CACHE, "cache_gb", f"a number in [0, {MOST_CACHE:g}]")
        self._require(self.evaluations >= 1, "evaluations", "an integer >= 1")

    def _require(self, ok: bool, name: str, rule: str) -> None:
        if not ok:
            raise ConfigError(f"{name} must be {rule}, got {getattr(self, name)!r}")

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


LEARNED_RATE = 5e-4
"""Highest learning rate for weights that have learned much before."""

FREE = frozenset({"minutes", "cache_gb", "evaluations", "patience"})
"""Settings that may change when a run is taken up again."""


def defaults(kind: Kind, style: str | None = None) -> dict[str, Any]:
    """Settings that a kind, or a style of EAGLE, has instead of the general ones.

    Raises:
        ConfigError: there is no such style.
    """
    if kind == "eagle":
        if style in (None, "eagle3"):
            return {"kind": "eagle3"}
        if style == "eagle":
            return {"kind": "eagle", "noise": 0.1, "regression": 1.0}
        raise ConfigError(f"style must be eagle or eagle3, got {style!r}")
    if style is not None:
        raise ConfigError("only eagle has styles")
    if kind == "draft":
        return {"kind": "draft", "rate": LEARNED_RATE}
    return {"kind": kind}
