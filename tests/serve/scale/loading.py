"""What replicas of tests load. It is imported in their processes, so it imports little."""

from __future__ import annotations

import time
from typing import Any

from specdec.llm import LLM

FLAT = {1: 1.0, 64: 1.0}
"""Costs by which every drafter pays; nothing is measured."""


def load(folder: str, seconds: float = 0.0) -> LLM:
    """A tiny model on one thread; every pass takes at least so long."""
    llm = LLM(folder, precision="fp32", self_test=False, pass_seconds=FLAT, threads=1)
    step = llm.engine.step

    def slowly() -> Any:
        time.sleep(seconds)
        return step()

    if seconds:
        llm.engine.step = slowly  # type: ignore[method-assign]
    return llm
