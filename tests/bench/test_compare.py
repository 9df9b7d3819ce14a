"""Two results side by side."""

from __future__ import annotations

import pytest
from measurements import report, timing

from specdec.bench.compare import best, differences, pairs


def measured(off: float, on: float, **more):
    return report(timing("off", "chat-1", off), timing("on", "chat-1", on), **more)


def test_the_same_modes_are_compared() -> None:
    """b over a, by mode and task, with and without the prompt."""
    found = pairs(measured(21.0, 11.0), measured(11.0, 6.0))
    assert [(p.a.mode, p.b.mode, p.a.task) for p in found] == [
        (mode, mode, task) for mode in ("off", "on") for task in ("chat", "all")
    ]
    assert found[0].speed == pytest.approx(21 / 11)
    assert found[0].decoding == pytest.approx(20 / 10)
    assert found[0].first_token == pytest.approx(1.0)


def test_other_programs_meet_the_fastest_mode() -> None:
    """Where no mode is shared, each of b's against the best of a's, whatever its name."""
    theirs = report(timing("plain", "chat-1", 22.0), timing("lookup", "chat-1", 44.0))
    found = [p for p in pairs(measured(21.0, 11.0), theirs) if p.a.task == "all"]
    assert [(p.a.mode, p.b.mode, p.speed) for p in found] == [("on", "plain", 0.5), ("on", "lookup", 0.25)]
    assert best(measured(9.0, 10.0), 0.0) == "off"


def test_what_a_program_cannot_tell_has_no_ratio() -> None:
    """No division by what is not known."""
    silent = report(timing("off", "chat-1", 22.0, first_token_seconds=None))
    assert (pairs(measured(1.5, 1.5), silent)[0].decoding, pairs(measured(1.5, 1.5), silent)[0].first_token) == (None, None)


def test_settings_that_differ_are_named() -> None:
    """Model, precision, prompts, length, machine and temperature; what only one tells counts too."""
    a = measured(2.0, 2.0)
    assert differences(a, measured(3.0, 1.5)) == []
    other = {"model": "bigger", "precision": "q8", "prompts_sha256": "beef", "threads": 2}
    lines = differences(a, measured(2.0, 2.0, provenance=other))
    assert [line.partition(":")[0] for line in lines] == ["model", "precision", "prompts_sha256", "cpu"]
    assert lines[0] == "model: made-up against bigger"
    assert lines[-1] == "cpu: Abacus 3000 against not told"
    hot = report(timing("off", "chat-1", 2.0, temperature=0.8))
    assert differences(a, hot) == ["temperature: [0.0] against [0.8]"]
    assert pairs(a, hot) == []
