"""How an engine has drafts judged: a rule, the law that a request asks for, and the randomness that belongs to it.

Requests at temperature 0, and passes without a draft, are plain decoding whatever the rule: the target chooses, and what
agrees stays. Where a rule decides by chance, the law comes out of ``sampling.warp`` as for any token, and the chance out of a
stream of the request's own seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

from torch import Tensor

from specdec.chance import Stream
from specdec.config import ConfigError, SamplingParams, SpeculationConfig
from specdec.draft.base import Drafter
from specdec.kernels.base import Draw, Kernels
from specdec.request import RequestError
from specdec.sampling import SamplingError, choose, draw_of, logprob, warp
from specdec.types import ROOT, Draft, Forward, Span, Step, TokenLogprob, Verdict
from specdec.verify import Rule, follow

_FITTING = {"one": ("one",), "distinct": ("one", "distinct"), "repeated": ("one", "repeated")}
"""For what a rule asks of sampled siblings, the ways to draw them that it can judge; a chain is a tree without siblings."""


class Acceptance:
    """Judges the drafts of an engine.

    Args:
        rule: how.
        drafters: whose.
        kernels: of the sampler.

    Raises:
        ConfigError: with these drafters the rule would not keep what it promises.
    """

    def __init__(self, rule: Rule, drafters: Many[Drafter], kernels: Kernels) -> None:
        if rule.keeps == "law":
            _check(rule, drafters)
        self.rule = rule
        self.by_chance = rule.keeps != "tokens"
        """Does what is drafted decide, above temperature 0, which tokens come out?"""
        default = rule.name == SpeculationConfig().acceptance
        self.facts: Mapping[str, Any] = {} if default else {"acceptance": rule.name, "lossy": rule.keeps == "lossy"}
        """What results say of a rule that is not the default: its name, and whether it changes the law of what comes out."""
        self._kernels = kernels

    def check(self, params: SamplingParams) -> None:
        """Raise RequestError where the rule cannot give what a request asks for."""
        if self.rule.name == "greedy" and not params.greedy:
            raise RequestError(
                f"this engine verifies greedily, and the request has temperature {params.temperature}: ask for temperature 0, "
                "or run the engine with another acceptance, such as coupled",
                field="temperature",
            )

    def _follows(self, span: Span) -> bool:
        """Do the tokens of a span come from the target's own choices alone?"""
        return not self.by_chance or span.sequence.params.greedy or not len(span.draft)

    def judge(self, step: Step, forward: Forward) -> list[Verdict | SamplingError | None]:
        """What a pass means to each of its sequences, prompt tokens that are to be scored included.

        Returns:
            In step order: the verdict on its draft, None where its prompt goes on, or an error that concerns it alone.
        """
        tokens = self._choose(step, forward)
        return [self._outcome(span, forward, i, tokens) for i, span in enumerate(step.spans)]

    def _outcome(self, span: Span, forward: Forward, index: int, tokens: Many[int]) -> Verdict | SamplingError | None:
        try:
            if span.sequence.params.prompt_logprobs is not None:
                _score_prompt(span, forward.logits[forward.prompt_rows[index]])
            return self.verdict(span, forward.logits, forward.rows[index].start, tokens) if span.complete else None
        except SamplingError as error:
            return error

    def _choose(self, step: Step, forward: Forward) -> list[int]:
        """[W] the tokens of those rows whose logits need no processing, in one call; -1 where that does not say."""
        draws: list[Draw] = []
        for span, rows in zip(step.spans, forward.rows, strict=True):
            sequence = span.sequence
            if rows.start == rows.stop or not self._follows(span):  # the prompt goes on, or chance decides
                continue
            draw = draw_of(rows.start, sequence.params, sequence.history, sequence.seed)
            if draw is not None:
                draws.append(draw)
                # Noise is too dear for nodes that may be refused, but a largest entry costs less than a call of its own.
                if sequence.params.greedy:
                    draws += [Draw(row, *draw[1:]) for row in range(rows.start + 1, rows.stop)]
        tokens = [-1] * forward.rows[-1].stop
        for draw, token in zip(draws, self._kernels.draw_rows(forward.logits, draws), strict=True):
            tokens[draw.row] = token
        return tokens

    def verdict(self, span: Span, logits: Tensor, first: int, tokens: Many[int]) -> Verdict:
        """What stays of a draft, and the token after it.

        Args:
            logits: [W, V] of the whole step.
            first: the row of the pending token; those of the nodes follow.
            tokens: of those rows whose logits need no processing, -1 elsewhere.

        Raises:
            SamplingError: no token can follow the pending one.
        """
        sequence, draft = span.sequence, span.draft
        params, history, ends = sequence.params, sequence.history, sequence.end_tokens
        if self._follows(span):

            def pick(node: int, path: Many[int]) -> int:
                row = first + node + 1
                if tokens[row] >= 0:
                    return tokens[row]
                return choose(logits[row], params, history, path, sequence.seed, ends, kernels=self._kernels)

            verdict = follow(draft.tree, pick)
        else:

            def law(node: int, path: Many[int]) -> Tensor:
                return warp(logits[first + node + 1], params, history, path, ends).exp()

            verdict = self.rule.judge(draft, law, Stream(sequence.seed, len(sequence.tokens), "judging"))
        return verdict if params.logprobs is None else _with_logprobs(verdict, draft, logits[first:], params.logprobs)


def _check(rule: Rule, drafters: Many[Drafter]) -> None:
    for drafter in drafters:
        if drafter.draws is None:
            continue
        remedy = "or use acceptance=coupled, which any draft leaves exact"
        if len(drafters) > 1:
            others = ", ".join(other.name for other in drafters if other is not drafter)
            raise ConfigError(
                f"acceptance={rule.name} has {drafter.name} draw its tokens at random, and drawn tokens cannot be merged with "
                f"those of {others}: siblings of a merged tree do not have the law that they were drawn from. "
                f"Let {drafter.name} draft alone (--speculation trained for a trained one) or leave it out, {remedy}"
            )
        if drafter.draws not in _FITTING[rule.siblings or "one"]:
            raise ConfigError(
                f"acceptance={rule.name} judges siblings that were drawn as {rule.siblings!r}, and {drafter.name} draws them "
                f"as {drafter.draws!r}, which cannot be undone once tokens are known: choose a rule for such drafts, {remedy}"
            )


def _score_prompt(span: Span, logits: Tensor) -> None:
    """Log-probabilities of prompt tokens, from the rows [n, V] before them."""
    sequence, k = span.sequence, span.sequence.params.prompt_logprobs
    assert k is not None
    sequence.prompt_logprobs += [
        logprob(row, sequence.tokens[position], k) for row, position in zip(logits, span.scored, strict=True)
    ]


def _with_logprobs(verdict: Verdict, draft: Draft, logits: Tensor, k: int) -> Verdict:
    """The same, each emitted token with its log-probability; cut short before a row that has none, unless that is the first."""
    rows = (ROOT, *verdict.path)
    tokens = (*(draft.tree.tokens[node] for node in verdict.path), verdict.token)
    found: list[TokenLogprob] = []
    for row, token in zip(rows, tokens, strict=True):
        try:
            found.append(logprob(logits[row + 1], token, k))
        except SamplingError:
            if not found:
                raise
            verdict = Verdict(verdict.path[: len(found) - 1], tokens[len(found) - 1])
            break
    return replace(verdict, logprobs=tuple(found))
