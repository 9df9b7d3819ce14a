"""An audit of a model: what is checked, in which order, and for how long.

The most telling checks come first: rows, the cells that see most, the broken engines that these cells must catch; then the
laws, the rest of the grid, and what the precision costs. Whatever time does not suffice for is left out by name.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.audit.chance import check_chance
from specdec.audit.divergence import Replay
from specdec.audit.identity import check_cells, check_recomputed, core, grid
from specdec.audit.law import check_broken_rules, check_laws
from specdec.audit.processes import check_processes
from specdec.audit.quality import check_kv_format, check_quality
from specdec.audit.report import Check, Report
from specdec.audit.rows import check_rows
from specdec.audit.teeth import check_faults
from specdec.audit.workshop import Cell, Workshop
from specdec.bench.provenance import provenance
from specdec.config import ConfigError
from specdec.llm import LLM
from specdec.models.base import Model

REQUIRED = ("rows", "identity", "teeth")

BATCHES = (1, 3, 8)

PREPARING = 0.12
"""Share of the time for the plain answers; the cells and the broken engines that use them take a few times as long."""

UNTIL = {"rows": 0.08, "processes": 0.12, "core": 0.5, "teeth": 0.78, "law": 0.9, "kv": 0.92, "quality": 0.95, "rest": 1.0}
"""Where each part must have ended, as a share of the time."""

LEAST = 0.02
"""Share of the time that each likelihood has, even where what came before it took longer than it should."""

BY_CHANCE = (
    "acceptance={rule} decides by chance above temperature 0: tokens are those of plain decoding at temperature 0 alone, and "
    "above it only their law can be tested."
)

QUALITY_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """How thoroughly to audit."""

    minutes: float
    max_tokens: int = 24
    """Most tokens of an answer."""
    text: Path | None = None
    """What the likelihood is measured on; None takes what ships."""

    def __post_init__(self) -> None:
        if not 0 < self.minutes < 1e6:
            raise ConfigError(f"minutes must be a number > 0, got {self.minutes}")


class Clock:
    """The time that an audit has, from now on."""

    def __init__(self, minutes: float) -> None:
        self._started, self._seconds = time.monotonic(), 60 * minutes

    @property
    def left(self) -> float:
        """Seconds; less than 0 after its end."""
        return self._started + self._seconds - time.monotonic()

    def until(self, share: float) -> Callable[[float], bool]:
        """A function that says whether this share of the time is gone, or would be in so many seconds."""
        return lambda seconds: self.left - seconds <= (1 - share) * self._seconds


def audit(
    llm: LLM,
    plan: Plan,
    in_fp32: Callable[[], Model],
    told: Callable[[str, Check | None], None],
    again: Callable[[], LLM] | None = None,
) -> Report:
    """Audit a model as it runs here.

    Args:
        llm: the model with its drafters.
        in_fp32: loads the same weights in fp32.
        told: hears of every part that begins (without a check) and of every check that ends.
        again: loads the same model in another process, so it must be something that can be pickled; None: none is started.

    Raises:
        ConfigError: speculation is off, so there is nothing to audit.
    """
    if llm.engine.drafter is None:
        raise ConfigError("speculation is off: there is nothing to compare with plain decoding")
    clock = Clock(plan.minutes)
    workshop = Workshop(llm, plan.max_tokens)

    def until(part: str) -> Callable[[float], bool]:
        return clock.until(UNTIL[part])

    required = REQUIRED if workshop.rule.keeps == "tokens" else (*REQUIRED, "law")
    report = Report(_subject(llm), provenance(), {"minutes": plan.minutes, "max_tokens": plan.max_tokens}, required)
    if workshop.rule.keeps != "tokens":
        report.notes.append(BY_CHANCE.format(rule=workshop.rule.name))

    def add(part: str, checks: Callable[[], Iterable[Check]]) -> None:
        told(part, None)
        for check in checks():
            report.checks.append(check)
            told(part, check)

    def plain() -> Iterator[Check]:
        workshop.prepare(PREPARING * 60 * plan.minutes)
        yield check_recomputed(workshop, replay())

    @functools.cache
    def replay() -> Replay:
        return Replay(llm, max(len(request.prompt) for request in workshop.requests) + plan.max_tokens)

    passed: list[Cell] = []

    def first_cells() -> Iterator[Check]:
        cells = core(workshop, max(BATCHES))
        for cell, check in zip(cells, check_cells(workshop, cells, replay(), until("core")), strict=False):
            if check.status == "passed":
                passed.append(cell)
            yield check

    def other_cells() -> Iterator[Check]:
        cells = grid(workshop, BATCHES)[len(core(workshop, max(BATCHES))) :]
        return check_cells(workshop, cells, replay(), until("rest"))

    def quality() -> Iterator[Check]:
        def seconds(part: str) -> float:
            return max(clock.left - (1 - UNTIL[part]) * 60 * plan.minutes, LEAST * 60 * plan.minutes)

        yield check_kv_format(llm, plan.text, QUALITY_TOKENS, seconds("kv"))
        yield check_quality(llm, in_fp32, plan.text, QUALITY_TOKENS, seconds("quality"))

    add("rows", lambda: check_rows(llm.engine.model, llm.kernels, llm.config, until("rows")))
    add("other processes", lambda: check_processes(llm, again, until("processes")))
    add("plain decoding", plain)
    add("identity", first_cells)
    add("broken engines", lambda: check_faults(workshop, passed, until("teeth")))
    add("broken rules", lambda: check_broken_rules(workshop, until("teeth")))
    if workshop.rule.keeps == "law":
        add("rules by chance", lambda: check_chance(workshop, until("law")))
    add("laws", lambda: check_laws(workshop, until("law")))
    add("quality", quality)
    add("identity", other_cells)
    return report


def _subject(llm: LLM) -> dict[str, Any]:
    """The model and how it runs."""
    engine, speculation = llm.engine, llm.config.speculation
    return {
        "kind": "engine",
        "model": Path(llm.name).name if Path(llm.name).is_absolute() else llm.name,
        "precision": llm.precision,
        "kv_format": llm.kv_format,
        "kernels": llm.kernels.name,
        "device": str(engine.model.device),
        "drafters": [drafter.name for drafter in engine.drafters],
        "acceptance": speculation.acceptance,
        "max_nodes": speculation.max_nodes,
        "layers": engine.model.shape.n_layers,
        "vocabulary": engine.model.shape.vocab_size,
    }
