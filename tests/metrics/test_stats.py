"""The counters of drafting and verification."""

import json

from specdec.metrics.stats import MOST_PASSES, Stats
from specdec.types import Draft, Tree


def test_a_fresh_counter_divides_by_nothing() -> None:
    """A rate read before the first pass is a number, not an error or a NaN."""
    assert Stats().tokens_per_pass == 0.0
    assert json.loads(json.dumps(Stats().as_dict()))["drafted"] == 0


def test_depths_are_counted_where_they_were_reached() -> None:
    """α at a depth is accepted over *reached*: nodes below a refused one do not count as refusals."""
    stats = Stats()
    #        0 ─ 1 ─ 2        (suffix)
    #        └─ 3             (recycling)
    draft = Draft(Tree((5, 6, 7, 8), (-1, 0, 1, 0)), ("suffix", "suffix", "suffix", "recycling"))
    stats.record_burst(draft, [1, 2, 3, 2], path=(0, 3), emitted=3)
    stats.record_burst(draft, [1, 2, 3, 2], path=(), emitted=1)
    stats.record_burst(Draft(), [], path=(), emitted=1)
    out = stats.as_dict()
    assert out["target_passes"] == 3
    assert out["emitted"] == 5
    assert out["drafted"] == 8
    assert out["accepted"] == 2
    assert out["drafted_by_depth"] == [2, 4, 2]
    assert out["reached_by_depth"] == [2, 1]
    assert out["accepted_by_depth"] == [1, 1]
    assert out["drafted_by_drafter"] == {"suffix": 6, "recycling": 2}
    assert out["accepted_by_drafter"] == {"suffix": 1, "recycling": 1}
    assert out["tokens_per_pass"] == 5 / 3


def test_plans_are_counted() -> None:
    """What was proposed, who was asked, and what was expected, per target pass."""
    stats = Stats()
    for proposed, asked, expected in ((5, ("suffix", "recycling"), 2.5), (0, ("suffix",), 1.0), (0, (), 1.0)):
        stats.record_burst(Draft(), [], path=(), emitted=1)
        stats.record_plan(proposed, asked, expected)
    out = stats.as_dict()
    assert (out["proposed"], out["quiet_passes"], out["expected_tokens_per_pass"]) == (5, 1, 1.5)
    assert out["asked_by_drafter"] == {"suffix": 2, "recycling": 1}


def test_seconds_are_summed_up_however_often_they_are_read() -> None:
    """Passes are kept until somebody asks, or there are many; none is lost or counted twice."""
    once, often = Stats(), Stats()
    for i in range(2 * MOST_PASSES + 3):
        for stats in (once, often):
            stats.add_pass((1.0, 2.0, 0.5, 0.25 * i), float(i))
        if i % 100 == 0:
            assert often.seconds["draft"] == i + 1
    n = 2 * MOST_PASSES + 3
    expected = {"draft": n, "forward": 2 * n, "verify": n / 2, "host": 0.25 * n * (n - 1) / 2}
    assert once.seconds == often.seconds == once.as_dict()["seconds"] == expected
    assert once.plain_seconds == often.plain_seconds == n * (n - 1) / 2
    assert once.speedup == once.plain_seconds / sum(expected.values())
