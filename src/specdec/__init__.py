"""Speculative decoding that changes nothing but the speed, and that you can check."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.config import SamplingParams, SpeculationConfig
    from specdec.llm import LLM
    from specdec.results import Result

__all__ = ["LLM", "Result", "SamplingParams", "SpeculationConfig"]

try:
    __version__ = version("specdec")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

_HOMES = {
    "LLM": "specdec.llm",
    "Result": "specdec.results",
    "SamplingParams": "specdec.config",
    "SpeculationConfig": "specdec.config",
}


def __getattr__(name: str) -> object:
    """Import on first use: the command line's help should not wait for PyTorch."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'specdec' has no attribute {name!r}")
