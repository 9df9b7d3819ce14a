"""The tests of draws: right laws pass, wrong ones do not, and false alarms come no more often than is said."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from specdec.audit import law
from specdec.audit.law import Dice, _drawn, alarm
from specdec.audit.statistics import fit
from specdec.audit.world import cut_world
from specdec.verify.broken import BROKEN
from specdec.verify.enumeration import siblings

LAW = {"a": 0.5, "b": 0.3, "c": 0.2, "never": 0.0}


def test_the_numbers_are_those_of_the_textbook() -> None:
    """Chi-square of (60, 25, 15) against (50, 30, 20): 100/50 + 25/30 + 25/20 = 4.0833, p = exp(-x / 2) at two degrees."""
    found = fit({"a": 60, "b": 25, "c": 15}, {"a": 0.5, "b": 0.25, "c": 0.25}, 1e-4)
    assert found.chi_square == pytest.approx(100 / 50 + 0 + 100 / 25)
    assert found.p_value == pytest.approx(np.exp(-3.0))
    assert found.tv == pytest.approx(0.1)


def test_rare_outcomes_share_a_cell_and_impossible_ones_are_counted() -> None:
    p = {"often": 0.97, **{str(i): 0.001 for i in range(30)}}
    found = fit({"often": 970, "0": 30, "new": 5}, p, 1e-4)
    assert found.cells == 2
    assert found.impossible == 5
    assert not found.fits(1e-12)


def test_false_alarms_are_as_rare_as_is_said() -> None:
    """At a level of 1 in 100, 4,000 sound samples give at most 1 in 60 by chi-square, and none by total variation."""
    rng = np.random.default_rng(1)
    samples = rng.multinomial(1000, [0.5, 0.3, 0.2], size=4000)
    fits = [fit(dict(zip("abc", map(int, row), strict=True)), LAW, 0.01) for row in samples]
    assert sum(f.p_value < 0.01 for f in fits) / len(fits) < 1 / 60
    assert sum(f.tv > f.tv_bound for f in fits) / len(fits) < 0.01


def test_all_alarms_together_stay_below_what_the_audit_says() -> None:
    assert 2 * law.n_tests() * alarm() <= law.FALSE_ALARM / 2


def test_draws_find_faults_too(workshop) -> None:
    """The audit's number of draws suffices to see a residual that was forgotten, without any enumeration."""
    world = cut_world(workshop.llm, workshop.requests[0].prompt)
    for name in ("corrected-from-target", "odds-of-target"):
        assert not _drawn(BROKEN[name].rule.judge, siblings("sampled"), world).fits(alarm())


def test_dice_draw_the_law_they_are_given() -> None:
    import torch

    dice, p = Dice(3), torch.tensor([0.0, 0.25, 0.75, 0.0], dtype=torch.float64)
    counts = Counter(dice.draw(p) for _ in range(2000))
    assert fit(counts, dict(enumerate(p.tolist())), 1e-6).fits(1e-6)
