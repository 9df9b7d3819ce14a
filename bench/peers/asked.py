"""What engines are asked: the model, the prompts in tokens, and the options that choose them; the same for all comparisons."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import EngineKind, peers_folder
from export import export
from requantise import requantise

from specdec.bench.prompts import DEFAULT, Prompt, digest, load, select
from specdec.bench.provenance import provenance
from specdec.config import DEFAULT_MODEL, ConfigError
from specdec.models.load import end_tokens, load_tokenizer
from specdec.models.source import resolve
from specdec.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as every engine gets it."""

    id: str
    task: str
    text: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Questions:
    """A model and what it is asked."""

    model: str
    file: Path
    tokenizer: Tokenizer
    end_tokens: tuple[int, ...]
    prompts: list[Prompt]
    asked: list[Asked]

    def arguments(self, kind: EngineKind, threads: int) -> list[str]:
        """What every script of an engine is given; its form of the model is made where it is not there yet."""
        models = peers_folder() / "models"
        if not kind.reads_gguf:
            model = export(self.file, models / self.file.stem)
        elif kind.layout:
            model = requantise(self.file, kind.layout, models / f"{self.file.stem}-as-{kind.layout}.gguf")
        else:
            model = self.file
        return ["--model", str(model), "--threads", str(threads), "--end-tokens", *map(str, self.end_tokens)]

    def provenance(self, engines: dict[str, dict[str, str]], threads: int) -> dict[str, Any]:
        return provenance(engines=engines, threads=threads, model=self.model, prompts_sha256=digest(self.prompts))


def parser(description: str | None, max_tokens: int) -> argparse.ArgumentParser:
    """A parser with the options that all comparisons have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="an alias or a .gguf file")
    parser.add_argument("--prompts", type=Path, default=DEFAULT, help="JSONL with id, task and prompt")
    parser.add_argument("--tasks", nargs="+", default=[])
    parser.add_argument("--limit", type=int, help="at most so many prompts, taken from the tasks in turn")
    parser.add_argument("--max-tokens", type=int, default=max_tokens)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    return parser


def read(options: argparse.Namespace, context: int) -> Questions:
    """What the options choose.

    Args:
        context: tokens that a prompt and its answer may take together.

    Raises:
        ConfigError: the model is no GGUF file, or a prompt leaves no room for its answer.
        ModelError: the model cannot be read.
    """
    source = resolve(options.model, progress=True)
    if source.kind != "gguf":
        raise ConfigError(f"{options.model} is no GGUF model, which all engines can be given")
    prompts = select(load(options.prompts), options.tasks, options.limit)
    tokenizer = load_tokenizer(source)
    asked = [_in_tokens(prompt, tokenizer) for prompt in prompts]
    for prompt in asked:
        if len(prompt.token_ids) + options.max_tokens > context:
            n = len(prompt.token_ids)
            raise ConfigError(f"{prompt.id} has {n} tokens, which with {options.max_tokens} more exceeds {context}")
    return Questions(source.name, source.path, tokenizer, tuple(sorted(end_tokens(source))), prompts, asked)


def long_prompts(prompts: Sequence[Asked], tokenizer: Tokenizer, n_tokens: int, count: int) -> list[Asked]:
    """Prompts of exactly ``n_tokens``, each beginning with another of the given ones so that no two share a beginning."""
    long = []
    for i in range(count):
        start = i % len(prompts)
        turned = itertools.cycle([*prompts[start:], *prompts[:start]])
        ids = list(itertools.islice(itertools.chain.from_iterable(prompt.token_ids for prompt in turned), n_tokens))
        long.append(Asked(f"long-{i + 1}", "prompt processing", tokenizer.decode(ids, skip_special=False), ids))
    return long


def spread(prompts: Sequence[Asked]) -> list[Asked]:
    """One prompt of each task after the other, so that a few of them are of all kinds."""
    tasks: dict[str, list[Asked]] = {}
    for prompt in prompts:
        tasks.setdefault(prompt.task, []).append(prompt)
    return [prompt for turn in itertools.zip_longest(*tasks.values()) for prompt in turn if prompt]


def _in_tokens(prompt: Prompt, tokenizer: Tokenizer) -> Asked:
    ids = prompt.encode(tokenizer)
    return Asked(prompt.id, prompt.task, tokenizer.decode(ids, skip_special=False), ids)
