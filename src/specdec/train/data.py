"""The target's own answers to prompts: a drafter learns to foresee what the target says, not what is right."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path

from specdec.bench.prompts import Prompt
from specdec.config import ConfigError, SamplingParams
from specdec.llm import LLM
from specdec.sampling import derive_seed

TEMPERATURES = (0.0, 0.0, 1.0, 0.0, 0.7)
"""Answer i is sampled at the (i mod 5)th of these."""
_TOGETHER = 64
"""Prompts that are answered before anything is written."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and what the target answered, as token ids."""

    index: int
    """Of the prompt."""
    task: str
    temperature: float
    n_prompt: int
    tokens: tuple[int, ...]

    @property
    def seed(self) -> int:
        """Of the sequence: a prompt's own number is the seed of its request."""
        return derive_seed(self.index, 0)


def read_answers(path: Path, vocab_size: int) -> list[Answer]:
    """Read answers; a last line that was cut short is left out, and one that says nothing to learn from.

    Raises:
        ConfigError: a line that is no answer of this model.
    """
    answers = []
    for number, line in enumerate(_whole_lines(path), start=1):
        try:
            record = json.loads(line)
            answer = Answer(
                int(record["index"]),
                str(record.get("task", "other")),
                float(record["temperature"]),
                int(record["n_prompt"]),
                tuple(int(token) for token in record["tokens"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number}: not an answer ({error!r}); delete the file to make answers anew"
            ) from error
        if not 1 <= answer.n_prompt <= len(answer.tokens) or not all(0 <= t < vocab_size for t in answer.tokens):
            raise ConfigError(
                f"{path}, line {number}: tokens do not fit this model's vocabulary of {vocab_size}, or n_prompt is wrong"
            )
        answers.append(answer)
    return answers


def make_answers(
    llm: LLM,
    prompts: Many[Prompt],
    path: Path,
    max_tokens: int,
    made: Callable[[int, int], None],
    temperatures: Many[float] = TEMPERATURES,
) -> None:
    """Have the target answer the prompts, going on where a file of answers ends.

    Prompts are answered in order, some at a time, each with its own number as the seed: the file is the same however often
    the work was interrupted. A prompt that the engine refuses (too long) is left out.

    Args:
        path: of the file of answers, which is appended to.
        made: called with the prompts answered so far and their tokens.

    Raises:
        ConfigError: the file holds answers to other prompts, or none can be answered.
    """
    done = _take_up(path, llm, prompts)
    longest = llm.engine.max_len - 1
    n_tokens = 0
    with path.open("a", encoding="utf-8") as file:
        for start in range(done, len(prompts), _TOGETHER):
            part = range(start, min(start + _TOGETHER, len(prompts)))
            ids = {i: tokens for i in part if len(tokens := prompts[i].encode(llm.tokenizer)) < longest}
            params = [
                SamplingParams(temperature=temperatures[i % len(temperatures)], max_tokens=max_tokens, seed=i) for i in ids
            ]
            results = llm.generate(list(ids.values()), params) if ids else []
            for i, p, result in zip(ids, params, results, strict=True):
                record = {
                    "index": i,
                    "task": prompts[i].task,
                    "temperature": p.temperature,
                    "n_prompt": len(ids[i]),
                    "tokens": [*ids[i], *result.tokens],
                }
                file.write(json.dumps(record) + "\n")
                n_tokens += len(result.tokens)
            file.flush()
            os.fsync(file.fileno())
            made(part.stop, n_tokens)


def held_out(answer: Answer, share: float) -> bool:
    """Is this prompt kept for evaluation? Decided by its tokens alone, so that copies of a prompt go the same way."""
    digest = hashlib.sha256(json.dumps(answer.tokens[: answer.n_prompt]).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _take_up(path: Path, llm: LLM, prompts: Many[Prompt]) -> int:
    """How many prompts are answered; a line that was cut short is removed from the file."""
    if not path.exists():
        path.touch()
        return 0
    lines = _whole_lines(path)
    size = sum(len(line.encode()) + 1 for line in lines)
    if size < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(size)
    answers = read_answers(path, llm.engine.model.shape.vocab_size)
    if not answers:
        return 0
    last = answers[-1]
    if last.index >= len(prompts) or list(last.tokens[: last.n_prompt]) != prompts[last.index].encode(llm.tokenizer):
        raise ConfigError(f"{path} holds answers to other prompts, or of another model: choose another folder, or delete it")
    return last.index + 1


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file that are complete."""
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
