"""The arithmetic of speculation: the textbook's values, the corners, and simulations that know none of the formulas."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.plan import Chain, Mix, Prices, best, chains, free, least, reach

SLOPE: Callable[[int], float] = lambda rows: 3.0 + 0.4 * rows  # noqa: E731 - a machine on which rows cost something


def test_the_textbook() -> None:
    """Leviathan et al. at acceptance 0.8, five drafted tokens, a drafter of a twentieth: 3.69 tokens a step, 2.95 times."""
    chain = chains([0.8] * 5, Prices(draft=0.05))[-1]
    assert chain.depth == 5
    assert chain.tokens == pytest.approx((1 - 0.8**6) / (1 - 0.8))
    assert round(chain.tokens, 2) == 3.69
    assert round(chain.speedup, 2) == 2.95
    assert [round(best(chains([0.8] * n, Prices(draft=0.05))).speedup, 2) for n in (4, 16)] == [2.80, 3.09]


def test_corners() -> None:
    """Nothing drafted is plain decoding whatever things cost; all accepted emits all; nothing accepted loses the cost."""
    dear = Prices(draft=3.0, ask=2.0, host=0.5, cost=SLOPE)
    assert chains([0.7], dear)[0] == Chain(0, 1.0, 1.0)
    assert chains([], dear) == [Chain(0, 1.0, 1.0)]
    assert chains([1.0] * 7, Prices())[-1] == Chain(7, 8.0, 1.0)
    lost = chains([0.0] * 3, Prices(draft=0.1))
    assert best(lost).depth == 0
    assert lost[-1].speedup == pytest.approx(1 / 1.3)
    assert reach([0.5, 0.5, 0.0, 1.0]) == [0.5, 0.25, 0.0, 0.0]


def test_of_equally_fast_chains_the_shortest() -> None:
    """A longer draft that gains nothing only holds memory."""
    assert best(chains([1.0, 0.0, 0.0], Prices())).depth == 1


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
def test_an_acceptance_is_a_share(alpha: float) -> None:
    with pytest.raises(ValueError, match="acceptance"):
        reach([0.5, alpha])


@pytest.mark.parametrize("wrong", [{"draft": -1.0}, {"ask": -0.1}, {"host": 1.0}, {"host": -0.1}])
def test_prices_are_prices(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="prices"):
        Prices(**wrong)


def simulated(alphas: Sequence[float], prices: Prices, batch: int, passes: int, seed: int) -> tuple[float, float]:
    """Tokens a sequence and pass, and speed-up, of drafting that is played out and timed step by step."""
    rng, tokens, seconds = random.Random(seed), 0, 0.0
    one = (1 - prices.host) / prices.cost(1)
    for _ in range(passes):
        seconds += one * prices.cost(batch * (len(alphas) + 1))
        for _ in alphas:
            seconds += one * prices.draft * prices.cost(batch)
        for _ in range(batch):
            seconds += prices.host + prices.ask
            tokens += 1
            for alpha in alphas:
                if rng.random() >= alpha:
                    break
                tokens += 1
    plain = batch * prices.host + one * prices.cost(batch)  # emits a token for each sequence
    return tokens / (passes * batch), tokens / batch * plain / seconds


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("alphas", [[0.8] * 5, [0.3, 0.9, 0.95, 1.0], [0.99, 0.1]])
@pytest.mark.parametrize("prices", [Prices(draft=0.05), Prices(draft=0.02, ask=0.1, host=0.07, cost=SLOPE)])
def test_against_monte_carlo(batch: int, alphas: list[float], prices: Prices) -> None:
    """Played out, the mean of 40,000 passes is within four standard errors: a false alarm in 16,000."""
    chain = chains(alphas, prices, batch)[-1]
    tokens, speedup = simulated(alphas, prices, batch, 40_000 // batch, seed=1)
    chances = reach(alphas)
    squares = sum((2 * depth - 1) * chance for depth, chance in enumerate(chances, start=1))
    error = 4 * math.sqrt((squares - sum(chances) ** 2) / 40_000)
    assert abs(tokens - chain.tokens) < error
    assert abs(speedup / chain.speedup - 1) < error / chain.tokens


def test_the_throttle() -> None:
    """On a machine that is short of arithmetic, drafts shrink as sequences share a pass, and the bar for one token rises."""
    prices = Prices(ask=0.02, cost=SLOPE)
    lengths = [best(chains([0.8] * 16, prices, batch)).depth for batch in (1, 4, 16, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 3
    assert lengths[-1] == 0
    bars = [least(prices, batch) for batch in (1, 4, 16, 64)]
    assert bars == sorted(bars)
    assert best(chains([bars[1] + 1e-6], prices, 4)).depth == 1
    assert best(chains([bars[1] - 1e-6], prices, 4)).depth == 0


def test_free_rows_have_no_throttle() -> None:
    """Where every pass costs the same, the batch does not matter."""
    one, many = (chains([0.8] * 5, Prices(draft=0.05, cost=free), batch)[-1] for batch in (1, 100))
    assert one.speedup == pytest.approx(many.speedup)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_a_mix_of_passes_is_their_mean(drafts: list[int], rng: random.Random) -> None:
    """Passes of any lengths, counted by depth as the engine counts them, cost and emit what they do one by one."""

    def cost(rows: int) -> float:
        return 2.0 + 0.1 * rows**2

    accepted = [rng.randint(0, k) for k in drafts]
    by_depth = ([sum(n >= depth for n in some) / len(drafts) for depth in range(1, 7)] for some in (drafts, accepted))
    mix = Mix(*by_depth)
    assert mix.tokens == pytest.approx(1 + sum(accepted) / len(drafts))
    mean = sum(cost(k + 1) for k in drafts) / len(drafts)
    assert mix.rows(cost) == pytest.approx(mean / cost(1))
    expected = mix.tokens / (0.2 + 0.9 * mean / cost(1))
    assert mix.speedup(Prices(host=0.1, cost=cost), beside=0.2) == pytest.approx(expected)
