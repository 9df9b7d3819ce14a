"""Which tokens a trained drafter puts forward for a row of its logits, and how likely each of them is to be accepted.

The target's token at absolute position t is ``argmax_v(z_v + T g(seed, t, v))`` with its logits z, the temperature T and noise
g that a drafter can compute as well (Daliri, Musco, Suresh, arXiv 2408.07978). So candidates are ranked by that same sum over
the drafter's logits, which at temperature 0 are ranked as they stand.

A candidate is accepted where it wins the target's sum too. Say the target's logits are the drafter's plus errors: if these are
standard Gumbel noise, independent of each other, v wins with the chance ``softmax_v(z_v + T g_v)``. Training by cross-entropy
on greedy tokens makes just this true at temperature 0, where the chance is the drafter's own softmax; it is assumed at every
temperature. Tested with a 135M model as target and the same model, shown only the last 3 or 10 tokens, as drafter (960 rows at
temperature 1): estimates from 0 to 1 in five classes came true in 10, 23, 25, 48, 69 and in 16, 33, 56, 67, 88 of 100 cases.

Only the ``WIDTH`` most likely tokens of a row are given noise: in that trial all 49,152 drafted no better (21.2 against 21.4,
43.8 against 43.4 of 100 right). What the others add to the sum of the softmax is estimated from their share of the mass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.kernels.base import Kernels

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]

WIDTH = 32
"""Most likely tokens of a row that are given noise."""

TAIL = 1000.0
"""How many tokens, roughly, share the mass of a row that is not among its most likely ones."""

_ONE, _GOLDEN = np.uint64(1), np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


def candidates(
    logits: Tensor,
    temperatures: Many[float],
    seeds: Many[int],
    positions: Many[int],
    k: int,
    kernels: Kernels,
    vocabulary: Ids | None = None,
) -> tuple[Ids, Floats]:
    """The k best candidates of each row, best first, and the chance of each to be the next token if those before it are right.

    Args:
        logits: [n, Vd] float32, the drafter's.
        temperatures: [n], of the request that the row belongs to.
        seeds: [n], of the request.
        positions: [n], absolute, of the token that the row is about.
        k: at most ``WIDTH`` and Vd.
        vocabulary: [Vd] the target's id of each of the drafter's; None where they are the same.

    Returns:
        [n, k] the target's ids, [n, k] chances in [0, 1].
    """
    warm = any(temperatures)
    _, best = kernels.top(logits, min(WIDTH, logits.shape[1]) if warm else k)
    logp = torch.log_softmax(logits, 1).gather(1, best).double().numpy()
    ids: Ids = best.numpy()
    tokens = ids if vocabulary is None else vocabulary[ids]
    if not warm:
        return tokens, np.exp(logp)
    heat = np.array(temperatures)
    scores = logp + heat[:, None] * noise(seeds, positions, tokens)
    order = np.argsort(-scores, 1, kind="stable")[:, :k]
    rows = np.arange(len(order))[:, None]
    rest = np.log(np.maximum(1 - np.exp(logp).sum(1), 1e-9)) + _spread(heat)
    most = np.maximum(scores[rows[:, 0], order[:, 0]], rest)[:, None]
    total = np.exp(scores - most).sum(1) + np.exp(rest - most[:, 0])
    return tokens[rows, order], np.exp(scores[rows, order] - most) / total[:, None]


def _spread(heat: Floats) -> Floats:
    """The logarithm of what exp(T g) is on average over the many tokens that are not ranked, by temperature.

    The mean, gamma(1 - T), has no bound at 1; the typical value over some number of tokens has: past 1 it is that of the
    luckiest of them.
    """
    return np.log1p(4 * heat * heat) + np.maximum(heat - 1, 0) * math.log(TAIL)


def noise(seeds: Many[int], positions: Many[int], tokens: Ids) -> Floats:
    """tokens [n, w] -> [n, w]: ``kernels.base.gumbel`` with the seed and the position of each row, for all rows at once."""
    keys = _mix(np.array(seeds, np.uint64) + _GOLDEN * (np.array(positions, np.uint64) + _ONE))
    h = _mix(keys[:, None] + _GOLDEN * (tokens.astype(np.uint64) + _ONE))
    u = ((h >> _SHIFTS[3]).astype(np.float64) + 0.5) * 2.0**-53
    g: Floats = -np.log(-np.log(u))
    return g


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> _SHIFTS[0])) * _FIRST
    x = (x ^ (x >> _SHIFTS[1])) * _SECOND
    return x ^ (x >> _SHIFTS[2])
