"""Runs a step on a model. It does not know why a row exists."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from specdec.attention.base import Attention
from specdec.models.base import Model
from specdec.runner.pack import pack
from specdec.types import Forward, Step


class Runner:
    """One model and the attention over its pool."""

    def __init__(self, model: Model, attention: Attention, taps: Collection[int] = ()) -> None:
        self.model = model
        self._attention = attention
        self._taps = taps

    @torch.inference_mode()
    def forward(self, step: Step) -> Forward:
        """Run all rows of a step in one pass; keys and values of every row are in the pool afterwards.

        Logits come to the host, where tokens are chosen, in one transfer; taps stay where the model is.
        """
        batch, rows, prompt_rows = pack(step, self.model.device)
        logits, taps = self.model.forward(batch, self._attention, self._taps)
        return Forward(to_host(logits), rows, prompt_rows, taps)


def to_host(x: Tensor) -> Tensor:
    """A tensor on the CPU, by way of pinned memory where there is any, which is several times faster."""
    if x.is_cpu:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x)
