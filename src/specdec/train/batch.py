"""What a training step sees: some sequences side by side, their rows flat.

The rows of a sequence are its tokens x_0 .. x_{n-1}. An *anchor* is a row i from which a burst can start: x_{i+1} is then the
pending token, and step j of a head gives x_{i+2+j}. Anchors are the last row of the prompt and the rows of the answer, as
far as there is something to foresee: of an answer of m tokens, m - 1. The target's opinion of x_{i+2+j} stands in row i+1+j,
so the opinions that count are those of as many rows, each one after its anchor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Example:
    """One answered prompt, with what the target thought of it."""

    tokens: Tensor
    """int64 [n]"""
    n_prompt: int
    temperature: float
    """At which the answer was sampled."""
    seed: int
    """Owner of the noise it was sampled with, which drafters use too."""
    task: str
    features: Tensor
    """[n - 2, taps * d] bf16: of the rows up to the last anchor."""
    top_ids: Tensor
    """int32 [m - 1, K]: the target's likeliest tokens in the rows after the anchors, likeliest first."""
    top_logp: Tensor
    """[m - 1, K] their log-probabilities"""

    @property
    def n_anchors(self) -> int:
        return len(self.tokens) - self.n_prompt - 1


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples side by side."""

    tokens: tuple[Tensor, ...]
    """Per sequence int64 [n]."""
    n_prompt: tuple[int, ...]
    temperatures: tuple[float, ...]
    seeds: tuple[int, ...]
    tasks: tuple[str, ...]
    features: Tensor
    """[R, taps * d] f32: per sequence its rows up to the last anchor."""
    top_ids: Tensor
    """int64 [A, K], per sequence the rows after its anchors"""
    top_logp: Tensor
    """f32 [A, K]"""

    @classmethod
    def of(cls, examples: Many[Example], device: torch.device) -> Batch:
        return cls(
            tokens=tuple(example.tokens.to(device) for example in examples),
            n_prompt=tuple(example.n_prompt for example in examples),
            temperatures=tuple(example.temperature for example in examples),
            seeds=tuple(example.seed for example in examples),
            tasks=tuple(example.task for example in examples),
            features=torch.cat([e.features for e in examples]).to(device, torch.float32),
            top_ids=torch.cat([e.top_ids for e in examples]).to(device, torch.int64),
            top_logp=torch.cat([e.top_logp for e in examples]).to(device, torch.float32),
        )

    def n_anchors(self, step: int = 0) -> list[int]:
        """Per sequence: anchors that have something to foresee at this step; they are its first ones."""
        return [max(0, len(t) - n - 1 - step) for t, n in zip(self.tokens, self.n_prompt, strict=True)]

    def n_rows(self, step: int = 0) -> list[int]:
        """Per sequence: rows up to the last anchor that has something to foresee at this step."""
        return [n + size - 1 if size else 0 for n, size in zip(self.n_prompt, self.n_anchors(step), strict=True)]

    def anchors(self, step: int = 0) -> Tensor:
        """Indices, among this step's rows, of its anchors."""
        sizes = self.n_anchors(step)
        starts = [n - 1 if size else 0 for n, size in zip(self.n_prompt, sizes, strict=True)]
        return self._ranges(self.n_rows(step), starts, sizes)

    def at(self, step: int) -> Tensor:
        """Indices, among the first step's anchors, of those that this step has."""
        sizes = self.n_anchors(step)
        return self._ranges(self.n_anchors(), [0] * len(sizes), sizes)

    def kept(self, sizes: Callable[[int], list[int]], step: int) -> Tensor:
        """Indices, among the anchors (``n_anchors``) or rows (``n_rows``) of the step before, of those that are left."""
        return self._ranges(sizes(step - 1), [0] * len(self.tokens), sizes(step))

    def opinions(self, step: int) -> Tensor:
        """Indices, among the rows of ``top_ids``, of the opinions that this step is to foresee: one per anchor it has."""
        sizes = self.n_anchors(step)
        return self._ranges(self.n_anchors(), [step if size else 0 for size in sizes], sizes)

    def ahead(self, step: int, distance: int) -> Tensor:
        """int64: the token ``distance`` after each anchor that this step has."""
        sizes = zip(self.tokens, self.n_prompt, self.n_anchors(step), strict=True)
        return torch.cat([tokens[n - 1 + distance : n - 1 + distance + size] for tokens, n, size in sizes])

    def following(self, step: int) -> Tensor:
        """int64: the token ``1 + step`` after each of this step's rows."""
        sizes = zip(self.tokens, self.n_rows(step), strict=True)
        return torch.cat([tokens[1 + step : 1 + step + size] for tokens, size in sizes])

    def positions(self, sizes: Many[int], starts: Many[int]) -> Tensor:
        """int64, flat: per sequence as many numbers from a start on."""
        parts = [torch.arange(start, start + size) for size, start in zip(sizes, starts, strict=True)]
        return torch.cat(parts).to(self.features.device)

    def read(self, step: int) -> Tensor:
        """Indices, among the rows of whole texts (without their last tokens), of those that say what this step foresees."""
        sizes = self.n_anchors(step)
        starts = [n + step if size else 0 for n, size in zip(self.n_prompt, sizes, strict=True)]
        return self._ranges([len(tokens) - 1 for tokens in self.tokens], starts, sizes)

    def _ranges(self, lengths: Many[int], starts: Many[int], sizes: Many[int]) -> Tensor:
        """Of things that lie flat with ``lengths`` per sequence: those from a start on."""
        offsets = [0, *itertools.accumulate(lengths)]
        return self.positions(sizes, [offset + start for offset, start in zip(offsets, starts, strict=False)])
