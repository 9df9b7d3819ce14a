"""What a trained drafter is made of, before there are any weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specdec.config import ConfigError

HeadKind = Literal["medusa", "eagle", "eagle3", "mtp"]
Correction = Literal["none", "markov", "hydra"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """What a trained drafter is made of; with the target's embedding and output matrix it says everything.

    Raises:
        ConfigError: values that do not go together.
    """

    kind: HeadKind
    hidden_size: int
    """Of the target, and of the head."""
    vocab_size: int
    """Of the target."""
    taps: tuple[int, ...]
    """Layers of the target whose outputs are the features; the last one is counted like any other."""
    normed: bool = False
    """The feature is taken after the target's final norm (then the only tap is its last layer)."""
    vocabulary: int | None = None
    """How many tokens the head can draft; None: all of them."""
    own_output: bool = False
    """The head brings its output matrix, over its vocabulary (Medusa: one for each head), instead of taking the target's."""
    own_embedding: bool = False
    """The head brings its embedding, over all of the target's vocabulary, instead of taking the target's."""
    rms_eps: float = 1e-5

    depth: int = 4
    """Medusa: heads. MTP: modules, the last of which is applied again for greater depths. EAGLE: steps it was trained for."""

    blocks: int = 1
    """Medusa: residual blocks in each head."""
    correction: Correction = "none"
    """Medusa: what a head sees of the tokens between the feature and its own: nothing; the one before, as a bias of low rank
    on the logits (DSpark's Markov head, DeepSpec 2026); or all of their embeddings (Hydra, Ankner et al., arXiv 2402.05109)."""
    rank: int = 64
    """Medusa: rank of the Markov bias."""

    n_heads: int = 0
    n_kv_heads: int = 0
    head_dim: int = 0
    ffn_size: int = 0
    rope_theta: float = 10_000.0
    fc_bias: bool = False
    """EAGLE: the product that joins embedding and feature, or that joins the features, has a bias."""
    normed_residual: bool = False
    """EAGLE-3: the residual stream begins with the normed state, as in some published heads, instead of the state itself."""
    hidden_first: bool = False
    """MTP: features come before the embedding where both are joined (the paper's order; checkpoints have the other)."""

    def __post_init__(self) -> None:
        if not self.taps or list(self.taps) != sorted(set(self.taps)) or self.taps[0] < 0:
            raise ConfigError(f"taps must be layers in increasing order, got {self.taps}")
        if self.normed and len(self.taps) != 1:
            raise ConfigError(f"only the last layer's output can be normed, got taps {self.taps}")
        if self.kind != "eagle3" and len(self.taps) != 1:
            raise ConfigError(f"a head of kind {self.kind} takes one tap, got {self.taps}")
        if (self.fc_bias and self.kind not in ("eagle", "eagle3")) or (self.normed_residual and self.kind != "eagle3"):
            raise ConfigError(f"fc_bias and normed_residual are settings of EAGLE heads, and this one is of kind {self.kind}")
        if self.kind != "medusa" and not (self.n_heads and self.n_kv_heads and self.head_dim and self.ffn_size):
            raise ConfigError(f"a head of kind {self.kind} needs n_heads, n_kv_heads, head_dim and ffn_size")
        if self.depth < 1 or self.blocks < 1 or (self.vocabulary is not None and not 1 <= self.vocabulary <= self.vocab_size):
            raise ConfigError("depth and blocks must be at least 1, and vocabulary between 1 and vocab_size")

    @property
    def n_outputs(self) -> int:
        """How many tokens the head can draft."""
        return self.vocabulary or self.vocab_size

    @property
    def recurrent(self) -> bool:
        return self.kind != "medusa"

    @property
    def n_modules(self) -> int:
        """Decoder layers, each with keys and values of its own."""
        return 0 if self.kind == "medusa" else self.depth if self.kind == "mtp" else 1
