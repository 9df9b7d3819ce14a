"""Candidates: ranked as the target would choose, with its noise, and with chances that come true."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from specdec import kernels
from specdec.config import SamplingParams
from specdec.draft.candidates import candidates
from specdec.history import History
from specdec.kernels.base import WIDTH, gumbel
from specdec.sampling import choose


@functools.lru_cache(maxsize=1)
def ops():
    return kernels.select(torch.device("cpu"))


def rows(n: int, v: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(n, v, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("mapped", [False, True])
def test_a_drafter_that_knows_the_targets_logits_is_always_right(mapped: bool) -> None:
    """The best candidate is the token that the engine's sampler takes, at any temperature, in one batch of all of them.

    With a reduced vocabulary the noise is that of the target's ids, not of the drafter's.
    """
    n, v = 60, WIDTH
    vocabulary = np.sort(np.random.default_rng(0).permutation(500)[:v]).astype(np.int64) if mapped else None
    logits = rows(n, v)
    temperatures = [(0.0, 0.3, 1.0, 1.7)[i % 4] for i in range(n)]
    seeds, positions = list(range(100, 100 + n)), [3 * i + 1 for i in range(n)]
    tokens, chances = candidates(logits, temperatures, seeds, positions, 4, ops(), vocabulary)
    for i in range(n):
        full = logits[i]
        if vocabulary is not None:
            full = torch.full((500,), -torch.inf)
            full[torch.from_numpy(vocabulary)] = logits[i]
        history = History([0] * positions[i])
        assert tokens[i, 0] == choose(full, SamplingParams(temperature=temperatures[i]), history, (), seeds[i])
    assert all(len(set(row)) == 4 for row in tokens.tolist())
    assert (np.diff(chances, axis=1) <= 0).all()


def test_without_temperature_candidates_are_the_best_and_chances_the_softmax() -> None:
    logits = rows(3, 1000)
    tokens, chances = candidates(logits, [0.0] * 3, [1] * 3, [5] * 3, 8, ops())
    probabilities, ids = logits.softmax(1).topk(8)
    assert (tokens == ids.numpy()).all()
    assert chances == pytest.approx(probabilities.numpy(), rel=1e-5)


@pytest.fixture(scope="module")
def guessed():
    """[n, V] what a drafter scores, what the target's logits are, and the noise of each position by the seed 9."""
    n, v = 4000, 2000
    rng = np.random.default_rng(1)
    scores = -2.0 * np.log(np.arange(1, v + 1)) + rng.normal(size=(n, v))  # a law with a long tail, as of text
    noise = np.stack([gumbel(9, position, torch.arange(v)).numpy() for position in range(n)])
    return scores, scores + rng.gumbel(size=(n, v)), noise


@pytest.mark.parametrize(("temperature", "tolerance"), [(0.0, 0.05), (0.5, 0.05), (1.0, 0.06), (1.5, 0.12)])
def test_chances_come_true(guessed, temperature: float, tolerance: float) -> None:
    """Where the target's logits are the drafter's with errors of the kind assumed, as often as estimated, class by class."""
    scores, truth, noise = guessed
    n = len(scores)
    target = truth + temperature * noise
    tokens, chances = candidates(torch.from_numpy(scores).float(), [temperature] * n, [9] * n, list(range(n)), 3, ops())
    right = tokens == target.argmax(1)[:, None]
    for low, high in ((0.0, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 1.0)):
        inside = (chances >= low) & (chances < high)
        if inside.sum() > 200:
            assert right[inside].mean() == pytest.approx(chances[inside].mean(), abs=tolerance)
    assert right.sum() == pytest.approx(chances.sum(), rel=4 * tolerance)


def test_any_temperature_gives_finite_chances() -> None:
    logits = rows(6, 300)
    logits[5, 3] = 1e4  # a certain token
    tokens, chances = candidates(logits, [1e-6, 0.0, 5.0, 1e3, 1e9, 1.0], [1] * 6, [5] * 6, 32, ops())
    assert np.isfinite(chances).all()
    assert ((chances >= 0) & (chances <= 1)).all()
    assert (chances.sum(1) <= 1 + 1e-9).all()
    assert tokens[5, 0] == 3
