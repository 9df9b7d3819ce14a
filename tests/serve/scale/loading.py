"""What replicas of tests load. It is imported in their processes, so it imports little."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from specdec.config import ConfigError
from specdec.llm import LLM

FLAT = {1: 1.0, 64: 1.0}
"""Costs by which every drafter pays; nothing is measured."""

HELD = "held"
"""While a file of this name lies beside the model, it is not loaded."""


def load(folder: str, seconds: float = 0.0) -> LLM:
    """A tiny model on one thread; every pass takes at least so long."""
    while Path(folder, HELD).exists():
        time.sleep(0.01)
    llm = LLM(folder, precision="fp32", self_test=False, pass_seconds=FLAT, threads=1)
    step = llm.engine.step

    def slowly() -> Any:
        time.sleep(seconds)
        return step()

    if seconds:
        llm.engine.step = slowly  # type: ignore[method-assign]
    return llm


def load_once(folder: str, loaded: str) -> LLM:
    """The tiny model, the first time; ``loaded`` is the path of a file that tells of that."""
    try:
        Path(loaded).touch(exist_ok=False)
    except FileExistsError:
        raise ConfigError("the model is gone") from None
    return load(folder)
