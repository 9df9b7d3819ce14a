"""Would the audit have noticed? Every broken engine goes through cells that the sound one has passed, and must fail there."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Many

from specdec.audit.fault import Fault
from specdec.audit.report import Check
from specdec.audit.requests import Request
from specdec.audit.runs import Differs
from specdec.audit.sabotage import FAULTS
from specdec.audit.workshop import Cell, Workshop

FEW = 5
"""Requests that a broken engine meets first; all of them if it survives those."""


def check_faults(
    workshop: Workshop, passed: Collection[Cell], enough: Callable[[float], bool], faults: Many[Fault] = FAULTS
) -> Iterator[Check]:
    """One check for each fault.

    Args:
        faults: those that concern none of the requests are passed over: an engine that never samples cannot sample wrongly.
        passed: cells that the sound engine has passed in this audit: only what these catch is caught by the audit.
    """
    faults = [fault for fault in faults if any(fault.shows_in(request) for request in workshop.requests)]
    for i, fault in enumerate(faults):
        if enough(0.0):
            left = len(faults) - i
            yield Check("teeth", f"{left} further faults", "left out", "no time was left", details={"faults": left})
            return
        yield check_fault(workshop, fault, passed)


def check_fault(workshop: Workshop, fault: Fault, passed: Collection[Cell]) -> Check:
    """Passed if the audit notices, failed if the broken engine gives the right answers everywhere."""
    started = time.perf_counter()
    cells = sorted((c for c in passed if c.state in fault.states), key=lambda c: fault.states.index(c.state))
    if not cells:
        summary = f"no cell was passed in which it would show ({', '.join(fault.states)})"
        return Check("teeth", fault.name, "left out", summary, details={"part": fault.part, "story": fault.story})
    tried = 0
    for requests in (_likely(workshop.requests, fault), workshop.requests):
        for cell in cells:
            tried += 1
            if caught := fault.caught(functools.partial(_differs, workshop, cell, requests)):
                details = {"cell": cell.describe(), "tried": tried}
                return fault.check(caught, time.perf_counter() - started, details)
    return fault.check("", time.perf_counter() - started, {"tried": tried})


def _differs(workshop: Workshop, cell: Cell, requests: list[Request]) -> str:
    """What is wrong with the answers in a cell; empty where nothing is."""
    try:
        workshop.serve(cell, requests, workshop.engine(cell), expected=workshop.plain)
    except Differs as found:
        return str(found)
    return ""


def _likely(requests: list[Request], fault: Fault) -> list[Request]:
    """A few requests of the kind that the fault shows in, short prompts first; others where there are too few."""
    order = sorted(requests, key=lambda request: (not fault.shows_in(request), len(request.prompt)))
    likely = [request for request in order if fault.shows_in(request)]
    return likely if len(likely) > FEW and fault.states[0] == "cached" else order[:FEW]
