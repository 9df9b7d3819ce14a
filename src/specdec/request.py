"""What a request may ask of the engine, checked before anything is taken for it."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass

from specdec.config import SamplingParams
from specdec.types import Speculation


class RequestError(ValueError):
    """A request that cannot be served; it was refused before anything was taken for it.

    Args:
        message: what is wrong and what to do.
        field: what of the request is at fault, where that is one thing: ``prompt``, ``speculation``, or a sampling parameter.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Limits:
    """What every request of an engine has to fit."""

    vocab_size: int
    max_len: int
    """Longest prompt and output together."""
    drafters: tuple[str, ...]
    """Names of the engine's drafters."""
    predicting: frozenset[str]
    """Those among them that look up predicted text."""

    def check(self, prompt: Many[int], params: SamplingParams, stops: bool, speculation: Speculation) -> None:
        """Raise RequestError unless the request can be served as it stands; ``stops``: there is a stopper."""
        if not prompt:
            raise RequestError("the prompt is empty: at least one token is needed", field="prompt")
        self._check_tokens("prompt", prompt)
        if len(prompt) >= self.max_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, which leaves no room in the context of {self.max_len}", field="prompt"
            )
        if (params.stop and not stops) or params.bad_words:
            raise RequestError("stop strings need a stopper, and bad words must be given as token ids")
        try:
            params.check_vocabulary(self.vocab_size)
        except ValueError as error:
            raise RequestError(str(error), field=str(error).split()[0]) from error
        self._check_speculation(speculation)

    def _check_tokens(self, what: str, tokens: Many[int]) -> None:
        if bad := [token for token in tokens if not 0 <= token < self.vocab_size]:
            raise RequestError(f"{what} token {bad[0]} is outside the vocabulary of {self.vocab_size} tokens", field=what)

    def _check_speculation(self, speculation: Speculation) -> None:
        known = f"this engine has {_listed(self.drafters)}"
        wanted: Collection[str] = self.drafters if speculation.drafters is None else speculation.drafters
        for name in wanted:
            if name not in self.drafters:
                raise RequestError(f"unknown drafter {name!r}: {known}", field="speculation")
        limit = speculation.max_tokens
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise RequestError(f"most drafted tokens per pass must be an integer >= 0, got {limit!r}", field="speculation")
        if speculation.prediction and self.predicting.isdisjoint(wanted):
            lookup = _listed(sorted(self.predicting)) if self.predicting else "the suffix drafter"
            raise RequestError(
                f"predicted text is looked up by {lookup}, "
                f"which this request does not use: {known}, and the request asks for {_listed(sorted(wanted))}",
                field="prediction",
            )
        self._check_tokens("prediction", speculation.prediction)


def _listed(names: Many[str]) -> str:
    return ", ".join(names) if names else "no drafter"
