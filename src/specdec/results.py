"""What a request gives back: chunks while it runs, a result when it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.types import FinishReason, TokenLogprob


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
    """``stop`` (an end token, a stop string or stop token), ``length`` (``max_tokens`` or the context), or ``error``."""
    prompt_tokens: int
    """How many tokens the prompt has."""
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
    """From the start of the request to its first token."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of each of ``tokens``, natural logarithms under the model's own distribution, if asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """Of the second prompt token onwards, if asked for: nothing precedes the first."""
    error: str | None = None
    """Why the sequence failed, where ``finish_reason`` is ``error``."""

    @property
    def usage(self) -> dict[str, int]:
        """Tokens as OpenAI's API counts them: ``prompt_tokens``, ``completion_tokens`` and ``total_tokens``."""
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
    """What the pass emitted, as in ``Result.tokens``."""
    sources: tuple[str | None, ...]
    """Of each of these tokens, as in ``Result.sources``."""
    choice: int
    """Which of the ``n`` answers this belongs to."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of each of these tokens, if asked for."""
    result: Result | None = None
    """The whole answer, with its last chunk."""

    @property
    def text(self) -> str:
        """The pieces, joined; all chunks of an answer together are its text."""
        return "".join(text for text, _ in self.pieces)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the answer, with its last chunk; None before."""
        return self.result.finish_reason if self.result else None
