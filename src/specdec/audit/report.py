"""What an audit found, as plain values: checks, the verdict that follows from them, and the file that holds both.

A check that did not run is *left out*, one that ran without meeting what it was to test is *not reached*; neither counts as
passed. *Measured* is what has no right or wrong answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "failed", "measured", "not reached", "left out"]
Verdict = Literal["exact", "different", "inconclusive"]

FORMAT = 1
"""Of the JSON file; it rises when a field changes its meaning or goes."""

EXIT_CODES: Mapping[Verdict, int] = {"exact": 0, "different": 1, "inconclusive": 2}

TITLES: Mapping[str, str] = {
    "rows": "Row invariance",
    "processes": "Other processes",
    "identity": "Identity of tokens, speculation off and on",
    "teeth": "Teeth: broken engines that must be caught",
    "law": "Law of the verification rules",
    "quality": "Cost of the precision",
    "repetition": "The same request, again",
    "load": "The same request, under load",
    "speculation": "Speculation off and on, by request",
    "streaming": "Streamed and whole answers",
    "against": "One server against another",
}
"""Sections, in the order in which they are told."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tested."""

    section: str
    name: str
    status: Status
    summary: str
    """One line for people."""
    seconds: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)
    """Figures, as JSON has them."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status,
            "summary": self.summary,
            "seconds": self.seconds,
            "details": dict(self.details),
        }


@dataclass(slots=True)
class Report:
    """All of it."""

    subject: Mapping[str, Any]
    """What was audited: a model and how it runs, or servers."""
    provenance: Mapping[str, Any]
    settings: Mapping[str, Any]
    required: tuple[str, ...]
    """Sections without which there is no verdict: each needs a check that passed."""
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What this audit can and cannot show, and what was left out."""

    def of(self, section: str) -> list[Check]:
        return [check for check in self.checks if check.section == section]

    @property
    def sections(self) -> list[str]:
        return [section for section in TITLES if self.of(section)]

    @property
    def failed(self) -> list[Check]:
        """Checks that found a difference."""
        return [check for check in self.checks if check.status == "failed" and check.section != "teeth"]

    @property
    def survivors(self) -> list[Check]:
        """Broken engines that were not caught, be it that no time was left."""
        return [check for check in self.of("teeth") if check.status != "passed"]

    @property
    def missing(self) -> list[str]:
        """Required sections of which nothing passed."""
        return [s for s in self.required if not any(check.status == "passed" for check in self.of(s))]

    @property
    def verdict(self) -> Verdict:
        if self.failed:
            return "different"
        return "inconclusive" if self.missing or self.survivors else "exact"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def statement(self) -> str:
        """The verdict in a sentence."""
        counts = {
            status: sum(check.status == status for check in self.checks) for status in ("passed", "left out", "not reached")
        }
        rest = "".join(f", {n} {status}" for status, n in counts.items() if status != "passed" and n)
        if self.verdict == "different":
            sections = dict.fromkeys(TITLES[check.section] for check in self.failed)
            failed = f"{len(self.failed)} check{'s' * (len(self.failed) > 1)} failed"
            return f"A difference was found: {failed} ({'; '.join(sections)})"
        if self.missing:
            missing = "; ".join(TITLES[section] for section in self.missing)
            return f"No verdict: nothing passed of what must be checked ({missing}){rest}"
        if self.survivors:
            names = ", ".join(check.name for check in self.survivors)
            return f"No verdict: the audit did not catch every broken engine, so what it passed proves little ({names}){rest}"
        return f"No difference was found: {counts['passed']} checks passed{rest}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "statement": self.statement,
            "subject": dict(self.subject),
            "provenance": dict(self.provenance),
            "settings": dict(self.settings),
            "required": list(self.required),
            "notes": list(self.notes),
            "sections": [
                {"section": s, "title": TITLES[s], "checks": [check.as_dict() for check in self.of(s)]} for s in self.sections
            ],
        }


def save(report: Report, path: Path) -> None:
    """Write a report as JSON; numbers are finite, so any reader takes it."""
    path.write_text(json.dumps(report.as_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
