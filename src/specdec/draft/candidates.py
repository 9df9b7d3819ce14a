"""Which tokens a trained drafter puts forward for a row of its logits, and how likely each of them is to be accepted.

The target's token at absolute position t is ``argmax_v(z_v + T g(seed, t, v))`` with its logits z, the temperature T and noise
g that a drafter can compute as well (Daliri, Musco, Suresh, arXiv 2408.07978). So candidates are ranked by that same sum over
the drafter's logits, which at temperature 0 are ranked as they stand.

A candidate is accepted where it wins the target's sum too. Say the target's logits are the drafter's plus errors: if these are
standard Gumbel noise, independent of each other, v wins with the chance ``softmax_v(z_v + T g_v)``. Training by cross-entropy
on greedy tokens makes just this true at temperature 0, where the chance is the drafter's own softmax; it is assumed at every
temperature. Tested with a 135M model as target and the same model, shown only the last 3 or 10 tokens, as drafter (960 rows at
temperature 1): estimates from 0 to 1 in five classes came true in 10, 23, 25, 48, 69 and in 16, 33, 56, 67, 88 of 100 cases.

Only the 32 most likely tokens of a row are given noise: in that trial all 49,152 drafted no better (21.2 against 21.4,
43.8 against 43.4 of 100 right). What the others add to the sum of the softmax is estimated from their share of the mass, times
what exp(T g) typically is on average over many tokens: its mean, gamma(1 - T), has no bound from T = 1 on, and there the
luckiest of some thousand tokens sets it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.kernels.base import Kernels

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


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
        k: at most 32 and Vd.
        vocabulary: [Vd] the target's id of each of the drafter's; None where they are the same.

    Returns:
        [n, k] the target's ids, [n, k] chances in [0, 1].
    """
    tokens, chances = kernels.candidates(
        logits,
        torch.tensor(temperatures, dtype=torch.float64),
        torch.tensor(seeds),
        torch.tensor(positions),
        k,
        None if vocabulary is None else torch.from_numpy(vocabulary),
    )
    return tokens.numpy(), chances.numpy()
