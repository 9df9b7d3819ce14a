"""Requests through an engine, compared token by token with what plain decoding gave."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

from specdec.audit.requests import Request
from specdec.encoding import TextTokenizer
from specdec.engine import Engine
from specdec.text import TextStream
from specdec.types import Delta, FinishReason, TokenLogprob

PASSES_PER_TOKEN = 40
"""An engine that takes more passes than this for each token it may emit has lost its way."""

BEFORE_ABORT = 3
"""Tokens after which a request that is to be given up is given up."""


class Stuck(AssertionError):
    """Requests that do not end, or leave something behind."""


@dataclass(slots=True)
class Answer:
    """All that speculation must not change, and where each token came from."""

    tokens: list[int] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """For each token, which of its pass it was, from 1."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    text: str = ""

    def add(self, delta: Delta, text: TextStream) -> None:
        self.tokens += delta.tokens
        self.sources += delta.sources
        self.places += range(1, len(delta.tokens) + 1)
        self.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        text.take()
        if delta.finish_reason is not None:
            text.finish()
            self.text, self.finish_reason, self.error = text.text, delta.finish_reason, delta.error


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer first leaves that of plain decoding."""

    request: Request
    what: str
    """``token``, ``log-probability``, or what else of the answer."""
    index: int
    """Of the output token; the number of output tokens for what concerns the whole answer."""
    plain: Any
    other: Any
    source: str | None = None
    """The drafter of the token, None where the target chose it."""
    place: int = 1
    """Which token of its pass it was, from 1."""


class Differs(Exception):
    """A run was broken off where an answer left that of plain decoding."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(f"another {difference.what} at output token {difference.index} of {difference.request.label!r}")
        self.difference = difference


def run(
    engine: Engine,
    requests: Many[Request],
    tokenizer: TextTokenizer,
    *,
    every: int = 0,
    preempt_every: int = 0,
    abort: Collection[int] = (),
    expected: Mapping[int, Answer] | None = None,
) -> dict[int, Answer]:
    """Serve requests together until all have ended.

    Args:
        every: add the next request after so many passes; 0 adds all at once.
        preempt_every: preempt a sequence after so many passes; 0 never does.
        abort: seeds of requests that are given up after a few passes; they have no answer.
        expected: by seed; the run is broken off at the first difference.

    Returns:
        Answers by seed.

    Raises:
        Differs: an answer is not the expected one.
        Stuck: they do not end, or blocks are held afterwards.
    """
    waiting = list(requests)
    running: dict[int, tuple[Request, Answer, TextStream]] = {}
    answers: dict[int, Answer] = {}
    patience = 100 + PASSES_PER_TOKEN * sum(request.params.max_tokens or 0 for request in requests)
    for step in range(patience):
        while waiting and (not every or step % every == 0 or not engine.has_work):
            request = waiting.pop(0)
            text = TextStream(tokenizer, request.params.stop, request.params.min_tokens, request.prompt)
            given = engine.add(request.prompt, request.params, request.end_tokens, request.seed, text)
            running[given] = request, Answer(), text
            if request.seed not in abort:
                answers[request.seed] = running[given][1]
            if every:
                break
        for delta in engine.step():
            request, answer, text = running[delta.sequence_id]
            answer.add(delta, text)
            if expected and request.seed in expected:
                difference = first_difference(request, expected[request.seed], answer, so_far=True)
                if difference:
                    raise Differs(difference)
        for given, (request, answer, _) in list(running.items()):
            if request.seed in abort and len(answer.tokens) >= BEFORE_ABORT:
                engine.abort(given)
                del running[given]
        if preempt_every and step % preempt_every == preempt_every - 1:
            engine.preempt()
        if not waiting and not engine.has_work:
            engine.check()
            if engine.allocator.n_used:
                raise Stuck(f"{engine.allocator.n_used} blocks are still held when all requests have ended")
            return answers
    raise Stuck(f"requests did not end within {patience} passes")


def first_difference(request: Request, plain: Answer, other: Answer, *, so_far: bool = False) -> Difference | None:
    """Where an answer first leaves that of plain decoding; None where they are the same.

    Args:
        so_far: the answer has not ended: only what there is of it is compared.
    """
    for i, (a, b) in enumerate(zip(plain.tokens, other.tokens, strict=False)):
        if a != b:
            return Difference(request, "token", i, a, b, other.sources[i], other.places[i])
    for i, (ours, theirs) in enumerate(zip(plain.logprobs, other.logprobs, strict=False)):
        if ours != theirs:
            values = ours.logprob, theirs.logprob
            return Difference(request, "log-probability", i, *values, other.sources[i], other.places[i])
    n = min(len(plain.tokens), len(other.tokens))
    if len(other.tokens) > len(plain.tokens):
        return Difference(request, "length", n, len(plain.tokens), len(other.tokens), other.sources[n], other.places[n])
    if so_far and other.finish_reason is None:
        return None
    for what in ("error", "finish_reason", "text", "prompt_logprobs"):
        if getattr(plain, what) != getattr(other, what):
            return Difference(request, what.replace("_", " "), n, getattr(plain, what), getattr(other, what))
    if len(plain.tokens) != len(other.tokens):
        return Difference(request, "length", n, len(plain.tokens), len(other.tokens))
    return None
