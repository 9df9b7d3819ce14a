"""The names that settings choose from, and the constants that several parts agree on."""

from __future__ import annotations

from typing import Literal

from specdec.config.checks import require

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


def check_precision(precision: object, name: str = "precision") -> None:
    """Raise ConfigError unless it is one of PRECISIONS."""
    require(precision in PRECISIONS, name, precision, f"one of {', '.join(PRECISIONS)}")
