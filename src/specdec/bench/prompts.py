"""The prompts of a measurement: ours, or any file with one JSON object a line."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.config import ConfigError

DEFAULT = Path(__file__).with_name("prompts.jsonl")
"""Twenty-four prompts of six tasks, four each."""

UNNAMED = "other"
"""The task of a prompt whose line names none."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request."""

    id: str
    task: str
    request: str | tuple[Mapping[str, str], ...]
    """What the user says, or a whole conversation of mappings with ``role`` and ``content``."""


def load(path: Path) -> list[Prompt]:
    """Read prompts, from a gzip file too where the name ends in ``.gz``; empty lines are skipped.

    A line is an object with ``prompt`` (text) or ``messages`` (a conversation), and may have ``id`` and ``task``. A line of
    HumanEval (``task_id`` and ``prompt``) is known by its ``task_id``, which becomes the id; its task is ``code``. Other
    keys are allowed and not used. Without an id a prompt is named by its line.

    Raises:
        ConfigError: a line cannot be used, two prompts share an id, or there is none; the message names file and line.
    """
    lines = _lines(path)
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        prompt = _read(line, where, number)
        if prompt.id in prompts:
            raise ConfigError(f"{where}: the id {prompt.id!r} is taken by an earlier line")
        prompts[prompt.id] = prompt
    if not prompts:
        raise ConfigError(f"{path} holds no prompts: one JSON object a line is expected")
    return list(prompts.values())


def select(prompts: list[Prompt], tasks: Collection[str], limit: int | None) -> list[Prompt]:
    """Prompts of the given tasks (all, if none is given); at most ``limit``, taken from the tasks in turn.

    Raises:
        ConfigError: there is no such task, or the limit is below 1.
    """
    known = list(dict.fromkeys(prompt.task for prompt in prompts))
    if unknown := [task for task in tasks if task not in known]:
        raise ConfigError(f"no prompt has the task {unknown[0]!r}; there are {', '.join(known)}")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be an integer >= 1, got {limit}")
    chosen = [prompt for prompt in prompts if not tasks or prompt.task in tasks]
    by_task = [[prompt for prompt in chosen if prompt.task == task] for task in known]
    in_turn = [prompt for row in itertools.zip_longest(*by_task) for prompt in row if prompt]
    kept = {prompt.id for prompt in in_turn[:limit]}
    return [prompt for prompt in chosen if prompt.id in kept]


def digest(prompts: list[Prompt]) -> str:
    """SHA-256 of what is asked, in order: two measurements with the same one asked the same."""
    asked = [[prompt.id, prompt.task, prompt.request] for prompt in prompts]
    return hashlib.sha256(json.dumps(asked, ensure_ascii=False, sort_keys=True).encode()).hexdigest()


def _lines(path: Path) -> list[str]:
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{path} is not a whole gzip file: {error}") from error


def _read(line: str, where: str, number: int) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: a JSON object is expected, got {line.strip()[:40]!r}")
    if ("prompt" in record) == ("messages" in record):
        raise ConfigError(f'{where}: either "prompt" or "messages" is needed, got the keys {", ".join(record) or "(none)"}')
    if "task_id" in record:
        record = {"task": "code", **record, "id": record["task_id"]}
    request = _messages(record["messages"], where) if "messages" in record else record["prompt"]
    if not isinstance(request, tuple) and not (isinstance(request, str) and request.strip()):
        raise ConfigError(f'{where}: "prompt" must be text that is not empty, got {request!r}')
    name, task = record.get("id", f"line {number}"), record.get("task", UNNAMED)
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    for key, value in (("id", name), ("task", task)):
        if not (isinstance(value, str) and value):
            raise ConfigError(f'{where}: "{key}" must be text that is not empty, got {value!r}')
    if task == "all":
        raise ConfigError(f'{where}: a task cannot be called "all", which stands for the total')
    return Prompt(name, task, request)


def _messages(value: Any, where: str) -> tuple[Mapping[str, str], ...]:
    fine = (
        isinstance(value, list)
        and value
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value)
    )
    if not fine:
        raise ConfigError(f'{where}: "messages" must be a list of objects with the texts "role" and "content"')
    return tuple({"role": m["role"], "content": m["content"]} for m in value)
