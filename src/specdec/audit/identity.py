"""Speculation off and on give the same answers: over drafters, widths, batches, states of the cache and parameters.

The grid is too large to run whole in a minute or two, so its cells are taken in an order in which each adds as many pairs of
factors that have not met yet as it can: faults mostly show where two things meet. The cells that broken engines are caught by
come first.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

from specdec.audit.divergence import Replay
from specdec.audit.report import Check
from specdec.audit.requests import Request
from specdec.audit.runs import Answer, Difference, first_difference
from specdec.audit.workshop import STATES, SYNTHETIC, Cell, Workshop
from specdec.sampling import choose

TOLD = 3
"""Differences of a cell that are told in full."""

RECOMPUTED = 10
"""Tokens of the plain answers that are recomputed from nothing."""


@dataclass(slots=True)
class Counted:
    """What the requests of a cell went through."""

    tokens: int = 0
    requests: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    drafted_by: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def core(workshop: Workshop, batch: int) -> list[Cell]:
    """The cells that see most: random trees around the true path, in every state."""
    width = workshop.llm.config.speculation.max_nodes
    return [
        Cell("thicket", width, batch, state) for state in ("cached", "cold", "preempted", "chunked", "staggered", "aborted")
    ]


def grid(workshop: Workshop, batches: Many[int]) -> list[Cell]:
    """All cells; those of ``core`` first, then each time the one with the most pairs that have not met."""
    most = workshop.llm.config.speculation.max_nodes
    drafters, widths = [*workshop.drafters, *SYNTHETIC], sorted({1, min(4, most), most}, reverse=True)
    left = {
        Cell(drafter, width, batch, state): None
        for drafter, width, batch, state in itertools.product(drafters, widths, sorted(batches, reverse=True), STATES)
    }
    order: list[Cell] = []
    met: set[Pair] = set()

    def take(cell: Cell) -> None:
        left.pop(cell, None)
        met.update(_pairs(cell))
        order.append(cell)

    for cell in core(workshop, max(batches)):
        take(cell)
    while left:
        take(max(left, key=lambda cell: len(_pairs(cell) - met)))
    return order


Pair = tuple[tuple[int, Any], tuple[int, Any]]


def n_pairs(cells: Many[Cell]) -> int:
    """Pairs of factors that have met in these cells."""
    return len({pair for cell in cells for pair in _pairs(cell)})


def _pairs(cell: Cell) -> set[Pair]:
    factors = cell.drafter, cell.width, cell.batch, cell.state
    return set(itertools.combinations(enumerate(factors), 2))


def check_cells(workshop: Workshop, cells: Many[Cell], replay: Replay, enough: Callable[[float], bool]) -> Iterator[Check]:
    """Run cells until the time for them is up.

    Args:
        enough: would it be up in so many seconds?
    """
    seconds = 0.0
    for i, cell in enumerate(cells):
        if enough(seconds):
            done, all_pairs = n_pairs(cells[:i]), n_pairs(cells)
            yield Check(
                "identity", f"{len(cells) - i} further cells", "left out",
                f"no time was left; {done} of {all_pairs} pairs of drafter, width, batch and state have met",
                details={"cells": len(cells) - i, "pairs_met": done, "pairs": all_pairs},
            )  # fmt: skip
            return
        check = check_cell(workshop, cell, replay, turn=i)
        seconds = check.seconds  # the next one will take about as long
        yield check


def check_cell(workshop: Workshop, cell: Cell, replay: Replay, turn: int = 0) -> Check:
    """Run requests in one cell and compare every answer with the plain one."""
    started = time.perf_counter()
    requests = _chosen(workshop.requests, cell, turn)
    try:
        engine = workshop.engine(cell)
        runs = workshop.serve(cell, requests, engine)
    except Exception as error:  # whatever stops an engine with speculation did not stop plain decoding
        details = {**_factors(cell), "differences": [], "raised": str(error)}
        summary = f"the engine broke off with {type(error).__name__}: {error}"
        return Check("identity", cell.describe(), "failed", summary, time.perf_counter() - started, details)
    differences = compare(requests, workshop.plain, runs)
    stats, counted = engine.stats, Counted()
    counted.tokens = sum(len(answer.tokens) for answers in runs for answer in answers.values())
    counted.requests = len(requests) * len(runs)
    counted.passes, counted.drafted, counted.accepted = stats.target_passes, stats.drafted, stats.accepted
    counted.preemptions, counted.cached_tokens = stats.preemptions, stats.cached_tokens
    counted.drafted_by = dict(stats.drafted_by_drafter)
    told = [replay.explain(difference, workshop.plain[difference.request.seed]) for difference in differences[:TOLD]]
    details = {**_factors(cell), **counted.as_dict(), "differing": len(differences), "differences": told}
    status, summary = _verdict(cell, counted, differences, told)
    return Check("identity", cell.describe(), status, summary, time.perf_counter() - started, details)


def compare(requests: Many[Request], plain: dict[int, Answer], runs: Many[dict[int, Answer]]) -> list[Difference]:
    """The first difference of every request that has one."""
    found = []
    for request in requests:
        for answers in runs:
            difference = first_difference(request, plain[request.seed], answers[request.seed])
            if difference:
                found.append(difference)
                break
    return found


def check_recomputed(workshop: Workshop, replay: Replay) -> Check:
    """Plain decoding itself: tokens here and there, recomputed from nothing in one pass over all that stands before them."""
    started = time.perf_counter()
    places = [(r, i) for r in workshop.requests for i in range(len(workshop.plain[r.seed].tokens))]
    places = places[:: max(1, len(places) // RECOMPUTED)]
    wrong = []
    for request, index in places:
        plain = workshop.plain[request.seed]
        tokens = [*request.prompt, *plain.tokens[:index]]
        token = choose(
            replay.row(tokens), request.params, replay.history(request, tokens), (), request.seed, replay.ends(request),
            kernels=workshop.llm.kernels,
        )  # fmt: skip
        if token != plain.tokens[index]:
            wrong.append(Difference(request, "token", index, plain.tokens[index], token))
    told = [replay.explain(difference, workshop.plain[difference.request.seed]) for difference in wrong[:TOLD]]
    summary = (
        f"{len(places)} tokens of plain decoding are those that a pass over the whole text gives"
        if not wrong
        else f"{len(wrong)} of {len(places)} tokens of plain decoding are not those of a pass over the whole text"
    )
    details = {"compared": len(places), "differing": len(wrong), "differences": told}
    seconds = time.perf_counter() - started
    return Check("identity", "recomputed", "failed" if wrong else "passed", summary, seconds, details)


def _chosen(requests: list[Request], cell: Cell, turn: int) -> list[Request]:
    """All of them, or some in turn where they run alone or the drafter gives but one token a pass."""
    if cell.batch > 1 and cell.drafter != "adversary":
        return requests
    n = max(3, len(requests) // 3)
    return [requests[(turn * n + i) % len(requests)] for i in range(n)]


def _factors(cell: Cell) -> dict[str, Any]:
    return {"drafter": cell.drafter, "width": cell.width, "batch": cell.batch, "state": cell.state}


def _verdict(cell: Cell, counted: Counted, differences: list[Difference], told: list[dict[str, Any]]) -> tuple[Any, str]:
    if differences:
        return "failed", f"{len(differences)} of {counted.requests} answers differ; {told[0]['summary']}"
    n = f"{counted.tokens} tokens of {counted.requests} answers are the same"
    if missing := _missing(cell, counted):
        return "not reached", f"{n}, but {missing}"
    share = f"{counted.accepted} of {counted.drafted} drafted tokens accepted"
    return "passed", f"{n}; {share}, {counted.tokens / counted.passes:.2f} a pass"


def _missing(cell: Cell, counted: Counted) -> str:
    """What the cell was to meet and did not."""
    if not counted.drafted:
        return "nothing was drafted"
    if cell.state == "preempted" and not counted.preemptions:
        return "no sequence was preempted"
    if cell.state == "cached" and not counted.cached_tokens:
        return "no prompt was found in the cache"
    return ""
