"""Where two runs part: the row of that position, computed again from nothing, and what it says of either token."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from specdec.audit.requests import Request
from specdec.audit.runs import Answer, Difference
from specdec.history import History
from specdec.kernels.base import gumbel
from specdec.llm import LLM
from specdec.runner.probe import Probe
from specdec.sampling import choose, warp

NEAR_TIE = 1e-3
"""Two candidates whose scores lie closer than this may change places by rounding alone."""


class Replay:
    """Computes single rows of the audited model again, one whole text in one pass.

    Args:
        n_slots: longest text.
    """

    def __init__(self, llm: LLM, n_slots: int) -> None:
        self._llm = llm
        self._probe = Probe(llm.engine.model, llm.kernels, n_slots)

    def row(self, tokens: list[int]) -> Tensor:
        """[V] logits after these tokens."""
        return self._probe.read(list(tokens), self._llm.config.prefill_rows)

    def history(self, request: Request, tokens: list[int]) -> History:
        return History.of(tokens, len(request.prompt))

    def ends(self, request: Request) -> frozenset[int]:
        """Tokens that end the request."""
        own = frozenset() if request.params.ignore_eos else request.end_tokens
        vocab_size = self._llm.engine.model.shape.vocab_size
        return frozenset(t for t in own if t < vocab_size) | frozenset(request.params.stop_token_ids)

    def explain(self, difference: Difference, plain: Answer) -> dict[str, Any]:
        """Everything that is known of a difference, as JSON has it."""
        request = difference.request
        told: dict[str, Any] = {
            "request": request.label,
            "seed": request.seed,
            "params": _given(request),
            "what": difference.what,
            "output_token": difference.index,
            "position": len(request.prompt) + difference.index,
            "plain": _plainly(difference.plain),
            "other": _plainly(difference.other),
            "source": difference.source,
            "place_in_pass": difference.place,
            "kernels": self._llm.kernels.name,
            "precision": self._llm.precision,
        }
        where = f"{request.label!r}, output token {difference.index}"
        path = f"from the target, token {difference.place} of its pass"
        if difference.source is not None:
            path = f"drafted by {difference.source}, token {difference.place} of its pass"
        if difference.what != "token":
            values = f"{_short(difference.plain)} without speculation, {_short(difference.other)} with"
            return {**told, "summary": f"{where}: {difference.what} {values} ({path})"}
        told |= self._at(request, difference, plain)
        return {
            **told,
            "summary": (
                f"{where}: {told['plain_text']!r} without speculation, {told['other_text']!r} with "
                f"({path}, {told['kernels']}); their scores differ by {told['gap']:.2e}: {told['kind']}; "
                f"recomputing gives {told['recomputed_side']}"
            ),
        }

    def _at(self, request: Request, difference: Difference, plain: Answer) -> dict[str, Any]:
        tokens = [*request.prompt, *plain.tokens[: difference.index]]
        logits, history, ends = self.row(tokens), self.history(request, tokens), self.ends(request)
        params = request.params
        if params.greedy:  # then filters have no say, and scores are the processed logits
            params = params.replace(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        law = warp(logits, params, history, (), ends)
        again = choose(logits, request.params, history, (), request.seed, ends, kernels=self._llm.kernels)
        score = law if request.params.greedy else law + gumbel(request.seed, len(tokens), torch.arange(len(law)))
        a, b = float(score[difference.plain]), float(score[difference.other])
        first, second = score.topk(2).values.tolist()
        gap = abs(a - b) if min(a, b) > float("-inf") else 1e9
        side = {difference.plain: "the plain token", difference.other: "the speculative token"}.get(again, "a third token")
        decode = self._llm.tokenizer.decode
        return {
            "plain_text": decode([difference.plain], skip_special=False),
            "other_text": decode([difference.other], skip_special=False),
            "gap": gap,
            "top2_gap": min(first - second, 1e9),
            "recomputed": again,
            "recomputed_side": side,
            "kind": "a near tie, as rounding can turn" if gap < NEAR_TIE else "no tie, so a fault and not rounding",
        }


def _given(request: Request) -> dict[str, Any]:
    """The parameters that are not at their default."""
    params, plain = request.params, type(request.params)()
    names = [field.name for field in dataclasses.fields(params)]
    given = {name: getattr(params, name) for name in names if getattr(params, name) != getattr(plain, name)}
    return {name: _plainly(value) for name, value in given.items()}


def _plainly(value: Any) -> Any:
    """A value that JSON can hold."""
    if isinstance(value, dict):
        return {str(key): inner for key, inner in value.items()}
    return value if isinstance(value, int | float | str | list | None) else str(value)


def _short(value: Any) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
