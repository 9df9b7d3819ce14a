"""Which drafters observe which sequences of a pass: seeing takes time too, and is of no use where a drafter is not asked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many

import torch

from specdec.draft.base import Drafter
from specdec.draft.gates import GLANCES, Gates
from specdec.types import Forward, Step, Verdict


class Observers:
    """Shows passes to drafters.

    Args:
        gates: know which drafters pay for which sequences.
        clock: gives seconds.
        whole: drafters that hold rows observe all of them, whether that pays or not.
    """

    def __init__(self, drafters: Many[Drafter], gates: Gates, clock: Callable[[], float], *, whole: bool) -> None:
        self._drafters, self._gates, self._clock, self._whole = drafters, gates, clock, whole
        self._since_glance, self._turn = 0, 0
        self._glance_every = GLANCES

    def observe(
        self,
        step: Step,
        forward: Forward,
        verdicts: Many[Verdict | None],
        asked: Mapping[str, list[int]],
        seconds: float,
    ) -> None:
        """Let the drafters learn from a pass.

        Args:
            asked: drafter -> the spans for which it was asked.
            seconds: of the pass without drafts.
        """
        self._since_glance += 1
        glance = self._since_glance >= self._glance_every
        for drafter in self._drafters:
            if drafter.thrifty:
                self._let_watch(drafter, step, forward, verdicts, asked.get(drafter.name, []), glance)
            elif drafter.holds and not self._whole:
                self._let_hold(drafter, step, forward, verdicts)
            else:
                drafter.observe(step, forward, verdicts)
        if glance:
            self._gates.passed(self._since_glance * seconds)
            self._glance_every = self._gates.glances(seconds, len(verdicts))
            self._since_glance = 0
            self._turn += GLANCES

    def _let_hold(self, drafter: Drafter, step: Step, forward: Forward, verdicts: Many[Verdict | None]) -> None:
        """Have a drafter that holds rows observe those of the sequences for which it may be asked; it forgets the others."""
        spans = [i for i, span in enumerate(step.spans) if self._gates.follows(span.sequence.id, drafter.name)]
        if len(spans) == len(step.spans):
            drafter.observe(step, forward, verdicts)
            return
        for i in set(range(len(step.spans))).difference(spans):
            drafter.release(step.spans[i].sequence)
        if spans:
            starts = list(itertools.accumulate([span.n_rows for span in step.spans], initial=0))
            rows = [row for i in spans for row in range(starts[i], starts[i + 1])]
            index = torch.tensor(rows, device=forward.logits.device)
            taps = {tap: forward.taps[tap].index_select(0, index) for tap in drafter.taps}
            drafter.observe(*_part(step, Forward(forward.logits, forward.rows, taps=taps), verdicts, spans))

    def _let_watch(
        self, drafter: Drafter, step: Step, forward: Forward, verdicts: Many[Verdict | None], asked: list[int], glance: bool
    ) -> None:
        """Have a thrifty drafter observe the spans for which it was asked, and now and then some of the others."""
        spans = asked
        if glance:
            others = [i for i, verdict in enumerate(verdicts) if verdict is not None and i not in asked]
            start = self._turn % max(1, len(others))  # in turn, where there are more than that
            spans = sorted([*asked, *(others[start:] + others[:start])[:GLANCES]])
        if not spans:
            return
        started = self._clock()
        drafter.observe(*_part(step, Forward(forward.logits, forward.rows), verdicts, spans))
        self._gates.watched(drafter.name, (self._clock() - started) / len(spans))


def _part(
    step: Step, forward: Forward, verdicts: Many[Verdict | None], spans: Many[int]
) -> tuple[Step, Forward, list[Verdict | None]]:
    """Some spans of a pass; the forward's taps are those of their rows."""
    rows = tuple([forward.rows[i] for i in spans])
    part = Forward(forward.logits, rows, taps=forward.taps)
    return Step(tuple([step.spans[i] for i in spans])), part, [verdicts[i] for i in spans]
