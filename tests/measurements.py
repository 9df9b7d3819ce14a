"""Measurements made by hand, for tests of what is computed from them, and a verifier that spoils one."""

from __future__ import annotations

from typing import Any

from specdec.bench.result import Report, Timing
from specdec.bench.summary import summarise
from specdec.types import Verdict
from specdec.verify import follow


def timing(mode: str, prompt: str, seconds: float, **more: Any) -> Timing:
    """A run of 11 tokens whose first one took a second; the task is the prompt's name up to the dash."""
    values = {
        "task": prompt.partition("-")[0],
        "turn": 0,
        "prompt_tokens": 5,
        "tokens": 11,
        "first_token_seconds": 1.0,
        "gaps": {"p50": 0.1, "p99": 0.2},
        **more,
    }
    return Timing(mode=mode, prompt=prompt, seconds=seconds, **values)


def counters(passes: int, emitted: int, reached: list[int], accepted: list[int]) -> dict[str, Any]:
    return {"target_passes": passes, "emitted": emitted, "reached_by_depth": reached, "accepted_by_depth": accepted}


def report(*runs: Timing, **more: Any) -> Report:
    """A whole result of these runs; ``more`` replaces what it says of itself."""
    modes = tuple(dict.fromkeys(run.mode for run in runs))
    values: dict[str, Any] = {
        "provenance": {
            "date": "2026-01-02T03:04:05+00:00",
            "commit": "0123456789abcdef",
            "modified": False,
            "command": "specdec bench --json made.json",
            "cpu": "Abacus 3000",
            "threads": 2,
            "kernels": "beads",
            "model": "made-up",
            "precision": "fp32",
            "torch": "2.13.0",
            "prompts_sha256": "feed",
        },
        "settings": {
            "speculation": ["suffix"],
            "max_nodes": 8,
            "temperature": list(dict.fromkeys(run.temperature for run in runs)),
            "max_tokens": 11,
            "ignore_eos": False,
            "seed": 0,
            "concurrency": 1,
            "repeats": 1,
        },
        "modes": modes,
        "runs": runs,
        "v": {"1": 1.0, "8": 1.3},
        "summary": tuple(summarise(runs, modes)),
        "peak_memory_bytes": 123_000_000,
    }
    return Report(**{**values, **more})


def gullible(tree, pick):
    """A verifier that is broken: it believes the first drafted node."""
    verdict = follow(tree, pick)
    return Verdict((0,), verdict.token) if len(tree) else verdict
