"""Runs a step on a model. It does not know why a row exists."""

from __future__ import annotations

from collections.abc import Collection

import torch

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
        """Run all rows of a step in one pass; keys and values of every row are in the pool afterwards."""
        batch, rows, prompt_rows = pack(step, self.model.device)
        logits, taps = self.model.forward(batch, self._attention, self._taps)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)  # the logits are wanted at once, and seconds must be those of the pass
        return Forward(logits, rows, prompt_rows, taps)
