"""From one row of logits to one token: the only doors between a model's numbers and a choice.

``warp`` turns a row into the law that the request asked for, ``choose`` takes the token of a position from it. Every row
goes through them, committed or drafted, so plain decoding and speculation cannot differ here. Noise is a pure function of
(seed, position, token): the token at a position is ``argmax(logp + noise)``, an exact sample of the law (the Gumbel-max
trick), and the same one however the position was reached (Daliri, Musco, Suresh, arXiv 2408.07978).

A row is at most a few hundred kilobytes and is wanted on the host, one row at a time, so the arithmetic is numpy's, in
float64. Softmax is torch's, which works on a single row in one thread: its sums do not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.config import SamplingParams
from specdec.history import History, Ids
from specdec.kernels.base import Draw, gumbel
from specdec.types import TokenLogprob

if TYPE_CHECKING:
    from specdec.kernels.base import Kernels

Floats = NDArray[np.float64]

LOGPROB_FLOOR = -9999.0
"""Reported for tokens that the model itself rules out, so that every reported log-probability is finite."""

NUCLEUS_WIDTH = 256
"""Tokens that are sorted first to find a nucleus; eight times more each time they do not hold enough mass."""


class SamplingError(RuntimeError):
    """A row from which no token can be chosen; the message says why and at which position."""


def warp(
    logits: Tensor,
    params: SamplingParams,
    history: History,
    path: Sequence[int] = (),
    end_tokens: Collection[int] = (),
    mask: Tensor | None = None,
) -> Tensor:
    """The law of the next token, as log-probabilities.

    In this order: repetition penalty, frequency and presence penalties, logit bias, bans (bad words, end tokens before
    ``min_tokens``, mask), temperature, top-k, top-p, min-p, and what is left is normalised. Larger logits come first, and
    lower ids on a tie, wherever an order is needed. Temperature 0 gives all mass to the first token of that order.

    Args:
        logits: [V] float32, the model's own.
        history: the committed tokens, the pending one included.
        path: the drafted tokens after the pending one, down to and including this row's own.
        end_tokens: tokens that end the sequence, banned together with ``stop_token_ids`` while ``min_tokens`` are not out.
        mask: bool [V], False where a grammar forbids the token.

    Returns:
        [V] float64 on the CPU, normalised; exactly -inf for tokens that were removed.

    Raises:
        SamplingError: the logits hold NaN or +inf, or no token is left.
    """
    return _law(_processed(logits, params, history, path, end_tokens, mask), params, history, path)


def _law(z: Floats | NDArray[np.float32], params: SamplingParams, history: History, path: Sequence[int]) -> Tensor:
    """The law that processed logits [V] give."""
    if params.greedy:
        return _scatter(np.array([_first(z, history, path)]), torch.zeros(1, dtype=torch.float64), len(z))
    best = float(z[_first(z, history, path)])
    ids = _largest(z, params.top_k) if 0 < params.top_k < len(z) else None  # None: all tokens, in order of id
    kept = (z if ids is None else z[ids]).astype(np.float64)
    with np.errstate(over="ignore"):  # a temperature near 0 sends all but the best to -inf, as it should
        s = (kept - best) / params.temperature
    if params.top_p < 1 or params.min_p > 0:
        p = torch.softmax(torch.from_numpy(s), 0).numpy()
        least = params.min_p * p.max()
        inside = _nucleus(kept, p, params.top_p) if params.top_p < 1 else np.flatnonzero(p >= least)
        inside = inside[p[inside] >= least]
        ids, s = inside if ids is None else ids[inside], s[inside]
    logp = torch.log_softmax(torch.from_numpy(s), 0)
    return logp if ids is None else _scatter(ids, logp, len(z))


def greedy(
    logits: Tensor,
    params: SamplingParams,
    history: History,
    path: Sequence[int] = (),
    end_tokens: Collection[int] = (),
    mask: Tensor | None = None,
) -> int:
    """The most likely token after penalties and bans, lowest id on a tie. Arguments and errors as for ``warp``."""
    return _first(_processed(logits, params, history, path, end_tokens, mask), history, path)


def draw(logp: Tensor, seed: int, position: int, kernels: Kernels | None = None) -> int:
    """The token of a position: the argmax of logp [V] float64 plus the noise of (seed, position, token).

    ``kernels`` evaluates the noise only where it can matter; without it every possible token gets its noise, which is the
    definition. The noise of a token depends neither on V nor on which other tokens are possible.
    """
    if kernels is not None:
        return kernels.race(logp, seed, position)
    possible = torch.from_numpy(np.flatnonzero(logp.numpy() > -np.inf))
    return int(possible[(logp[possible] + gumbel(seed, position, possible)).argmax()])


def choose(
    logits: Tensor,
    params: SamplingParams,
    history: History,
    path: Sequence[int],
    seed: int,
    end_tokens: Collection[int] = (),
    mask: Tensor | None = None,
    kernels: Kernels | None = None,
) -> int:
    """The token that follows ``history`` and ``path``: greedy at temperature 0, else the draw of its position.

    Its position is the number of tokens before it. Arguments and errors as for ``warp`` and ``draw``.
    """
    if params.greedy:
        return greedy(logits, params, history, path, end_tokens, mask)
    position = len(history) + len(path)
    z = _processed(logits, params, history, path, end_tokens, mask)
    if kernels is not None:  # the argmax needs no normalising
        row, temperature, top_k = torch.from_numpy(z), params.temperature, max(0, params.top_k)
        if top_k == 0 and params.top_p == 1 and params.min_p == 0:
            token: int | None = kernels.race(row, seed, position, temperature)
        else:
            token = kernels.race_among(row, seed, position, temperature, top_k, params.top_p, params.min_p)
        if token is not None:
            return token if token >= 0 else _first(z, history, path)  # which says what is wrong
    return draw(_law(z, params, history, path), seed, position, kernels)


def draw_of(row: int, params: SamplingParams, history: History, seed: int) -> Draw | None:
    """What ``choose`` does with a row after ``history``, for a call that chooses from many rows at once: its token, where
    that call gives one, is that of ``choose``. None where the logits must be processed first."""
    if (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
        or params.logit_bias
        or params.bad_words_ids
        or (params.min_tokens and history.n_output < params.min_tokens)
    ):
        return None
    return Draw(row, seed, len(history), max(0, params.top_k), params.temperature, params.top_p, params.min_p)


def derive_seed(seed: int, index: int) -> int:
    """The seed of the index-th of n samples, in [0, 2^63): index 0 keeps the seed, and different indices get different ones.

    seed + mix(golden * index) mod 2^63, where mix is a bijection of the 63-bit integers (splitmix64's steps) that keeps 0.
    """
    x = (0x9E3779B97F4A7C15 * index) % 2**63
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**63
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**63
    return (seed + (x ^ x >> 31)) % 2**63


def logprob(logits: Tensor, token: int, k: int) -> TokenLogprob:
    """The log-probability of a token under the model's own distribution, before any processing, and the k best tokens.

    The best are sorted, lowest id first on a tie. Values are at least ``LOGPROB_FLOOR``, so all are finite.

    Raises:
        SamplingError: the logits hold NaN or +inf, or all are -inf.
    """
    raw: NDArray[np.float32] = logits.detach().cpu().numpy()
    best = float(raw.max())
    if not math.isfinite(best):
        raise SamplingError(f"no log-probabilities: the largest of the model's logits is {best}")
    logp = torch.log_softmax(torch.from_numpy(raw.astype(np.float64)), 0).numpy().clip(min=LOGPROB_FLOOR)
    top = _largest(raw, min(k, len(raw))).tolist() if k else ()
    return TokenLogprob(token, float(logp[token]), tuple((t, float(logp[t])) for t in top))


def _processed(
    logits: Tensor,
    params: SamplingParams,
    history: History,
    path: Sequence[int],
    end_tokens: Collection[int],
    mask: Tensor | None,
) -> Floats | NDArray[np.float32]:
    """Penalties, bias and bans: float64 [V], or the logits as they are where nothing is asked for."""
    banned = _banned(params, history, path, end_tokens)
    penalised = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
    raw: NDArray[np.float32] = logits.detach().cpu().numpy()
    if not (penalised or params.logit_bias or banned or mask is not None):
        return raw
    z = raw.astype(np.float64)
    if params.repetition_penalty != 1:
        ids = history.distinct(path)
        values = z[ids]
        z[ids] = np.where(values < 0, values * params.repetition_penalty, values / params.repetition_penalty)
    if params.frequency_penalty != 0 or params.presence_penalty != 0:
        ids, counts = history.emitted(path)
        z[ids] -= params.frequency_penalty * counts + params.presence_penalty
    for token, bias in params.logit_bias.items():
        z[token] += bias
    if banned:
        z[list(banned)] = -np.inf
    if mask is not None:
        z[~mask.cpu().numpy()] = -np.inf
    return z


def _banned(params: SamplingParams, history: History, path: Sequence[int], end_tokens: Collection[int]) -> set[int]:
    """Tokens that would complete a bad word, and the end tokens while too few tokens are out."""
    banned: set[int] = set()
    for *start, last in params.bad_words_ids:
        if history.tail(path, len(start)) == tuple(start):
            banned.add(last)
    if history.n_output + len(path) < params.min_tokens:
        banned.update(end_tokens, params.stop_token_ids)
    return banned


def _first(z: Floats | NDArray[np.float32], history: History, path: Sequence[int]) -> int:
    """The id of the largest logit, lowest on a tie; an error where that is not a finite number."""
    token = int(z.argmax())  # the first NaN where there is one
    best = float(z[token])
    if math.isfinite(best):
        return token
    where = f"at position {len(history) + len(path)}"
    if best == -math.inf:
        raise SamplingError(f"no token is left {where}: the model, bad words, min_tokens or a mask rule out every one")
    raise SamplingError(f"the model's logits hold {best} {where}: its weights or its inputs are damaged")


def _largest(z: Floats | NDArray[np.float32], k: int) -> Ids:
    """[k] the ids of the k largest, largest first, lowest id first on a tie. A partition, then a sort of what it leaves."""
    least = np.partition(z, len(z) - k)[len(z) - k] if k < len(z) else -np.inf
    ids = np.flatnonzero(z >= least)
    ids = ids[np.argsort(-z[ids])]  # several times faster than the stable sort, so ties are put right afterwards
    same = z[ids[1:]] == z[ids[:-1]]
    if same.any():
        tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
        sorted_ids = np.sort(ids[tied])
        ids[tied] = sorted_ids[np.argsort(-z[sorted_ids], kind="stable")]
    return ids[:k]


def _nucleus(z: Floats, p: Floats, top_p: float) -> Ids:
    """The ids, in order, of the tokens before which less than ``top_p`` of the mass lies. The first one always."""
    width = NUCLEUS_WIDTH
    while True:
        ids = _largest(z, min(width, len(z)))
        mass = np.cumsum(p[ids])
        if mass[-1] >= top_p or len(ids) == len(z):
            return ids[: 1 + int(np.searchsorted(mass, top_p))]
        width *= 8


def _scatter(ids: Ids, logp: Tensor, n: int) -> Tensor:
    """[n] float64: logp at ids, -inf elsewhere."""
    law = np.full(n, -np.inf)
    law[ids] = logp.numpy()
    return torch.from_numpy(law)
