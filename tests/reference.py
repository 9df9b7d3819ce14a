"""Plain decoding as naive as can be: recompute the whole context for every token, sample in a straight line of numpy.

Nothing of the engine, the sampler or the verifier is used, so that agreement means something.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from specdec.config import SamplingParams

M64 = 2**64 - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def gumbel(seed: int, position: int, token: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = mix((seed + golden * (position + 1)) & M64)
    u = ((mix((key + golden * (token + 1)) & M64) >> 11) + 0.5) * 2.0**-53
    return -math.log(-math.log(u))


def next_token(logits: np.ndarray, tokens: list[int], n_prompt: int, p: SamplingParams, end: frozenset[int], seed: int) -> int:
    """logits [V] of the last of ``tokens``."""
    z = logits.astype(np.float64)
    output = tokens[n_prompt:]
    for t in set(tokens):
        z[t] = z[t] * p.repetition_penalty if z[t] < 0 else z[t] / p.repetition_penalty
    for t, count in Counter(output).items():
        z[t] -= p.frequency_penalty * count + p.presence_penalty
    for t, bias in p.logit_bias.items():
        z[t] += bias
    for word in p.bad_words_ids:
        if tuple(tokens[len(tokens) - len(word) + 1 :]) == word[:-1]:
            z[word[-1]] = -np.inf
    if len(output) < p.min_tokens:
        z[list(end)] = -np.inf
    order = np.argsort(-z, kind="stable")
    if p.temperature == 0:
        return int(order[0])
    z /= p.temperature
    keep = order[: p.top_k] if p.top_k > 0 else order
    prob = np.exp(z[keep] - z[order[0]])
    prob /= prob.sum()
    keep = keep[np.cumsum(prob) - prob < p.top_p]
    prob = np.exp(z[keep] - z[order[0]])
    keep, prob = keep[prob >= p.min_p], prob[prob >= p.min_p]
    return max(
        (int(t) for t, q in zip(keep, prob, strict=True) if q > 0), key=lambda t: (z[t] + gumbel(seed, len(tokens), t), -t)
    )


def decode(logits_of, prompt, params: SamplingParams, end: frozenset[int], seed: int, context: int) -> tuple[list[int], str]:
    """``logits_of(tokens) -> [V]`` recomputes everything. Returns the output and why it ended."""
    tokens, end = list(prompt), (frozenset() if params.ignore_eos else end) | frozenset(params.stop_token_ids)
    limit = min(context, len(prompt) + (params.max_tokens or context))
    while True:
        tokens.append(next_token(np.asarray(logits_of(tokens)), tokens, len(prompt), params, end, seed))
        if tokens[-1] in end or len(tokens) == limit:
            return tokens[len(prompt) :], "stop" if tokens[-1] in end else "length"
