"""The prompts of a measurement or a training: ours, or any file with one JSON object a line."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.config import ConfigError

if TYPE_CHECKING:
    from specdec.encoding import TextTokenizer

DEFAULT = Path(__file__).with_name("prompts.jsonl")
"""Twenty-four prompts of six tasks, four each."""

UNNAMED = "other"
"""The task of a prompt whose line names none."""
_NAMED = 5
"""Bad lines that an error names."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request."""

    id: str
    task: str
    request: str | tuple[Mapping[str, str], ...]
    """What the user says, or a whole conversation of mappings with ``role`` and ``content``."""
    raw: bool = False
    """The text is continued as it stands, without a chat template."""

    def encode(self, tokenizer: TextTokenizer) -> list[int]:
        """Token ids, laid out by the model's chat template; text as it stands where there is none.

        Raises:
            ConfigError: a conversation, without a template.
        """
        if isinstance(self.request, str):
            if self.raw or not tokenizer.has_chat_template:
                return tokenizer.encode(self.request, add_special=True)
            return tokenizer.chat([{"role": "user", "content": self.request}])
        if not tokenizer.has_chat_template:
            raise ConfigError(f"{self.id} is a conversation, and this model has no chat template")
        return tokenizer.chat(self.request)


def load(path: Path) -> list[Prompt]:
    """Read prompts, from a gzip file too where the name ends in ``.gz``; empty lines are skipped.

    A line is an object with ``prompt`` (text), ``messages`` (a conversation), ``turns`` (what the user says in turn; the first
    is asked) or ``text`` (continued as it stands), and may have ``id`` and ``task``. A line of HumanEval (``task_id`` and
    ``prompt``) is known by its ``task_id``, which becomes the id; its task is ``code``. Other keys are allowed and not used.
    Without an id a prompt is named by its line.

    Raises:
        ConfigError: lines that cannot be used, each with its number and the reason; or there is none that can.
    """
    lines = _lines(path)
    prompts: dict[str, Prompt] = {}
    bad = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                prompt = _read(line, number)
                if prompt.id in prompts:
                    raise ValueError(f"the id {prompt.id!r} is taken by an earlier line")
                prompts[prompt.id] = prompt
            except ValueError as error:
                bad.append(f"line {number}: {error}")
    if bad:
        more = f"; and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise ConfigError(f"{path}: {len(bad)} of {len(lines)} lines cannot be used: {'; '.join(bad[:_NAMED])}{more}")
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
    asked = [[prompt.id, prompt.task, prompt.request, *(["raw"] if prompt.raw else [])] for prompt in prompts]
    return hashlib.sha256(json.dumps(asked, ensure_ascii=False, sort_keys=True).encode()).hexdigest()


def _lines(path: Path) -> list[str]:
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{path} is not a whole gzip file: {error}") from error


def _read(line: str, number: int) -> Prompt:
    """The prompt of a line. Raises ValueError."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is expected, got {line.strip()[:40]!r}")
    kinds = [key for key in ("prompt", "messages", "turns", "text") if key in record]
    if len(kinds) != 1:
        raise ValueError(f"one of prompt, messages, turns and text is needed, got the keys {', '.join(record) or '(none)'}")
    if "task_id" in record:
        record = {"task": "code", **record, "id": record["task_id"]}
    name, task, request = record.get("id", f"line {number}"), record.get("task", UNNAMED), record[kinds[0]]
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    for key, value in (("id", name), ("task", task)):
        if not (isinstance(value, str) and value):
            raise ValueError(f"{key} must be text that is not empty, got {value!r}")
    if task == "all":
        raise ValueError('a task cannot be called "all", which stands for the total')
    if kinds[0] == "messages":
        return Prompt(name, task, _messages(request))
    if kinds[0] == "turns":
        request = request[0] if isinstance(request, list) and request else None
    if not isinstance(request, str) or not request.strip():
        raise ValueError(f"{kinds[0]} must be text that is not empty, got {request!r:.40}")
    return Prompt(name, task, request, raw=kinds[0] == "text")


def _messages(value: Any) -> tuple[Mapping[str, str], ...]:
    fine = isinstance(value, list) and value
    if not fine or not all(isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content")) for m in value):
        raise ValueError("messages must be a list of objects with the texts role and content")
    return tuple({"role": m["role"], "content": m["content"]} for m in value)
