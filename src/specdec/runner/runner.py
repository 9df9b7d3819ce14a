"""Runs a step on a model. It does not know why a row exists."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from specdec.attention.base import Attention
from specdec.models.base import Model, Result
from specdec.runner.pack import Lines, lay_out
from specdec.types import Forward, Step


class Runner:
    """One model and the attention over its pool."""

    def __init__(self, model: Model, attention: Attention, taps: Collection[int] = ()) -> None:
        self.model = model
        self._attention = attention
        self._taps = taps
        self._bound = model.bind(attention, taps)

    def forward(self, step: Step) -> Forward:
        """Run all rows of a step in one pass; keys and values of every row are in the pool afterwards.

        Logits come to the host, where tokens are chosen, in one transfer; taps stay where the model is.
        """
        lines, rows, prompt_rows = lay_out(step)
        logits, taps = self.run(lines)
        return Forward(to_host(logits), rows, prompt_rows, taps)

    def run(self, lines: Lines) -> Result:
        """Run rows that need not be those of a step; all stays where the model is. The logits last until the next pass."""
        return self._bound(lines.pack())


def to_host(x: Tensor) -> Tensor:
    """A tensor on the CPU, by way of pinned memory where there is any, which is several times faster."""
    if x.is_cpu:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x)
