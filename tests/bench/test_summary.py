"""The arithmetic from single runs to the figures of a task, on runs made by hand."""

from __future__ import annotations

import pytest
from measurements import counters, timing

from specdec.bench.summary import gaps, quantile, summarise


def rows(*runs, modes=("off", "on")):
    return {(row.mode, row.task): row for row in summarise(runs, modes)}


def test_rates_are_tokens_over_seconds_of_medians() -> None:
    """A prompt counts with its median turn, not its mean; a task with all tokens over all seconds, not a mean of rates."""
    found = rows(
        *(timing("off", "chat-1", seconds, turn=i) for i, seconds in enumerate((11.0, 9.0, 99.0))),
        timing("off", "chat-2", 89.0),
        timing("off", "code-1", 100.0),
        timing("on", "chat-1", 6.0),
        timing("on", "chat-2", 44.0),
        timing("on", "code-1", 200.0),
    )
    assert found["off", "chat"].tokens_per_second == pytest.approx(22 / 100)
    assert found["on", "chat"].tokens_per_second == pytest.approx(22 / 50)
    assert found["off", "all"].tokens_per_second == pytest.approx(33 / 200)
    assert [found["on", task].speedup for task in ("chat", "code", "all")] == pytest.approx([2.0, 0.5, 200 / 250])
    assert found["off", "chat"].speedup == 1
    assert [found["off", task].prompts for task in ("chat", "code", "all")] == [2, 1, 3]


def test_decoding_leaves_out_the_first_token() -> None:
    """Tokens after the first over the time after the first; a run that ended with its first token takes no part."""
    found = rows(
        timing("off", "chat-1", 21.0),
        timing("off", "chat-2", 1.0, tokens=1),
        timing("on", "chat-1", 11.0),
        timing("on", "chat-2", 1.0, tokens=1),
    )
    assert found["off", "all"].decode_tokens_per_second == pytest.approx(10 / 20)
    assert found["on", "all"].decode_tokens_per_second == pytest.approx(10 / 10)
    assert found["on", "all"].speedup_decoding == pytest.approx(2.0)
    assert found["on", "all"].speedup == pytest.approx(22 / 12)


def test_tau_and_acceptance_are_of_all_runs_together() -> None:
    """Sums over sums: accepted over *reached* at each depth, tokens over passes."""
    found = rows(
        timing("on", "chat-1", 5.0, stats=counters(4, 10, [4, 2], [3, 1])),
        timing("on", "chat-2", 5.0, stats=counters(2, 2, [1], [0])),
        timing("on", "code-1", 5.0, stats=counters(5, 5, [], [])),
        modes=("on",),
    )
    assert found["on", "chat"].tau == pytest.approx(12 / 6)
    assert found["on", "chat"].acceptance_by_depth == pytest.approx((3 / 5, 1 / 2))
    assert found["on", "code"].acceptance_by_depth == ()
    assert found["on", "all"].tau == pytest.approx(17 / 11)


def test_unknown_stays_unknown() -> None:
    """Programs that tell neither first token nor counters have rates all the same, and no zeros that nobody measured."""
    found = rows(timing("plain", "chat-1", 11.0, first_token_seconds=None, gaps={"p50": None, "p99": None}), modes=("plain",))
    row = found["plain", "all"]
    assert row.tokens_per_second == 1.0
    unknown = (row.decode_tokens_per_second, row.first_token_seconds, row.gap_p50, row.tau, row.acceptance_by_depth)
    assert unknown == (None,) * 5


def test_no_speedup_without_the_first_mode() -> None:
    """What would be divided by is not there."""
    assert rows(timing("on", "chat-1", 11.0))["on", "all"].speedup is None


def test_temperatures_are_kept_apart() -> None:
    """A speed-up is against plain decoding at the same temperature."""
    runs = [timing("off", "chat-1", 10.0), timing("on", "chat-1", 5.0)]
    hot = [timing("off", "chat-1", 30.0, temperature=0.8), timing("on", "chat-1", 10.0, temperature=0.8)]
    found = {(row.temperature, row.mode, row.task): row.speedup for row in summarise([*runs, *hot], ("off", "on"))}
    assert found[0.0, "on", "all"] == pytest.approx(2.0)
    assert found[0.8, "on", "all"] == pytest.approx(3.0)


def test_gaps_are_what_a_client_waits() -> None:
    """A burst comes at one moment: its first token waited since the delivery before, the others did not wait."""
    assert gaps([(5.0, 1), (6.0, 1), (8.0, 1)]) == {"p50": 1.0, "p99": 2.0}
    assert gaps([(5.0, 2), (9.0, 4)]) == {"p50": 0.0, "p99": 4.0}
    assert gaps([(5.0, 1)]) == {"p50": None, "p99": None}


def test_quantiles_are_values_that_occurred() -> None:
    """The smallest value that the share of the values does not exceed."""
    hundred = list(range(1, 101))
    assert [quantile(hundred, q) for q in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([], 0.5) is None
