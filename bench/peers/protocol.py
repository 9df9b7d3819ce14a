"""What a worker and the comparison say to each other: JSON lines on standard input and output.

Every engine is one worker in an environment of its own, so this file needs nothing but Python. A worker first says what it
is (or why it cannot run), then answers one request after the other until its input ends:

    -> {"id": "a", "prompt": "<rendered text>", "token_ids": [1, 2], "max_tokens": 128, "mode": "plain"}
    <- {"id": "a", "tokens": [3, 4], "seconds": 0.5, "first_token_seconds": 0.1, "text": "..."}

Decoding is greedy, the model's own end tokens end it and count, and every prompt is processed afresh. Seconds run from the
request's arrival to the last token; turning tokens into text is not part of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

CONTEXT = 4096
"""Tokens of prompt and answer together that every engine makes room for."""


class SkippedError(Exception):
    """This engine cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a worker was started."""

    model: Path
    """The GGUF file, or the exported folder for engines that read no GGUF."""
    threads: int
    end_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    id: str
    prompt: str
    token_ids: list[int]
    max_tokens: int
    mode: str


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    """Everything that came out, an end token included."""
    seconds: float
    first_token_seconds: float
    text: str


class Engine(ABC):
    """A loaded engine."""

    modes: tuple[str, ...]
    versions: Mapping[str, str]
    """Packages that matter, and what was chosen: precision, kernels."""

    @abstractmethod
    def answer(self, request: Request) -> Answer: ...


def versions(*packages: str) -> dict[str, str]:
    """The installed versions of packages."""
    return {package: version(package) for package in packages}


def run_worker(load: Callable[[Settings], Engine]) -> None:
    """Load once, then answer until the input ends; an error of one request is its answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--end-tokens", type=int, nargs="*", default=[])
    arguments = parser.parse_args()
    with _answers() as out:
        try:
            engine = load(Settings(arguments.model, arguments.threads, tuple(arguments.end_tokens)))
        except SkippedError as reason:
            _say(out, {"skipped": str(reason)})
            return
        _say(out, {"ready": True, "modes": list(engine.modes), "versions": dict(engine.versions)})
        for line in sys.stdin:
            record = json.loads(line)
            try:
                answer = asdict(engine.answer(Request(**record)))
            except Exception as error:  # whatever the engine raises concerns this request; the comparison decides what then
                answer = {"error": f"{type(error).__name__}: {error}"}
            _say(out, {"id": record["id"], **answer})


def _answers() -> TextIO:
    """Standard output for answers alone: what the engines print goes to standard error instead."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _say(out: TextIO, record: Mapping[str, object]) -> None:
    out.write(json.dumps(record) + "\n")
    out.flush()
