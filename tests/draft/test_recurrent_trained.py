"""A head that has learnt a text drafts that text: whatever training and drafting must agree on, they agree on.

Rows, tokens, positions and the order of modules are written down here once more, for all rows of a text at once.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from checkpoints import tiny
from harness import Request, make_engine, run
from recomputed import KINDS, features_of, random_head, rotate
from torch import Tensor

from specdec import kernels
from specdec.config import SamplingParams, SpeculationConfig
from specdec.draft.base import Target
from specdec.draft.recurrent import RecurrentDrafter
from specdec.models.head_config import HeadConfig
from specdec.models.load import load_model
from specdec.models.source import resolve

DEPTH, STEPS = 4, 80
N_TOKENS = 40


class Unrolled:
    """Attention of the rows of a module, then of each row's own later steps, which see the row and those before it."""

    def __init__(self, config: HeadConfig) -> None:
        self._config = config
        self._steps: list[tuple[Tensor, Tensor]] = []

    def __call__(self, qkv: Tensor) -> Tensor:
        c, n, step = self._config, len(qkv), len(self._steps)
        q, k, v = qkv.view(n, -1, c.head_dim).split([c.n_heads, c.n_kv_heads, c.n_kv_heads], 1)
        pad = torch.zeros(step, c.n_heads, c.head_dim)  # row i of a later step lies at position i + step
        q, k = (
            rotate(torch.cat([pad, q]), c.rope_theta)[step:],
            rotate(torch.cat([pad[:, : c.n_kv_heads], k]), c.rope_theta)[step:],
        )
        k, v = (x.repeat_interleave(c.n_heads // c.n_kv_heads, 1) for x in (k, v))
        self._steps.append((k, v))
        (first_k, first_v), *later = [(k[:n], v[:n]) for k, v in self._steps]
        scores = torch.einsum("ihd,jhd->hij", q, first_k).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        own = [torch.einsum("ihd,ihd->hi", q, k)[..., None] for k, _ in later]
        p = (torch.cat([scores, *own], -1) / math.sqrt(c.head_dim)).softmax(-1)  # [H, n, n + step]
        out = torch.einsum("hij,jhd->ihd", p[..., :n], first_v)
        for m, (_, v) in enumerate(later):
            out = out + p[..., n + m].T[..., None] * v
        return out.reshape(n, -1)


def learn(model, loaded, texts: list[list[int]]) -> float:
    """Train a head on every row of the texts at every depth; the share of tokens that it then has right."""
    head, config = loaded.head, loaded.config
    output = model.head.rows(torch.arange(config.vocab_size))
    known = [(torch.tensor(text), features_of(model, config, text)) for text in texts]
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(STEPS):
        losses, right = [], []
        for text, features in known:
            states = head.start(features)
            for step in range(DEPTH):
                if head.module(step) == step:
                    attend = Unrolled(config)
                states = states[: len(text) - 2 - step]
                states = head(model.embedding(text[1 + step : 1 + step + len(states)]), states, attend, head.module(step))
                logits = head.ready(states, head.module(step)) @ output.T
                losses.append(F.cross_entropy(logits, text[2 + step :]))
                right.append((logits.argmax(1) == text[2 + step :]).float())
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return torch.cat(right).mean().item()


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_was_learnt_is_accepted_to_the_full_depth(tmp_path, kind: str) -> None:
    ops = kernels.select("cpu")
    model = load_model(resolve(str(tiny(tmp_path))), "fp32", ops, torch.device("cpu"))
    greedy = SamplingParams(temperature=0, max_tokens=N_TOKENS)
    requests = [Request(tuple(prompt), greedy) for prompt in (b"tick tock", b"what is the time")]
    answers = [run(make_engine(model, ops), [request])[0] for request in requests]
    loaded = random_head(model, kind, vocabulary=None)
    texts = [[*request.prompt, *answer.tokens] for request, answer in zip(requests, answers, strict=True)]
    assert learn(model, loaded, texts) > 0.98
    config = SpeculationConfig(
        trained_depth=DEPTH, trained_width=1, trained_nodes=DEPTH, trained_min_probability=0.01, trained_precision="fp32"
    )
    engine = make_engine(model, ops, drafter=RecurrentDrafter(loaded, Target(model, ops, 64), config))
    got = run(engine, requests)
    assert [answer.same for answer in got] == [answer.same for answer in answers]
    passes = engine.stats.target_passes - len(requests)  # no draft can be made before the first
    assert engine.stats.emitted / passes > 0.85 * (DEPTH + 1)
