"""Training sees what drafting will: each step of each anchor equals a drafter's that appends one row at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from toys import CPU, D, config, embed, random_example

from specdec.models.heads import MedusaHead, RecurrentHead, make_head
from specdec.train import unroll as unrolling
from specdec.train.batch import Batch
from specdec.train.unroll import unroll

STEPS = 4


def _randomise(head: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / (p.shape[-1] ** 0.5 if p.dim() > 1 else 1))


def _causal(head: RecurrentHead):
    """Attention of rows 0 .. n - 1 of one text, each to those before it, by other means than training's."""
    c = head.config

    def turned(x: Tensor) -> Tensor:
        x = x.transpose(0, 1)  # [H, n, hd]
        pairs = torch.complex(*(part.double() for part in x.chunk(2, -1)))
        speed = c.rope_theta ** (-torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * speed
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag], -1).float()

    def attend(qkv: Tensor) -> Tensor:
        heads = qkv.unflatten(-1, (-1, c.head_dim))
        q, k, v = heads.split([c.n_heads, c.n_kv_heads, c.n_kv_heads], 1)
        out = F.scaled_dot_product_attention(turned(q), turned(k), v.transpose(0, 1), is_causal=True, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)

    return attend


def _drafted(head: RecurrentHead, tokens: Tensor, features: Tensor, anchor: int) -> list[Tensor]:
    """What each step from one anchor on gives, [d] per step."""
    state, said = head.start(features[: anchor + 1]), []
    rows_state, rows_tokens = state, tokens[1 : anchor + 2]
    for step in range(STEPS):
        if anchor + 2 + step >= len(tokens):
            break
        module = head.module(step)
        out = head(embed(rows_tokens), rows_state, _causal(head), module)
        said.append(head.ready(out[-1], module))
        if head.module(step + 1) != module:  # the next module reads every row's state, one token further on
            rows_state, rows_tokens = out, tokens[2 + step : anchor + 3 + step]
        else:
            rows_state = torch.cat([rows_state, out[-1:]])
            rows_tokens = torch.cat([rows_tokens, tokens[anchor + 2 + step : anchor + 3 + step]])
    return said


@pytest.mark.parametrize(
    "shape",
    [
        config("eagle", fc_bias=True),
        config("eagle3", taps=(0, 1)),
        config("mtp"),
        config("mtp", depth=2, hidden_first=True),
        config("mtp", depth=3),
    ],
    ids=lambda c: f"{c.kind}-{c.depth}",
)
def test_a_step_is_what_a_drafter_computes_row_by_row(shape) -> None:
    """Breaks on a wrong shift, mask, position, or on keys of the wrong step or module."""
    head = make_head(shape)
    _randomise(head)
    examples = [
        random_example(n, p, seed, len(shape.taps) * D) for n, p, seed in ((12, 4, 0), (7, 5, 1), (9, 1, 2), (10, 7, 3))
    ]
    batch = Batch.of(examples, CPU)
    with torch.no_grad():
        steps = list(unroll(head, batch, embed, STEPS))
        for i, e in enumerate(examples):
            for index in range(e.n_anchors):
                anchor = e.n_prompt - 1 + index
                for step, expected in enumerate(_drafted(head, e.tokens, e.features.float(), anchor)):
                    at = sum(batch.n_anchors(step)[:i]) + index
                    assert torch.allclose(steps[step].state[at], expected, atol=2e-5), (i, anchor, step)
                    assert steps[step].previous[at] == e.tokens[anchor + 1 + step]


@pytest.mark.parametrize("correction", ["none", "hydra"])
def test_a_medusa_head_sees_its_own_feature_and_the_tokens_between(correction: str) -> None:
    head = make_head(config("medusa", depth=3, correction=correction))
    assert isinstance(head, MedusaHead)
    _randomise(head)
    e = random_example(9, 4, 0)
    with torch.no_grad():
        for out in unroll(head, Batch.of([random_example(6, 3, 5), e], CPU), embed, 8):
            for index in range(e.n_anchors - out.step):
                anchor = e.n_prompt - 1 + index
                between = embed(e.tokens[anchor + 1 : anchor + 2 + out.step]).flatten()
                expected = head(out.step, e.features[anchor].float(), between)
                assert torch.allclose(out.state[-(e.n_anchors - out.step) + index], expected, atol=1e-5)


def test_what_is_attended_to_has_weights_that_a_cpu_multiplies_fast() -> None:
    """Scores that lie far apart leave subnormal weights, which take many times as long; those are cut off, and nothing else."""
    rows = 201
    q = torch.ones(1, 1, 2)
    k = -torch.arange(rows).float()[:, None, None].expand(rows, 1, 2) / 2**0.5  # scores 0, -1, ... -200
    v = torch.zeros(rows, 1, 2, requires_grad=True)  # its gradient is the weights
    unrolling._attend(q, rows - 1, [k], [v]).sum().backward()
    weights = v.grad[:, 0, 0]
    assert torch.allclose(weights, (-torch.arange(rows).float()).softmax(0), rtol=1e-5, atol=1e-25)
    assert weights[weights > 0].min() > torch.finfo(torch.float32).tiny
    assert weights[:60].min() > 0
    v.grad = None
    later = torch.full((1, 1, 2), 30 / 2**0.5)  # a later step's own key, whose score is 30
    unrolling._attend(q, rows - 1, [k, later], [v, later]).sum().backward()
    assert v.grad[:30].min() > 0
    assert not v.grad[32:].any()
