"""The tokens that a drafter can draft: the most frequent ones of what the target says (FR-Spec, arXiv 2502.14856)."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from specdec.train.data import Answer

_PROMPT_SHARE = 0.1
"""What a token of a prompt counts, against one of an answer: answers repeat parts of prompts, but say other things too."""


def choose(answers: Many[Answer], size: int, vocab_size: int, always: Collection[int], among: Tensor | None = None) -> Tensor:
    """The most frequent tokens, int64 [size] in increasing order; at most as many as there are.

    Args:
        size: how many; 0 for all.
        always: tokens that are among them however rare.
        among: int64, what there is to choose from; None for every token.
    """
    if not 0 < size < vocab_size:
        return torch.arange(vocab_size)
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    for answer in answers:
        prompt, said = answer.tokens[: answer.n_prompt], answer.tokens[answer.n_prompt :]
        for tokens, weight in ((prompt, _PROMPT_SHARE), (said, 1.0)):
            ids = torch.tensor(tokens, dtype=torch.int64)
            counts.index_add_(0, ids, (weight * one).expand(len(ids)))
    counts[[token for token in always if token < vocab_size]] = torch.inf
    if among is not None:
        others = torch.ones(vocab_size, dtype=torch.bool)
        others[among] = False
        counts[others] = -1
    # Tokens that never occurred follow in order of their ids: tokenizers number frequent ones first.
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def coverage(answers: Many[Answer], ids: Tensor) -> float:
    """Share of the answers' tokens that can be drafted."""
    known = set(ids.tolist())
    said = [token for answer in answers for token in answer.tokens[answer.n_prompt :]]
    return sum(token in known for token in said) / max(1, len(said))
