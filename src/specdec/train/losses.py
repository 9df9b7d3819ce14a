"""What training minimises: how far a head's next-token law is from the target's, and for EAGLE-1 its state from the feature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.models.heads import Markov, MedusaHead
from specdec.train.batch import Batch
from specdec.train.unroll import Embed, Learner, unroll

_CHUNK = 256
"""Rows whose logits exist at a time."""


@dataclass(frozen=True, slots=True)
class Output:
    """The target's output matrix, cut to the tokens that the head can draft."""

    matrix: Tensor
    """f32 [V', d]"""
    ids: Tensor
    """int64 [V'], increasing: which tokens its rows stand for"""
    places: Tensor
    """int64 [V]: the row of each token, -1 for those that the head cannot draft"""

    @classmethod
    def of(cls, matrix: Tensor, ids: Tensor, vocab_size: int) -> Output:
        places = torch.full((vocab_size,), -1, dtype=torch.int64, device=ids.device)
        places[ids] = torch.arange(len(ids), device=ids.device)
        return cls(matrix, ids, places)


@dataclass(frozen=True, slots=True)
class Weighing:
    """What the loss is made of."""

    decay: float
    """Step j weighs decay^j."""
    hard: float
    """Share of the target's likeliest token in what is imitated; the rest is its law."""
    regression: float
    """Weight of the distance of states from features (EAGLE-1), beside which the law weighs 0.1; 0 for none."""


@dataclass(frozen=True, slots=True)
class Losses:
    total: Tensor
    """A number that can be differentiated."""
    by_step: list[float]
    """Cross entropy with the target's law less that law's own entropy, nats per position."""
    accuracy: list[float]
    """How often the likeliest token of the head is the target's, where the head can draft that."""


def losses(
    head: Learner, batch: Batch, embed: Embed, output: Output, steps: int, weighing: Weighing, noise: float = 0.0
) -> Losses:
    """The loss of a batch.

    Positions whose likeliest token is none that the head can draft do not count; of the others, the target's law is cut to
    the tokens that both its top and the head's vocabulary hold.
    """
    ids, law = targets(batch, output, weighing.hard)
    total = output.matrix.new_zeros(())
    markov = cast(Markov, head.markov[0]) if isinstance(head, MedusaHead) and head.markov is not None else None
    by_step, accuracy = [], []
    for out in unroll(head, batch, embed, steps, noise):
        where = batch.opinions(out.step)
        counts = output.places[batch.top_ids[where, 0]] >= 0
        kept = counts.nonzero().squeeze(1)
        n = max(1, len(kept))
        low = None if markov is None else markov.first(out.previous[kept])
        loss, best = SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
            out.state[kept],
            output.matrix,
            ids[where[kept]],
            law[where[kept]],
            low,
            None if markov is None else markov.second.weight,
        )
        weight = weighing.decay**out.step / n
        if weighing.regression:
            total = (
                total
                + 0.1 * weight * loss
                + weighing.regression * weighing.decay**out.step * _distance(out.raw, batch, out.step)
            )
        else:
            total = total + weight * loss
        by_step.append(float(loss.detach()) / n)
        accuracy.append(float((output.ids[best] == batch.top_ids[where[kept], 0]).float().mean()) if len(kept) else 0.0)
    return Losses(total, by_step, accuracy)


def targets(batch: Batch, output: Output, hard: float) -> tuple[Tensor, Tensor]:
    """What is imitated, per opinion: rows of the output matrix [A, K], and their weights [A, K], which sum to 1."""
    places = output.places[batch.top_ids]
    law = batch.top_logp.exp().masked_fill(places < 0, 0.0)
    law = law / law.sum(1, keepdim=True).clamp(min=1e-9)
    law = (1 - hard) * law
    law[:, 0] += hard
    return places.clamp(min=0), law


def _distance(raw: Tensor, batch: Batch, step: int) -> Tensor:
    """Smooth L1 between what the step made and the feature of the row it stands for."""
    left = batch.kept(batch.n_anchors, step + 1)  # the last anchor's next row has no feature: nothing starts from it
    rows = batch.anchors()[batch.at(step + 1)] + 1 + step
    return F.smooth_l1_loss(raw[left], batch.features[rows])


class SoftCrossEntropy(torch.autograd.Function):
    """Sum over rows of the cross entropy between a sparse law and softmax(x W^T + u v^T), without keeping the logits.

    Logits of a large vocabulary are most of what a training step would store and move. Here those of some rows at a time
    are made, turned into their gradient in place, and multiplied back at once. W is the target's and gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrix: Tensor, ids: Tensor, law: Tensor, low: Tensor | None, second: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x [N, d], matrix [V', d], ids and law [N, K], low [N, r] and second [V', r] or None -> loss [], best [N] int64.

        The loss is less the law's entropy, so that it can reach 0.
        """
        wanted = x.requires_grad
        gx = torch.empty_like(x) if wanted else None
        glow = torch.empty_like(low) if wanted and low is not None else None
        gsecond = torch.zeros_like(second) if wanted and second is not None else None
        total = x.new_zeros(())
        best = torch.empty(len(x), dtype=torch.int64, device=x.device)
        for start in range(0, len(x), _CHUNK):
            at = slice(start, start + _CHUNK)
            logits = x[at] @ matrix.t()
            if low is not None and second is not None:
                logits.addmm_(low[at], second.t())
            top, best[at] = logits.max(1)
            picked = logits.gather(1, ids[at])
            p = logits.sub_(top[:, None]).exp_()
            z = p.sum(1, keepdim=True)
            total += ((z.log().squeeze(1) + top) * law[at].sum(1) - (law[at] * picked).sum(1)).sum()
            if gx is None:
                continue
            p.mul_(1 / z).scatter_add_(1, ids[at], -law[at])
            torch.mm(p, matrix, out=gx[at])
            if glow is not None and gsecond is not None and low is not None and second is not None:
                torch.mm(p, second, out=glow[at])
                gsecond.addmm_(p.t(), low[at])
        total += torch.special.xlogy(law, law).sum()
        ctx.save_for_backward(gx, glow, gsecond)
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gx, glow, gsecond = (None if g is None else g * grads[0] for g in ctx.saved_tensors)
        return gx, None, None, None, glow, gsecond
