"""The alarm for acceptance that collapsed."""

from __future__ import annotations

import random

import pytest

from specdec.metrics.stats import Stats
from specdec.metrics.watch import KNOWN, Share, Watch


def asks(share: Share, n: int, right: float, seed: int = 0) -> list[bool]:
    """The alarm after each of ``n`` asks, of which so large a share is right."""
    rng = random.Random(seed)
    seen = []
    for _ in range(n):
        hit = rng.random() < right
        share.add(int(hit), int(not hit))
        seen.append(share.collapsed)
    return seen


def test_a_steady_drafter_raises_no_alarm() -> None:
    """Twenty thousand asks at each of several shares: chance alone is no collapse. The odds of a false alarm at 0.25 are those
    of a mean of 128 lying six standard deviations low."""
    for right in (0.02, 0.25, 0.6, 0.95):
        assert not any(asks(Share(), 20_000, right)), right


def test_a_collapse_is_noticed_and_its_end_too() -> None:
    """On within 300 asks, on while it lasts, off within 200 after it has ended; between the two bounds nothing changes."""
    share = Share()
    asks(share, 3000, 0.6)
    fall = asks(share, 2000, 0.02, seed=1)
    assert fall.index(True) < 300
    assert all(fall[300:])
    middle = asks(share, 500, share.usual * 0.35, seed=2)
    assert all(middle)
    rise = asks(share, 1000, 0.6, seed=3)
    assert rise.index(False) < 200
    assert not any(rise[200:])


def test_a_milder_fall_is_no_collapse() -> None:
    """To half of the usual share: no alarm."""
    share = Share()
    asks(share, 3000, 0.6)
    assert not any(asks(share, 3000, 0.3, seed=1))


def test_what_lasts_becomes_usual() -> None:
    """A change of texts for good does not leave the alarm on for good."""
    share = Share()
    asks(share, 20_000, 0.9)
    assert asks(share, 1000, 0.2, seed=1)[-1]
    assert not asks(share, 40_000, 0.2, seed=2)[-1]


def test_nothing_is_said_before_enough_is_known() -> None:
    """A drafter that has hardly been asked has no usual share."""
    share = Share()
    assert not any(asks(share, KNOWN // 2, 1.0) + asks(share, KNOWN // 2 - 1, 0.0))


def test_what_others_had_is_no_miss() -> None:
    """An ask counts where the drafter was right, or nobody was; so a better drafter beside it is no collapse."""
    stats, watch = Stats(), Watch()
    watch.look(stats)
    for right in (("suffix",), ("suffix", "recycling"), (), ("recycling",)):
        stats.record_plan(4, ("suffix", "recycling"), 2.0)
        stats.record_asks(("suffix", "recycling"), right)
        watch.look(stats)
    assert dict(stats.hits_by_drafter) == {"suffix": 2, "recycling": 2}
    assert dict(stats.misses_by_drafter) == {"suffix": 1, "recycling": 1}
    assert {name: share.asks for name, share in watch.shares.items()} == {"suffix": 3, "recycling": 3}


def test_asks_may_be_looked_at_in_bulk() -> None:
    """A look takes in what a quarter of a second brought. While the memory fills the mean is exact; then a few hundred asks at
    once give what the same share gives one by one, however they lay."""
    single, bulk = Share(), Share()
    for _ in range(50):
        for hit in (1, 0, 0, 1):
            single.add(hit, 1 - hit)
        bulk.add(2, 2)
        assert bulk.usual == pytest.approx(single.usual)
    assert bulk.recent == pytest.approx(0.5)
    for _ in range(100):
        single.add(1, 0)
        single.add(0, 1)
        single.add(0, 1)
    bulk.add(100, 200)
    assert bulk.asks == single.asks == 500
    assert bulk.usual == pytest.approx(single.usual)
    assert bulk.recent == pytest.approx(single.recent, abs=0.01)
