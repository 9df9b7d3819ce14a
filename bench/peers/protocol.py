"""What a worker and the comparison say to each other: JSON lines on standard input and output.

Every engine is one worker in an environment of its own, so this file needs nothing but Python. The worker starts itself once
for each of its modes and hands requests on: two engines in one process share a pool of threads, or have more threads than
processors in one OpenMP runtime, which then hardly spins at barriers, and both are slow. A worker first says what it is (or
why it cannot run), then answers one request after the other until its input ends:

    -> {"id": "a", "prompt": "<rendered text>", "token_ids": [1, 2], "max_tokens": 128, "mode": "plain"}
    <- {"id": "a", "tokens": [3, 4], "seconds": 0.5, "first_token_seconds": 0.1, "text": "..."}

Decoding is greedy, the model's own end tokens end it and count, and every prompt is processed afresh. Seconds run from the
request's arrival to the last token; turning tokens into text is not part of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, TextIO

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
    mode: str


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
    """An engine loaded in one of its modes."""

    modes: tuple[str, ...]
    """All there are, each in a process of its own."""
    versions: Mapping[str, str]
    """Packages that matter, and what was chosen: precision, kernels."""

    @abstractmethod
    def __init__(self, settings: Settings) -> None: ...

    @classmethod
    def environment(cls, threads: int) -> dict[str, str]:
        """Variables that the processes of its modes must be started with, as libraries read them once."""
        return {}

    @abstractmethod
    def answer(self, request: Request) -> Answer: ...


def versions(*packages: str) -> dict[str, str]:
    """The installed versions of packages."""
    return {package: version(package) for package in packages}


def run_worker(engine: type[Engine]) -> None:
    """Answer until the input ends: without ``--mode`` through a process for each mode, with it in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--end-tokens", type=int, nargs="*", default=[])
    parser.add_argument("--mode", choices=engine.modes)
    arguments = parser.parse_args()
    with _answers() as out:
        if arguments.mode is None:
            _hand_on(out, engine.modes, {**os.environ, **engine.environment(arguments.threads)})
        else:
            _serve(out, engine, Settings(arguments.model, arguments.threads, tuple(arguments.end_tokens), arguments.mode))


def _serve(out: TextIO, kind: type[Engine], settings: Settings) -> None:
    """Load once, then answer; an error of one request is its answer."""
    try:
        engine = kind(settings)
    except SkippedError as reason:
        _say(out, {"skipped": str(reason)})
        return
    _say(out, {"ready": True, "modes": [settings.mode], "versions": dict(engine.versions)})
    for line in sys.stdin:
        record = json.loads(line)
        try:
            answer = asdict(engine.answer(Request(**record)))
        except Exception as error:  # whatever the engine raises concerns this request; the comparison decides what then
            answer = {"error": f"{type(error).__name__}: {error}"}
        _say(out, {"id": record["id"], **answer})


class _Mode:
    """The process of one mode; lines go in and come out as they are."""

    def __init__(self, mode: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *sys.argv, "--mode", mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def say(self, line: str) -> None:
        try:
            _open(self._process.stdin).write(line)
            _open(self._process.stdin).flush()
        except BrokenPipeError:
            self._die_alike()

    def hear(self) -> str:
        line = _open(self._process.stdout).readline()
        if not line:
            self._die_alike()
        return line

    def close(self) -> None:
        _open(self._process.stdin).close()
        self._process.wait()

    def _die_alike(self) -> None:
        """End as this process did, so that whoever asked sees its status; the others end with their input."""
        status = self._process.wait()
        if status < 0:
            os.kill(os.getpid(), -status)
        os._exit(status or 1)


def _open(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _hand_on(out: TextIO, modes: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the modes one after the other, as loading may keep all processors busy, then hand requests to their modes."""
    processes: dict[str, _Mode] = {}
    found: dict[str, Mapping[str, str]] = {}
    for mode in modes:
        processes[mode] = _Mode(mode, environment)
        hello = json.loads(processes[mode].hear())
        if "skipped" in hello:
            _say(out, hello)
            break
        found[mode] = hello["versions"]
    else:
        _say(out, {"ready": True, "modes": list(modes), "versions": _together(found)})
        for line in sys.stdin:
            process = processes[json.loads(line)["mode"]]
            process.say(line)
            out.write(process.hear())
            out.flush()
    for process in processes.values():
        process.close()


def _together(found: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """What the modes report: once where they agree, else with the mode's name."""
    merged: dict[str, str] = {}
    for mode, theirs in found.items():
        for name, value in theirs.items():
            same = all(other.get(name) == value for other in found.values())
            merged[name if same else f"{name}, {mode}"] = value
    return merged


def _answers() -> TextIO:
    """Standard output for answers alone: what the engines print goes to standard error instead."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _say(out: TextIO, record: Mapping[str, object]) -> None:
    out.write(json.dumps(record) + "\n")
    out.flush()
