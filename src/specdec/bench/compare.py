"""Two results side by side, of this engine or of any other program that writes the same layout."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.bench.result import ALL, Report, Summary

FACTS = (
    "model", "precision", "kv_format", "prompts_sha256", "max_tokens", "concurrency", "ignore_eos", "acceptance", "cpu",
    "threads",
)  # fmt: skip
"""What must agree for a difference in speed to be one of the programs."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The same task and temperature in both."""

    a: Summary
    b: Summary

    @property
    def speed(self) -> float:
        """Tokens per second of b over a, with the processing of the prompt."""
        return self.b.tokens_per_second / self.a.tokens_per_second

    @property
    def decoding(self) -> float | None:
        """The same for the tokens after the first."""
        return _ratio(self.b.decode_tokens_per_second, self.a.decode_tokens_per_second)

    @property
    def first_token(self) -> float | None:
        """Time to the first token, b over a."""
        return _ratio(self.b.first_token_seconds, self.a.first_token_seconds)


def pairs(a: Report, b: Report) -> list[Pair]:
    """Rows of both that belong together: the same task and temperature, and the same mode where they share any.

    Without a mode in common, every mode of b stands against the fastest of a.
    """
    shared = [mode for mode in a.modes if mode in b.modes]
    found = []
    for temperature in a.temperatures:
        modes = [(mode, mode) for mode in shared] or [(best(a, temperature), mode) for mode in b.modes]
        for mine, theirs in modes:
            for task in a.tasks:
                left, right = a.row(mine, task, temperature), b.row(theirs, task, temperature)
                if left and right:
                    found.append(Pair(left, right))
    return found


def best(report: Report, temperature: float) -> str:
    """The mode with the most tokens per second over all tasks; the first mode where none has a total."""
    totals = [row for mode in report.modes if (row := report.row(mode, ALL, temperature))]
    return max(totals, key=lambda row: row.tokens_per_second).mode if totals else report.modes[0]


def differences(a: Report, b: Report) -> list[str]:
    """One line for each fact in which the two were measured differently; a fact that one does not tell counts too."""
    lines = []
    for name in FACTS:
        left, right = a.fact(name), b.fact(name)
        if left != right:
            lines.append(f"{name}: {_shown(left)} against {_shown(right)}")
    if not set(a.temperatures) & set(b.temperatures):
        lines.append(f"temperature: {a.temperatures} against {b.temperatures}")
    return lines


def _shown(value: object) -> str:
    return "not told" if value is None else str(value)[:60]


def _ratio(b: float | None, a: float | None) -> float | None:
    return b / a if a and b is not None else None
