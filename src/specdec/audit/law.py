"""The law of what verification rules emit, on rows of the audited model: exact by enumeration, and by draws.

In a small world that is cut out of the model (``world``) the joint law of the first tokens is known exactly. Every rule is
enumerated in it, with a drafter that is wrong on purpose, and then run with random numbers as an engine would run it. The
broken rules go through the same two tests and must be caught.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from specdec.audit.report import Check
from specdec.audit.requests import Request
from specdec.audit.runs import run
from specdec.audit.statistics import Fit, fit
from specdec.audit.workshop import Cell, Workshop
from specdec.audit.world import DEEP, PARAMS, WIDE, World, cut_world
from specdec.engine import Engine
from specdec.types import Siblings
from specdec.verify import RULES, Rule
from specdec.verify.broken import BROKEN, CAUGHT
from specdec.verify.enumeration import Judge, Sprout, distance, grow, siblings

FALSE_ALARM = 1e-4
"""Chance that a sound engine fails any of the tests of laws in a whole audit."""

DRAWS = 1000

ENGINE_DRAWS = 240
"""Answers through the whole engine."""

_AT_ONCE = 8
"""Of them in flight."""


class Dice:
    """Random numbers for a rule, from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def uniform(self) -> float:
        return float(self._random.random())

    def draw(self, p: Tensor) -> int:
        mass = p.numpy().cumsum()
        return int(np.searchsorted(mass, self._random.random() * mass[-1], side="right"))


def n_tests() -> int:
    """Tests by chance in a whole audit: one of each rule, two of the engine."""
    return sum(rule.keeps != "lossy" and rule.name != "greedy" for rule in RULES.values()) + 2


def alarm() -> float:
    """Of each of the two tests of draws, so that all of them together stay below ``FALSE_ALARM``.

    The half that is left covers that the law of chi-square is an approximation.
    """
    return FALSE_ALARM / (4 * n_tests())


def check_laws(workshop: Workshop, enough: Callable[[float], bool]) -> Iterator[Check]:
    """Every right rule, every broken one, and the engine as it is configured."""
    worlds = [cut_world(workshop.llm, request.prompt) for request in workshop.requests[:3:2]]
    waiting: list[tuple[str, Callable[[], Check]]] = [
        ("engine", lambda: _through_the_engine(workshop, worlds[0], enough)),
        *((rule.name, lambda rule=rule: _right(rule, worlds)) for rule in RULES.values()),
    ]
    yield from _until("law", waiting, enough)


def check_broken_rules(workshop: Workshop, enough: Callable[[float], bool]) -> Iterator[Check]:
    """The broken rules must be caught by what the right ones have passed."""
    worlds = [cut_world(workshop.llm, request.prompt) for request in workshop.requests[:3:2]]
    waiting = [(name, lambda broken=broken: _wrong(broken.rule, worlds)) for name, broken in BROKEN.items()]
    yield from _until("teeth", waiting, enough)


def _until(section: str, waiting: Many[tuple[str, Callable[[], Check]]], enough: Callable[[float], bool]) -> Iterator[Check]:
    for i, (_, check) in enumerate(waiting):
        if enough(0.0):
            names = ", ".join(name for name, _ in waiting[i:])
            yield Check(section, f"{len(waiting) - i} further rules", "left out", f"no time was left for {names}")
            return
        yield check()


def _right(rule: Rule, worlds: Many[World]) -> Check:
    started = time.perf_counter()
    name = f"rule {rule.name}"
    if rule.name == "greedy":
        exact = max(distance(rule.judge, _certain(world), world.q, siblings("sampled"), DEEP) for world in worlds)
        summary = f"takes the most likely token of rows of this model, draft or none: {exact:.1e} from it"
        return Check("law", name, "failed" if exact > CAUGHT else "passed", summary, time.perf_counter() - started)
    exact = max(_distances(rule.judge, rule.siblings, worlds))
    found = _drawn(rule.judge, siblings(*_kinds(rule.siblings)), worlds[0])
    details = {**_figures(found), "exact_tv": exact, "keeps": rule.keeps, "paper": rule.paper}
    if rule.keeps == "lossy":
        status, verb = "measured", "lossy, as it says: the law is off"
    else:
        sound = exact <= CAUGHT and found.fits(alarm())
        status, verb = ("passed", "keeps the law of rows of this model") if sound else ("failed", "does not keep the law")
    summary = f"{verb}: total variation {exact:.1e} by enumeration; {described(found)}"
    return Check("law", name, status, summary, time.perf_counter() - started, details)  # type: ignore[arg-type]


def _wrong(rule: Rule, worlds: Many[World]) -> Check:
    started = time.perf_counter()
    details = {"part": "rule", "story": rule.summary}
    exact = next((far for far in _distances(rule.judge, rule.siblings, worlds) if far > CAUGHT), 0.0)
    if not exact:
        summary = f"SURVIVED: a rule that {rule.summary} would pass this audit"
        return Check("teeth", f"rule {rule.name}", "failed", summary, time.perf_counter() - started, details)
    summary = f"caught: {exact:.1e} from the law of rows of this model, by enumeration"
    return Check("teeth", f"rule {rule.name}", "passed", summary, time.perf_counter() - started, {**details, "exact_tv": exact})


def _kinds(drawn: Siblings | None) -> tuple[str, ...]:
    """Children of a node that a rule can judge: as many kinds as it allows."""
    kinds = {"distinct": ("sampled", "sampled"), "repeated": ("again", "again")}
    return kinds.get(drawn or "", ("sampled",))


def _distances(judge: Judge, drawn: Siblings | None, worlds: Many[World]) -> Iterator[float]:
    """Total variations from the law in these worlds, exactly; cheap ones first."""
    kinds = _kinds(drawn)
    for world in worlds:
        for p, q in ((world.p, world.q), (world.holed, world.q), (world.p, world.astray)):
            yield distance(judge, p, q, siblings(*kinds), DEEP if len(kinds) == 1 else 1)
    if drawn == "distinct":  # some faults show only further down
        yield distance(judge, worlds[0].p, worlds[0].q, siblings("sampled", "top"), DEEP)


def _certain(world: World) -> Callable[[tuple[int, ...]], Tensor]:
    return lambda path: torch.eye(WIDE, dtype=torch.float64)[int(world.p(path).argmax())]


def _drawn(judge: Judge, sprout: Sprout, world: World) -> Fit:
    """The rule with random numbers, ``DRAWS`` times; short bursts go on as plain decoding would."""
    dice, counts = Dice(len(world.prompt)), Counter[tuple[int, ...]]()
    for _ in range(DRAWS):
        draft = grow(sprout, world.q, DEEP, dice)
        verdict = judge(draft, lambda node, path: world.p(path), dice)
        path = (*(draft.tree.tokens[node] for node in verdict.path), verdict.token)
        while len(path) < DEEP + 1:
            path = (*path, dice.draw(world.p(path)))
        counts[path[: DEEP + 1]] += 1
    return fit(counts, world.joint(), alarm())


def _through_the_engine(workshop: Workshop, world: World, enough: Callable[[float], bool]) -> Check:
    """Answers of the engine as it is configured, each with a seed of its own, against the same exact law.

    Args:
        enough: would the time for this be up in so many seconds?
    """
    started, rule = time.perf_counter(), workshop.rule
    if rule.name == "greedy":
        return Check("law", "whole engine", "left out", "greedy acceptance serves temperature 0 alone, so there is no law")
    drafter = workshop.drafters[-1]
    cell = Cell(drafter, workshop.llm.config.speculation.max_nodes, _AT_ONCE, "cached")
    if enough(seconds := _seconds(workshop, world, workshop.engine(cell))):
        return Check("law", "whole engine", "left out", f"no time was left: {ENGINE_DRAWS} answers take {seconds:.0f} s")
    engine = workshop.engine(cell)
    found, details = answered(workshop, world, engine)
    status = "passed" if found.fits(alarm()) and rule.keeps != "lossy" else "failed"
    lossy = "lossy by choice, and so not exact; " if rule.keeps == "lossy" else ""
    summary = f"{lossy}{ENGINE_DRAWS} answers with seeds of their own, {rule.name}, drafted by {drafter}: {described(found)}"
    return Check("law", "whole engine", status, summary, time.perf_counter() - started, details)  # type: ignore[arg-type]


def answered(workshop: Workshop, world: World, engine: Engine) -> tuple[Fit, dict[str, float | int]]:
    """What an engine answers to the prompt of a world, against the exact law; each answer has a seed of its own.

    Returns:
        The fit, and its figures beside how many tokens the engine drafted and accepted.
    """
    answers = run(engine, _requests(world, range(ENGINE_DRAWS)), workshop.llm.tokenizer)
    found = fit(Counter(world.ranks(answer.tokens) for answer in answers.values()), world.joint(), alarm())
    return found, {**_figures(found), "drafted": engine.stats.drafted, "accepted": engine.stats.accepted}


def _seconds(workshop: Workshop, world: World, engine: Engine) -> float:
    """About how long ``answered`` takes, from a few answers that find the prompt in the cache."""
    for first in (0, _AT_ONCE):
        started = time.perf_counter()
        run(engine, _requests(world, range(first, first + _AT_ONCE)), workshop.llm.tokenizer)
    return (time.perf_counter() - started) * ENGINE_DRAWS / _AT_ONCE


def _requests(world: World, seeds: range) -> list[Request]:
    return [Request("law", world.prompt, PARAMS, seed, frozenset()) for seed in seeds]


def described(found: Fit) -> str:
    never = f", {found.impossible} of them impossible" if found.impossible else ""
    return (
        f"{found.n} draws{never}: total variation {found.tv:.4f} (chance stays below {found.tv_bound:.4f}), "
        f"chi-square p = {found.p_value:.2g}"
    )


def _figures(found: Fit) -> dict[str, float | int]:
    return {
        "n": found.n,
        "cells": found.cells,
        "chi_square": found.chi_square,
        "p_value": found.p_value,
        "tv": found.tv,
        "tv_bound": found.tv_bound,
        "impossible": found.impossible,
        "alarm": alarm(),
    }
