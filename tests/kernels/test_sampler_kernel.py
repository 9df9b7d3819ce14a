"""The sampler's kernels: the largest entries with ties to the lowest id, and the race that equals brute force."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native import ALL, FAST, NATIVE
from torch import Tensor

from specdec.kernels import set_threads
from specdec.kernels.base import WIDTH, Draw, Kernels, gumbel

every = pytest.mark.parametrize("kernels", ALL, ids=lambda kernels: kernels.name)


def brute_top(row: Tensor, k: int) -> list[int]:
    values = row.tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def brute_race(z: Tensor, seed: int, position: int, temperature: float = 1.0) -> int:
    s = (z.double() - z.max().double()) / temperature
    scores = torch.where(z == -torch.inf, -torch.inf, s + gumbel(seed, position, torch.arange(len(z))))
    return int((scores == scores.max()).nonzero()[0, 0])


@every
@pytest.mark.parametrize("n", [1, 2, 31, 127, 128, 129, 300, 2000])
def test_top_in_order_with_ties_to_the_lowest_id(kernels: Kernels, n: int) -> None:
    """Few distinct values make ties everywhere; -inf, inf and both zeros are ordinary values."""
    noise = torch.Generator().manual_seed(n)
    rows = torch.stack(
        [
            torch.randn(n, generator=noise),
            torch.randint(-2, 3, (n,), generator=noise).float(),
            torch.randn(n, generator=noise).sort().values,
            torch.randn(n, generator=noise).sort(descending=True).values,
            torch.where(torch.rand(n, generator=noise) < 0.9, -torch.inf, torch.randn(n, generator=noise)),
            torch.full((n,), -torch.inf),
            torch.tensor([0.0, -0.0, torch.inf, -torch.inf]).repeat(n)[:n],
        ]
    )
    for k in sorted({1, 2, 8, 20, 32} & set(range(n + 1))):
        values, ids = kernels.top(rows, k)
        assert ids.tolist() == [brute_top(row, k) for row in rows]
        assert torch.equal(values, rows.gather(1, ids))


@every
@pytest.mark.parametrize("at", [0, 5, 127, 128, 140, 299])
def test_a_nan_in_a_row_shows(kernels: Kernels, at: int) -> None:
    """Wherever it stands, among finite or infinite values, and only in its own row."""
    rows = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    rows[1, at], rows[2] = torch.nan, -torch.inf
    rows[2, at], rows[3, 0] = -torch.nan, torch.inf
    for k in (1, 8):
        values, ids = kernels.top(rows, k)
        assert values[:, 0].isnan().tolist() == [False, True, True, False]
        assert ((ids >= 0) & (ids < 300)).all()


@every
def test_top_refuses_lists_longer_than_the_row(kernels: Kernels) -> None:
    for k in (0, 6):
        with pytest.raises(ValueError, match="k must be in"):
            kernels.top(torch.zeros(2, 5), k)


def test_top_is_the_same_on_two_threads() -> None:
    rows, before, results = torch.randn(16, 40_000, generator=torch.Generator().manual_seed(0)), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            set_threads(threads)
            results.append(FAST.top(rows, 8)[1])
    finally:
        set_threads(before)
    assert torch.equal(*results)


def laws(n: int, chance: torch.Generator) -> dict[str, Tensor]:
    """Rows of log-probabilities of many characters."""
    random = torch.randn(n, generator=chance, dtype=torch.float64)
    survivor = torch.full((n,), -torch.inf, dtype=torch.float64)
    survivor[int(torch.randint(n, (), generator=chance))] = 0
    filtered = torch.where(random < 1, -torch.inf, random)
    filtered[-1] = -2
    return {
        "equal": torch.full((n,), -3.0, dtype=torch.float64),
        "mild": random.log_softmax(0),
        "sharp": (random * 12).log_softmax(0),
        "far apart": (random * 300).log_softmax(0),
        "descending": -torch.arange(n, dtype=torch.float64) / 10,
        "ascending": torch.arange(n, dtype=torch.float64) / 10,
        "one survivor": survivor,
        "filtered": filtered,
    }


def test_race_equals_brute_force() -> None:
    """A thousand races at sizes around the block of 64, at seeds and positions up to the largest, in every implementation."""
    chance = torch.Generator().manual_seed(7)
    for n in (1, 2, 63, 64, 65, 128, 200, 1000):
        for name, logp in laws(n, chance).items():
            for draw in range(16):
                seed = [draw, 2**63 - 1 - draw, int(torch.randint(2**62, (), generator=chance))][draw % 3]
                position = [draw, 2**40 + draw][draw % 2]
                for temperature, z in ((1.0, logp), (0.7, logp), (1.3, logp.float() * 4)):
                    expected = brute_race(z, seed, position, temperature)
                    for kernels in ALL:
                        found = kernels.race(z, seed, position, temperature)
                        assert found == expected, (kernels.name, n, name, seed, position, temperature)


@settings(max_examples=200)
@given(
    st.lists(st.one_of(st.floats(-800, 0), st.just(float("-inf")), st.sampled_from([-1.0, -2.0])), min_size=1, max_size=90),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**31),
)
def test_race_equals_brute_force_on_any_row(values: list[float], seed: int, position: int) -> None:
    logp = torch.tensor(values, dtype=torch.float64)
    expected = brute_race(logp, seed, position) if max(values) > float("-inf") else -1
    assert [kernels.race(logp, seed, position) for kernels in NATIVE] == [expected] * len(NATIVE)


def test_race_over_a_vocabulary_too_large_for_the_usual_blocks() -> None:
    logp = torch.randn(270_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for position in range(3):
        assert FAST.race(logp, 5, position) == brute_race(logp, 5, position)


def test_race_draws_by_the_law() -> None:
    """20,000 races over five tokens: chi-square with 4 degrees of freedom below 23.5, which chance exceeds once in 10,000."""
    p = torch.tensor([0.4, 0.3, 0.2, 0.08, 0.02], dtype=torch.float64)
    logp, n = torch.cat([p.log(), torch.full((60,), -torch.inf, dtype=torch.float64)]), 20_000
    drawn = torch.tensor([FAST.race(logp, 11, position) for position in range(n)])
    counts = drawn.bincount(minlength=len(logp))
    assert counts[5:].sum() == 0
    assert (((counts[:5] - n * p) ** 2) / (n * p)).sum() < 23.5


@every
@pytest.mark.parametrize(
    "bad",
    [[-torch.inf] * 70, [-1.0] * 69 + [torch.nan], [torch.nan] + [-torch.inf] * 69, [0.0] * 69 + [torch.inf]],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_race_without_a_law_has_no_winner(kernels: Kernels, bad: list[float], dtype: torch.dtype) -> None:
    assert kernels.race(torch.tensor(bad, dtype=dtype), 0, 0) == -1


def brute_candidates(
    row: Tensor, heat: float, seed: int, position: int, k: int, names: Tensor
) -> tuple[list[int], list[float]]:
    """By the formula of the contract."""
    width = WIDTH if heat else k
    ids = torch.tensor(brute_top(row, width))
    logp = row.double().log_softmax(0)[ids]
    scores = logp + heat * gumbel(seed, position, names[ids])
    rest = (1 - logp.exp().sum()).clamp(min=1e-9) * (1 + 4 * heat**2) * 1000 ** max(0.0, heat - 1)
    chances = scores.exp() / (scores.exp().sum() + rest)
    order = chances.argsort(descending=True, stable=True)[:k]
    return names[ids[order]].tolist(), chances[order].tolist()


@every
@pytest.mark.parametrize("n", [1, 5, 32, 33, 300, 2000])
def test_candidates_by_their_formula(kernels: Kernels, n: int) -> None:
    """Rows of all temperatures side by side, the columns named by other numbers or not."""
    dice = torch.Generator().manual_seed(n)
    logits = torch.randn(8, n, generator=dice) * 4
    logits[3, : n // 2] = -torch.inf
    heat = torch.tensor([0.0, 0.2, 0.7, 1.0, 1.6, 1e-7, 0.0, 1.0], dtype=torch.float64)
    seeds, positions = torch.tensor([0, 5, 2**63 - 1, 7, 7, 7, 9, 7]), torch.tensor([0, 1, 100_000, 3, 3, 4, 9, 4])
    for names in (None, torch.randperm(5 * n, generator=dice)[:n]):
        for k in sorted({1, min(n, 4), min(n, WIDTH)}):
            tokens, chances = kernels.candidates(logits, heat, seeds, positions, k, names)
            for i in range(8):
                known = torch.arange(n) if names is None else names
                wanted = brute_candidates(logits[i], float(heat[i]), int(seeds[i]), int(positions[i]), k, known)
                finite = sum(chance > 0 for chance in wanted[1])  # what is ruled out has no order
                assert tokens[i, :finite].tolist() == wanted[0][:finite]
                assert chances[i].tolist() == pytest.approx(wanted[1], rel=1e-5, abs=1e-12)


@every
def test_candidates_of_any_temperature_and_of_damaged_rows(kernels: Kernels) -> None:
    """Chances stay within [0, 1] where numbers are extreme; a NaN stays in its row."""
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    logits[0, 7], logits[1, 8] = 1e4, torch.nan
    heat = torch.tensor([1.0, 1.0, 1e-9, 1e3, 1e9, 5.0], dtype=torch.float64)
    tokens, chances = kernels.candidates(logits, heat, torch.arange(6), torch.arange(6), 4, None)
    assert chances.isnan().any(1).tolist() == [False, True, False, False, False, False]
    good = chances[[0, 2, 3, 4, 5]]
    assert bool(((good >= 0) & (good <= 1)).all())
    assert int(tokens[0, 0]) == 7
    assert bool(((tokens >= 0) & (tokens < 300)).all())


@pytest.mark.parametrize("k", [0, 33])
def test_candidates_refuse_what_does_not_fit(k: int) -> None:
    row, one = torch.zeros(1, 64), torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="k must be in"):
        FAST.candidates(row, one.double(), one, one, k, None)
    with pytest.raises(ValueError, match="as many"):
        FAST.candidates(row, one.double(), one, one, 4, one)


FILTERS = [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (40, 0.8, 0.02)]


def drawn_alone(kernels: Kernels, logits: Tensor, draw: Draw) -> int:
    """What the calls for single rows give, -1 where they do not say."""
    z = logits[draw.row]
    if draw.temperature == 0:
        values, ids = kernels.top(z[None], 1)
        return int(ids[0, 0]) if values[0, 0].isfinite() else -1
    if (draw.top_k, draw.top_p, draw.min_p) == FILTERS[0]:
        return kernels.race(z, draw.seed, draw.position, draw.temperature)
    token = kernels.race_among(z, draw.seed, draw.position, draw.temperature, draw.top_k, draw.top_p, draw.min_p)
    return -1 if token is None else token


@pytest.mark.skipif(not NATIVE, reason="the native kernels are not built")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kernels", NATIVE, ids=lambda kernels: kernels.name)
def test_many_draws_are_those_of_each_row_alone(kernels: Kernels, threads: int) -> None:
    """In any order and company, twice of a row, on any number of threads; ties, damaged and empty rows included."""
    noise = torch.Generator().manual_seed(5)
    logits = 4 * torch.randn(24, 20_000, generator=noise)
    logits[3] = logits[3].round()  # ties
    logits[5, 77], logits[9, 3], logits[11] = torch.nan, torch.inf, -torch.inf
    logits[13, :19_999] = -torch.inf
    draws = [
        Draw(row, seed=row * 7 + 2**60, position=row % 5, top_k=k, temperature=temperature, top_p=p, min_p=q)
        for row in [*range(24), 3, 0]
        for temperature in (0.0, 0.3, 1.0, 2.5)
        for k, p, q in FILTERS
    ]
    random.Random(2).shuffle(draws)
    before = torch.get_num_threads()
    set_threads(threads)
    try:
        tokens = kernels.draw_rows(logits, draws)
    finally:
        set_threads(before)
    assert tokens == [drawn_alone(kernels, logits, draw) for draw in draws]
    for draw, token in zip(draws, tokens, strict=True):
        if draw.temperature == 0 and token >= 0:
            assert token == int(logits[draw.row].numpy().argmax())  # numpy's is the first of equals
        if draw.row in (5, 9, 11):
            assert token == -1
    assert tokens.count(-1) < len(draws) / 4
    assert kernels.draw_rows(logits, []) == []


@pytest.mark.skipif(not NATIVE, reason="the native kernels are not built")
@pytest.mark.parametrize("row", [-1, 2])
def test_draws_of_rows_that_are_not_there_are_refused(row: int) -> None:
    with pytest.raises(ValueError, match="draws must name rows of the 2 that there are"):
        FAST.draw_rows(torch.zeros(2, 50), [Draw(row, 0, 0, 0, 0.0, 1.0, 0.0)])
