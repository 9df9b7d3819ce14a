"""Runs a head over a batch step by step, as drafting will: from the anchor on, each step sees what the head itself made.

This is the training-time test of EAGLE-3 (arXiv 2503.01840), indexed by anchor instead of by position: step j of anchor i
attends to the first step's keys of the rows up to i, which come from the target's own features, and to its own keys of the
later steps. Medusa heads have no steps among themselves; head k is step k here. A draft model reads the text itself: its step j
is what the row of the j-th drafted token says, if those before it are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.models.head_config import HeadConfig
from specdec.models.heads import Attend, DraftLayer, Head, MedusaHead, RecurrentHead
from specdec.train.batch import Batch
from specdec.train.cut import CutModel

Learner = Head | CutModel
"""What can be trained."""

Embed = Callable[[Tensor], Tensor]
"""Token ids [N] -> the target's embeddings [N, d] f32."""

_TAIL = 60.0
"""Rows whose scores are this far below the highest one are not attended to. At e^-60 of its weight they change no float32 sum,
and beyond e^-87 weights are subnormal: products on those, and on their gradients, take a CPU many times as long."""


@dataclass(frozen=True, slots=True)
class StepOut:
    """What one step says, for the anchors that it has."""

    step: int
    state: Tensor
    """[N, d], which the output matrix multiplies"""
    raw: Tensor
    """[N, d], before the last norm"""
    previous: Tensor
    """int64 [N]: the token just before the one foreseen, for a Markov bias"""


def unroll(head: Learner, batch: Batch, embed: Embed, steps: int, noise: float = 0.0) -> Iterator[StepOut]:
    """The steps of a head over a batch.

    Args:
        steps: how many; a Medusa head has no more than its heads.
        noise: uniform noise up to this is added to the features (EAGLE-1's guard against its own errors).
    """
    if isinstance(head, CutModel):
        yield from _draft_model(head, batch, embed, steps)
        return
    features = batch.features
    if noise:
        features = features + noise * (2 * torch.rand_like(features) - 1)
    if isinstance(head, MedusaHead):
        yield from _medusa(head, batch, features, embed, min(steps, head.config.depth))
    else:
        yield from _recurrent(head, batch, features, embed, steps)


def _medusa(head: MedusaHead, batch: Batch, features: Tensor, embed: Embed, steps: int) -> Iterator[StepOut]:
    feature = features[batch.anchors()]
    between = feature.new_empty(len(feature), 0)
    for k in range(steps):
        if not sum(batch.n_anchors(k)):
            return
        if k:
            kept = batch.kept(batch.n_anchors, k)
            feature, between = feature[kept], between[kept]
        previous = batch.ahead(k, k + 1)
        if head.joins is not None:
            between = torch.cat([between, embed(previous)], -1)
        state = head(k, feature, between)
        yield StepOut(k, state, state, previous)


def _draft_model(head: CutModel, batch: Batch, embed: Embed, steps: int) -> Iterator[StepOut]:
    tokens, sizes = torch.cat([t[:-1] for t in batch.tokens]), [len(t) - 1 for t in batch.tokens]
    states = head(embed(tokens), sizes, batch.n_prompt)
    for step in range(1 if head.training else steps):  # later steps say the same of most rows: they teach nothing more
        if not sum(batch.n_anchors(step)):
            return
        state = states[batch.read(step)]
        yield StepOut(step, state, state, batch.ahead(step, step + 1))


def _recurrent(head: RecurrentHead, batch: Batch, features: Tensor, embed: Embed, steps: int) -> Iterator[StepOut]:
    state, last = head.start(features), head.config.n_modules - 1
    past = _Past(batch, head.config)
    for step in range(steps):
        if not sum(batch.n_anchors(step)):
            return
        module = head.module(step)
        if step:
            state = state[batch.kept(batch.n_rows if step <= last else batch.n_anchors, step)]
        if step > last:
            previous = batch.ahead(step, step + 1)
            state = head(embed(previous), state, past.later(step), module)
            out = state
        else:  # the first step of a module: every row leaves a key and a value, prompt rows too
            x, inputs = head.inputs(embed(batch.following(step)), state, module)
            layer, anchors = cast(DraftLayer, head.layers[module]), batch.anchors(step)
            past.begin(step, F.linear(inputs, layer.qkv.weight[head.config.n_heads * head.config.head_dim :]))
            if step < last:  # the next module needs the state of every row
                state = layer(x, inputs, past.first(step, batch.n_rows(step)))
                out = state[anchors]
            else:
                state = out = layer(x[anchors], inputs[anchors], past.first(step, batch.n_anchors(step)))
        yield StepOut(step, head.ready(out, module), out, batch.ahead(step, step + 1))


class _Past:
    """Keys and values of one module: those of its first step, which all rows left, and each anchor's own of later steps."""

    def __init__(self, batch: Batch, config: HeadConfig) -> None:
        self.batch, self.config = batch, config
        half = config.head_dim // 2
        self.frequencies = config.rope_theta ** (-torch.arange(half, device=batch.features.device) / half)
        self.keys: list[tuple[Tensor, ...]] = []
        """Of the first step, then of each later one, per sequence [rows, KV, hd]."""
        self.values: list[tuple[Tensor, ...]] = []

    def begin(self, step: int, kv: Tensor) -> None:
        """Keys and values [R, 2 KV hd] of a module's first step, and none of any other module."""
        sizes = self.batch.n_rows(step)
        self.keys, self.values = [], []
        self._add(kv, sizes, self.batch.positions(sizes, [step] * len(sizes)))

    def first(self, step: int, sizes: list[int]) -> Attend:
        """Attention of the last ``sizes`` rows of each sequence in a module's first step: each sees the rows up to it."""
        starts = [rows - size for rows, size in zip(self.batch.n_rows(step), sizes, strict=True)]

        def attend(qkv: Tensor) -> Tensor:
            q = self._rotated(qkv[:, : self._q_size], self.batch.positions(sizes, [s + step for s in starts]))
            return self._attend(q, sizes, starts)

        return attend

    def later(self, step: int) -> Attend:
        """Attention of the anchors in a later step."""
        sizes = self.batch.n_anchors(step)
        starts = [n - 1 for n in self.batch.n_prompt]

        def attend(qkv: Tensor) -> Tensor:
            positions = self.batch.positions(sizes, [s + step for s in starts])
            self._add(qkv[:, self._q_size :], sizes, positions)
            return self._attend(self._rotated(qkv[:, : self._q_size], positions), sizes, starts)

        return attend

    @property
    def _q_size(self) -> int:
        return self.config.n_heads * self.config.head_dim

    def _add(self, kv: Tensor, sizes: list[int], positions: Tensor) -> None:
        k, v = kv.chunk(2, -1)
        self.keys.append(torch.split(self._rotated(k, positions), sizes))
        self.values.append(torch.split(v.reshape(len(v), -1, self.config.head_dim), sizes))

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [N, H * hd] -> [N, H, hd], turned by halves as the target turns its own."""
        angles = positions[:, None, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()  # [N, 1, hd / 2]
        a, b = x.reshape(len(x), -1, self.config.head_dim).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def _attend(self, q: Tensor, sizes: list[int], starts: list[int]) -> Tensor:
        """q [N, H, hd] -> [N, H * hd]. Sequence by sequence: no padding, and products of this size are no slower so."""
        parts = []
        for i, (mine, start) in enumerate(zip(torch.split(q, sizes), starts, strict=True)):
            if len(mine):
                parts.append(_attend(mine, start, [k[i] for k in self.keys], [v[i] for v in self.values]))
        return torch.cat(parts)


def _attend(q: Tensor, start: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Row i of q [n, H, hd] sees rows 0 .. start + i of the first keys and values, and row i of each further one."""
    n, n_heads, hd = q.shape
    first, seen = keys[0][: start + n], start + n  # [seen, KV, hd]
    n_kv = first.shape[1]
    grouped = (q * hd**-0.5).view(n, n_kv, -1, hd).permute(1, 2, 0, 3)  # [KV, G, n, hd]
    scores = (grouped.flatten(1, 2) @ first.permute(1, 2, 0)).view(n_kv, -1, n, seen)
    hidden = torch.ones(n, seen, dtype=torch.bool, device=q.device).triu(start + 1)
    own = [(grouped * k[:n].permute(1, 0, 2)[:, None]).sum(-1, keepdim=True) for k in keys[1:]]
    scores = torch.cat([scores.masked_fill(hidden, -torch.inf), *own], -1)  # [KV, G, n, seen + later steps]
    with torch.no_grad():
        far = scores < scores.amax(-1, keepdim=True) - _TAIL
    weights = scores.masked_fill(far, -torch.inf).softmax(-1)
    out = (weights[..., :seen].flatten(1, 2) @ values[0][:seen].permute(1, 0, 2)).view(n_kv, -1, n, hd)
    for j, v in enumerate(values[1:]):
        out = out + weights[..., seen + j, None] * v[:n].permute(1, 0, 2)[:, None]
    return out.permute(2, 0, 1, 3).reshape(n, n_heads * hd)
