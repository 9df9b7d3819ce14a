"""Rules that decide by chance, in the whole engine: with drafts that are wrong on purpose, and in engines that are broken where
chance comes in.

Above temperature 0 such an engine gives other tokens than plain decoding, so nothing can be compared token by token: what it
emits is held to the exact law of a small world (``world``), and every broken engine must miss that law by the same test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from specdec import acceptance
from specdec.acceptance import Acceptance
from specdec.audit.fault import Fault, replaced
from specdec.audit.law import ENGINE_DRAWS, alarm, answered, described
from specdec.audit.report import Check
from specdec.audit.workshop import Cell, Workshop
from specdec.audit.world import DEEP, World, cut_world
from specdec.chance import Purpose, Stream
from specdec.config import SamplingParams
from specdec.draft.base import Drafter
from specdec.draft.drawing import Drawing
from specdec.engine import Engine
from specdec.history import History
from specdec.sampling import warp
from specdec.testing import full
from specdec.types import ROOT, Draft, Sequence, Siblings, Span, Verdict

BATCH = 8

LIKED = 0.1, 0.2, 0.7
"""What the drafter gives the target's likeliest tokens, from the first to the third: the wrong way round, and far from any law
that is nearly flat."""


class Errant(Drafter):
    """Draws the tokens of a world, best those that the target likes least (``LIKED``).

    Args:
        draws: how siblings are drawn; chains where as ``one``, else two below every node.
    """

    name = "errant"

    def __init__(self, world: World, draws: Siblings, vocab_size: int) -> None:
        self.draws = draws
        self._world, self._vocab_size = world, vocab_size

    def propose(self, sequences: Many[Sequence], budgets: Many[int]) -> list[Draft]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _draft(self, sequence: Sequence, budget: int) -> Draft:
        path = self._world.ranks(sequence.tokens[len(self._world.prompt) :])
        if -1 in path:
            return Draft()
        assert self.draws is not None
        shape = full(max(0, DEEP - len(path)), 1 if self.draws == "one" else 2, budget)
        drawing = Drawing(shape, self.draws, sequence, self._vocab_size)
        paths = {ROOT: path}  # ranks of the tokens down to a node
        leaves = [ROOT] if len(shape) else []
        while leaves:
            for node in leaves:
                if node != ROOT:
                    above = paths[drawing.parents[node]]
                    paths[node] = (*above, self._world.tokens[above].index(drawing.tokens[node]))
                drawing.draw(node, self._logits(paths[node]))
            leaves = drawing.next()
        return drawing.draft(self.name)

    def _logits(self, path: tuple[int, ...]) -> Tensor:
        logits = torch.full((self._vocab_size,), float("-inf"))
        logits[self._world.tokens[path]] = torch.tensor(LIKED).log()
        return logits


# Engines that are broken where chance comes in.


def _one_seed(seed: int, position: int, purpose: Purpose) -> Stream:
    return Stream(seed, position, purpose) if purpose == "drafting" else Stream(0, 0, purpose)


def _unfiltered(logits: Tensor, params: SamplingParams, history: History, path: Many[int], ends: Any = ()) -> Tensor:
    return warp(logits, params.replace(top_k=0, top_p=1.0, min_p=0.0), history, path, ends)


def _likeliest(logits: Tensor, params: SamplingParams, history: History, path: Many[int], ends: Any = ()) -> Tensor:
    return warp(logits, params.replace(top_k=1), history, path, ends)


_verdict = Acceptance.verdict


def _row_before(self: Acceptance, span: Span, logits: Tensor, first: int, tokens: Many[int]) -> Verdict:
    n = len(span.draft)
    behind = logits.clone()
    behind[first + 1 : first + 1 + n] = logits[first : first + n]
    return _verdict(self, span, behind, first, tokens)


def _believes(self: Acceptance, span: Span, logits: Tensor, first: int, tokens: Many[int]) -> Verdict:
    if span.sequence.params.greedy or not len(span.draft):
        return _verdict(self, span, logits, first, tokens)
    return Verdict((), span.draft.tree.tokens[0])


FAULTS: tuple[Fault, ...] = (
    Fault("one seed for all", "chance", "judges every draft by the same random numbers",
          replaced(acceptance, "Stream", _one_seed)),
    Fault("filters forgotten", "chance", "judges drafts by the law before top-k, top-p and min-p",
          replaced(acceptance, "warp", _unfiltered)),
    Fault("greedy where drafted", "chance", "judges drafts as if the target's likeliest token were the only one",
          replaced(acceptance, "warp", _likeliest)),
    Fault("law of the row before", "chance", "judges what follows a drafted token by the row before it",
          replaced(Acceptance, "verdict", _row_before)),
    Fault("draws believed", "chance", "emits the first drawn token unseen",
          replaced(Acceptance, "verdict", _believes)),
)  # fmt: skip


def check_chance(workshop: Workshop, enough: Callable[[float], bool]) -> Iterator[Check]:
    """The engine as it is, whose rule keeps the law by chance, then broken in every way."""
    world = cut_world(workshop.llm, workshop.requests[0].prompt)
    sound = _sound(workshop, world)
    yield sound
    for i, fault in enumerate(FAULTS):
        if sound.status != "passed" or enough(sound.seconds):
            why = "no time was left" if sound.status == "passed" else "the sound engine did not pass what they must fail"
            left = len(FAULTS) - i
            yield Check("teeth", f"{left} further faults of chance", "left out", why, details={"faults": left})
            return
        yield check_fault(workshop, fault, world)


def check_fault(workshop: Workshop, fault: Fault, world: World) -> Check:
    """Passed if the audit notices, failed if what the broken engine emits fits the law."""
    started = time.perf_counter()
    details: dict[str, Any] = {}

    def off() -> str:
        found, figures = answered(workshop, world, _engine(workshop, world))
        details.update(figures)
        return "" if found.fits(alarm()) else described(found)

    return fault.check(fault.caught(off), time.perf_counter() - started, details)


def _sound(workshop: Workshop, world: World) -> Check:
    started = time.perf_counter()
    found, details = answered(workshop, world, _engine(workshop, world))
    drafted, accepted = details["drafted"], details["accepted"]
    summary = (
        f"{ENGINE_DRAWS} answers with seeds of their own, {workshop.rule.name}, drafts wrong on purpose, "
        f"{accepted} of {drafted} drafted tokens accepted: {described(found)}"
    )
    status = "passed" if found.fits(alarm()) else "failed"
    if not 0 < accepted < drafted:
        status, summary = "not reached", f"{accepted} of {drafted} drafted tokens were accepted"
    return Check("law", "whole engine, wrong drafts", status, summary, time.perf_counter() - started, details)  # type: ignore[arg-type]


def _engine(workshop: Workshop, world: World) -> Engine:
    llm = workshop.llm
    draws = workshop.rule.siblings
    assert draws is not None, "a rule that keeps the law by chance says how siblings must be drawn"
    errant = Errant(world, draws, llm.engine.model.shape.vocab_size)
    return workshop.engine(Cell(errant.name, llm.config.speculation.max_nodes, BATCH, "cached"), errant)
