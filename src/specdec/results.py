"""What a request gives back: chunks while it runs, a result when it has ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from specdec.text import TextStream
from specdec.types import Delta, FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Result:
    """One finished answer."""

    text: str
    """Ends before a stop string and before an end token."""
    tokens: tuple[int, ...]
    """Everything emitted, the token that completed a stop and an end token included."""
    sources: tuple[str | None, ...]
    """For each token the drafter whose node it was, or None where the target itself chose it."""
    finish_reason: FinishReason
    prompt_tokens: int
    seed: int
    """Gives the same tokens again."""
    prompt_index: int
    """Which of the prompts this answers."""
    choice: int
    """Which of the ``n`` answers this is."""
    stats: dict[str, Any]
    """Counters of this sequence: target_passes, tokens_per_pass, accepted_by_drafter, seconds and more."""
    seconds: float
    """From the start of the request to its last token."""
    first_token_seconds: float
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """Of the second prompt token onwards, if asked for: nothing precedes the first."""
    error: str | None = None
    """Why the sequence failed, where ``finish_reason`` is ``error``."""

    @property
    def usage(self) -> dict[str, int]:
        completion = len(self.tokens)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
        }


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one pass added to an answer. Text can lag behind tokens, since half characters and possible stops wait."""

    pieces: tuple[tuple[str, str | None], ...]
    """Text, each piece with the source of the token that released it."""
    tokens: tuple[int, ...]
    sources: tuple[str | None, ...]
    choice: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    result: Result | None = None
    """The whole answer, with its last chunk."""

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.result.finish_reason if self.result else None


@dataclass(slots=True)
class Run:
    """A sequence in the engine and what it has given so far."""

    sequence_id: int
    prompt_index: int
    choice: int
    seed: int
    prompt_tokens: int
    text: TextStream
    tokens: list[int] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    first_token_seconds: float | None = None
    chunks: list[Chunk] = field(default_factory=list)
    """What has not been fetched yet."""
    result: Result | None = None

    def take(self, delta: Delta) -> None:
        """Turn a delta into a chunk, and the last one into a result too."""
        seconds = time.perf_counter() - self.started
        if self.first_token_seconds is None:
            self.first_token_seconds = seconds
        self.tokens += delta.tokens
        self.sources += delta.sources
        self.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        ready = self.text.take()
        if delta.finish_reason is not None:
            ready += self.text.finish()
            self.result = self._finish(delta, delta.finish_reason, seconds)
        pieces = tuple((text, self.sources[index]) for index, text in ready)
        self.chunks.append(Chunk(pieces, delta.tokens, delta.sources, self.choice, delta.logprobs, self.result))

    def _finish(self, delta: Delta, reason: FinishReason, seconds: float) -> Result:
        return Result(
            text=self.text.text,
            tokens=tuple(self.tokens),
            sources=tuple(self.sources),
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            seed=self.seed,
            prompt_index=self.prompt_index,
            choice=self.choice,
            stats=delta.stats.as_dict() if delta.stats else {},
            seconds=seconds,
            first_token_seconds=self.first_token_seconds or seconds,
            logprobs=tuple(self.logprobs) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
            error=delta.error,
        )
