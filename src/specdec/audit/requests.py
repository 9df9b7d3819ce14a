"""The requests of an audit: every sampling parameter, greedy and sampled, on prompts that the cache finds hard.

Parameters that name tokens (biases, bans, stops) name those that the model really emits, as a first greedy run showed: a stop
that never comes tests nothing. Every request has a seed of its own, by which it is known.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

from specdec.bench import prompts as texts
from specdec.config import BLOCK_SIZE, ConfigError, SamplingParams
from specdec.llm import LLM
from specdec.models.errors import TextError

MOST_PROMPT = 45
"""Longest prompt of the audit, in tokens."""

STOP_AT = 9
"""Stops are taken from the scouted answer about here, so that they fall into the middle of bursts."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request to the engine."""

    label: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    end_tokens: frozenset[int]


@dataclass(frozen=True, slots=True)
class Scouted:
    """What greedy decoding of a prompt gave, from which parameters are made."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


def make_prompts(llm: LLM, max_tokens: int) -> list[tuple[int, ...]]:
    """Prompts that leave room for an answer: texts, repetitions, block borders, and two that share a block and no prefix.

    Raises:
        ConfigError: the context has no room for prompts beside such answers.
    """
    vocab_size = llm.engine.model.shape.vocab_size
    most = min(MOST_PROMPT, llm.engine.max_len - max_tokens)
    if most < 2:
        raise ConfigError(f"a context of {llm.engine.max_len} tokens has no room for answers of {max_tokens}")
    usable = [token for token in range(min(vocab_size, 4096)) if token not in llm.end_tokens]
    noise = tuple(usable[(7919 * (i + 1)) % len(usable)] for i in range(4 * BLOCK_SIZE))
    # The same second block behind two first ones: who looks blocks up by their own tokens alone takes the wrong one.
    shared = noise[BLOCK_SIZE : 2 * BLOCK_SIZE] + noise[3:6]
    made = [noise[:BLOCK_SIZE] + shared, noise[2 * BLOCK_SIZE : 3 * BLOCK_SIZE] + shared]
    made += itertools.islice(_texts(llm, vocab_size), 4)
    made += [noise[:n] for n in (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1)]
    made.append((made[2][-6:] * 8)[:40])
    return [prompt[:most] for prompt in made]


def _texts(llm: LLM, vocab_size: int) -> Iterator[tuple[int, ...]]:
    """Prompts that ship, one of each task, as far as the model's vocabulary can write them."""
    seen: set[str] = set()
    for prompt in texts.load(texts.DEFAULT):
        if prompt.task in seen or not isinstance(prompt.request, str):
            continue
        seen.add(prompt.task)
        try:
            ids = llm.tokenizer.encode(prompt.request, add_special=True)
        except TextError:
            continue
        if ids and max(ids) < vocab_size:
            yield tuple(ids)


def make_requests(scouted: Many[Scouted], llm: LLM, max_tokens: int, n: int, *, greedy: bool = False) -> list[Request]:
    """The first ``n`` parameter sets, or all, on the prompts in turn; every kind of fault shows in the first few.

    Args:
        greedy: leave out those that sample.
    """
    made: list[Request] = []
    for i, (label, values) in enumerate(itertools.islice(_parameter_sets(llm), n)):
        on = scouted[len(made) % len(scouted)]
        # An answer that ends at once tells nothing; ends are met where a request asks for them.
        params = SamplingParams(**{"max_tokens": max_tokens - 3 * (i % 3), "ignore_eos": True, **values(on)})
        if params.greedy or not greedy:
            made.append(Request(label, on.prompt, params, 1000 + i, llm.end_tokens))
    return made


def _parameter_sets(llm: LLM) -> Iterator[tuple[str, Callable[[Scouted], dict[str, Any]]]]:
    """Labels, and functions from what was scouted of the prompt to sampling parameters."""
    vocab_size = llm.engine.model.shape.vocab_size

    def common(s: Scouted) -> int:
        return Counter(s.tokens).most_common(1)[0][0]

    def stop(s: Scouted) -> int:
        return s.tokens[min(STOP_AT, len(s.tokens) - 1)]

    def text(s: Scouted) -> str:
        written = llm.tokenizer.decode(list(s.tokens[STOP_AT : STOP_AT + 2]), skip_special=True).strip()
        return written if written and "�" not in written else "\n\n"

    def bans(s: Scouted) -> tuple[tuple[int, ...], ...]:
        return ((s.tokens[0],), tuple(s.tokens[1:3])) if len(s.tokens) > 2 else ((s.tokens[0],),)

    def favoured(s: Scouted) -> dict[int, float]:
        """A few tokens far above all others, so that they repeat within a burst. At a high temperature the model hardly tells
        them apart, and their counts decide."""
        return dict.fromkeys(list(dict.fromkeys(s.tokens))[:5], 100.0)

    few = min(20, vocab_size)
    yield "greedy", lambda s: {"temperature": 0, "logprobs": 2}
    yield "temperature 1", lambda s: {"temperature": 1, "logprobs": 2}
    yield "greedy, stop string", lambda s: {"temperature": 0, "stop": (text(s),), "logprobs": 1}
    yield "frequency and presence penalty", lambda s: {
        "temperature": 2, "frequency_penalty": 2, "presence_penalty": 1, "logit_bias": favoured(s), "logprobs": 2,
    }  # fmt: skip
    yield "greedy, repetition penalty", lambda s: {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2}
    yield "top-p", lambda s: {"temperature": 1, "top_p": 0.9, "logprobs": 2}
    yield "stop token, min_tokens", lambda s: {
        "temperature": 0.5, "stop_token_ids": (stop(s), common(s)), "min_tokens": 6, "logprobs": 2,
    }  # fmt: skip
    yield "min-p", lambda s: {"temperature": 1.3, "min_p": 0.05, "logprobs": 2}
    yield "greedy, logit bias", lambda s: {"temperature": 0, "logit_bias": {common(s): -3.0, stop(s): 1.5}, "logprobs": 2}
    yield "bad words, negative frequency penalty", lambda s: {
        "temperature": 0.7, "bad_words_ids": bans(s), "frequency_penalty": -0.8, "top_k": few,
    }  # fmt: skip
    yield "greedy, up to its own end", lambda s: {"temperature": 0, "ignore_eos": False, "logprobs": 2}
    yield "everything", lambda s: {
        "temperature": 0.9, "top_k": few, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1, "presence_penalty": 0.3,
        "frequency_penalty": 0.2, "logit_bias": {common(s): 1.0}, "min_tokens": 4, "stop_token_ids": (stop(s),), "logprobs": 1,
    }  # fmt: skip
    yield "prompt log-probabilities", lambda s: {"temperature": 0, "prompt_logprobs": 1, "logprobs": 2}
    yield "temperature 0.6", lambda s: {"temperature": 0.6}
