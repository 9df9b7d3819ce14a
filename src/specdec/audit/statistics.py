"""Two tests of draws against a law that is known exactly, both with a stated chance of a false alarm.

*Total variation* has a bound that holds for any number of draws: one draw more or less moves it by 1/n, so it exceeds its
mean by t with probability at most exp(-2 n t^2) (McDiarmid's inequality), and its mean is at most half the sum of
sqrt(p (1 - p) / n). *Chi-square* sees more of small differences; its law is an approximation, which is good where every cell
is expected often, so rare outcomes are put together first.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

_Outcome = TypeVar("_Outcome", bound=Hashable)

LEAST = 25.0
"""Draws that a cell of the chi-square test must expect; rarer outcomes share one."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How draws compare with their law."""

    n: int
    cells: int
    chi_square: float
    p_value: float
    """Of the chi-square test."""
    tv: float
    """Total variation of the draws' frequencies from the law."""
    tv_bound: float
    """What total variation exceeds by chance with at most the probability asked for."""
    impossible: int
    """Draws to which the law gives no probability at all."""

    def fits(self, alarm: float) -> bool:
        """False where chance alone would give such draws with probability at most ``alarm`` for either test."""
        return not self.impossible and self.p_value >= alarm and self.tv <= self.tv_bound


def fit(counts: Mapping[_Outcome, int], law: Mapping[_Outcome, float], alarm: float) -> Fit:
    """Compare draws with their law.

    Args:
        counts: how often each outcome was drawn.
        law: its probability; what is missing is impossible.
        alarm: the probability of a false alarm that each of the two tests may have.
    """
    n = sum(counts.values())
    impossible = sum(count for outcome, count in counts.items() if law.get(outcome, 0.0) <= 0)
    possible = {outcome: p for outcome, p in law.items() if p > 0}
    statistic, cells = _chi_square(counts, possible, n)
    p_value = float(torch.special.gammaincc(_double((cells - 1) / 2), _double(statistic / 2))) if cells > 1 else 1.0
    tv = (impossible + sum(abs(counts.get(outcome, 0) - n * p) for outcome, p in possible.items())) / (2 * n)
    mean = sum(math.sqrt(p * (1 - p) / n) for p in possible.values()) / 2
    bound = mean + math.sqrt(math.log(1 / alarm) / (2 * n))
    return Fit(n, cells, statistic, p_value, tv, bound, impossible)


def _chi_square(counts: Mapping[_Outcome, int], law: Mapping[_Outcome, float], n: int) -> tuple[float, int]:
    """The statistic and the number of cells."""
    cells: list[tuple[int, float]] = []
    rare_count, rare_expected = 0, 0.0
    for outcome, p in law.items():
        if n * p >= LEAST:
            cells.append((counts.get(outcome, 0), n * p))
        else:
            rare_count, rare_expected = rare_count + counts.get(outcome, 0), rare_expected + n * p
    if rare_expected >= LEAST:
        cells.append((rare_count, rare_expected))
    elif rare_expected > 0 and cells:  # too rare even together: they join the rarest cell
        i = min(range(len(cells)), key=lambda i: cells[i][1])
        cells[i] = cells[i][0] + rare_count, cells[i][1] + rare_expected
    return sum((count - expected) ** 2 / expected for count, expected in cells), len(cells)


def _double(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
