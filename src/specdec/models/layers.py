"""Rotary positions: frequencies for every kind of scaling, and the cosines and sines of a pass.

RoPE (Su et al. 2021) rotates pairs of a head's dimensions by position x frequency. The scalings change the frequencies:
linear (Chen et al. 2023), dynamic NTK, YaRN (Peng et al. 2023), LongRoPE (Ding et al. 2024) and Llama 3's.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

RopeKind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3", "divided"]

_CHUNK = 256
"""Positions whose cosines are computed together."""

_MEMO = 64
"""Chunks kept for lengths that each have frequencies of their own (dynamic scaling)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """How positions become angles."""

    kind: RopeKind
    dim: int
    """Dimensions of a head; all are rotated."""
    theta: float
    context: int
    """The model's longest sequence."""
    factor: float = 1.0
    original_context: int = 0
    """The context before scaling (yarn, longrope, llama3)."""
    attention_factor: float = 1.0
    """Multiplies cosines and sines (yarn, longrope)."""
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    truncate: bool = True
    """yarn: dimensions that turn more often than beta_fast in the original context keep their frequency, those that turn
    less than beta_slow are interpolated; the borders are rounded outwards if ``truncate``."""
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    """llama3: the same two borders, as fractions of the original context."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    """Divisors of each frequency, [dim / 2]: up to and past the original context (longrope); ``divided`` has only the first."""


def frequencies(rope: Rope, length: int) -> Tensor:
    """The angles per position of a context of ``length`` tokens, [dim / 2] float32.

    Only ``dynamic`` and ``longrope`` depend on the length.
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    theta = rope.theta
    if rope.kind == "dynamic":
        stretch = rope.factor * max(length, rope.context) / rope.context - (rope.factor - 1)
        theta *= stretch ** (rope.dim / (rope.dim - 2))
    periods = torch.pow(theta, exponents)
    match rope.kind:
        case "default" | "dynamic":
            return 1.0 / periods
        case "linear":
            return 1.0 / periods / rope.factor
        case "longrope":
            return 1.0 / (torch.tensor(rope.long_factor if length > rope.original_context else rope.short_factor) * periods)
        case "divided":
            return 1.0 / periods / torch.tensor(rope.short_factor)
        case "yarn":
            return _yarn(rope, periods)
        case "llama3":
            return _llama3(rope, 1.0 / periods)


def _yarn(rope: Rope, periods: Tensor) -> Tensor:
    def dimension(turns: float) -> float:
        """Where along the head a frequency makes this many turns in the original context."""
        return rope.dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - interpolated
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    wavelength = 2 * math.pi / plain
    turns = rope.original_context / wavelength  # in the original context
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    slow = wavelength > rope.original_context / rope.low_freq_factor
    fast = wavelength < rope.original_context / rope.high_freq_factor
    return torch.where(slow, plain / rope.factor, torch.where(fast, plain, blended))


class RotaryTable:
    """Cosines and sines for the rows of a pass.

    For kinds that depend on the length, a row goes by the length of its own context (see ``Batch.lengths``): the prompt's
    for prompt rows, position + 1 after it. That is what generation with a growing cache does in transformers, and it
    makes a row's angles a function of the row alone.
    """

    def __init__(self, rope: Rope, device: torch.device) -> None:
        self.rope = rope
        self.device = device
        self._border = {"dynamic": rope.context, "longrope": rope.original_context}.get(rope.kind)
        """Contexts longer than this have other frequencies; None where the length does not matter."""
        self._short = _Table(frequencies(rope, 0), rope, device)
        self._long = self._short
        if rope.kind == "longrope":
            self._long = _Table(frequencies(rope, rope.original_context + 1), rope, device)
        self._memo: OrderedDict[tuple[int, int], tuple[Tensor, Tensor]] = OrderedDict()

    @property
    def capturable(self) -> bool:
        """Can the angles of a pass be looked up on an accelerator without asking it anything?"""
        return self.device.type != "cpu" and self.rope.kind != "dynamic"

    def __call__(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """positions, lengths [M] int64 -> cosines and sines [M, dim / 2] float32."""
        if self._border is None:
            return self._short(positions)
        far = lengths > self._border
        if not self.capturable and not bool(far.any()):
            return self._short(positions)
        if self.rope.kind == "dynamic":
            return self._by_length(positions, lengths.clamp(min=self.rope.context))
        cos, sin = self._short(positions)
        far_cos, far_sin = self._long(positions)
        return torch.where(far[:, None], far_cos, cos), torch.where(far[:, None], far_sin, sin)

    def tables(self, positions: Tensor, lengths: Tensor, longest: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Cosines and sines [A, dim / 2] for more than these rows, and for each row which of them it takes, int64 [M].

        Args:
            longest: the largest of ``lengths``, or None where that is not known.
        """
        whole = None if longest is None else self.whole(longest)
        if whole is None:
            return *self(positions, lengths), torch.arange(len(positions), device=self.device)
        return *whole, positions

    def whole(self, longest: int) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines [A, dim / 2] by position, for rows whose ``lengths`` are at most ``longest``; the same tensors each
        time, until longer contexts come. None where so long a context has frequencies of its own."""
        if self._border is not None and longest > self._border:
            return None
        self._short.reach(longest)
        return self._short.cos, self._short.sin

    def _by_length(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Every length has its own frequencies: each row is copied out of the chunk of its length and position."""
        cos = torch.empty(len(positions), self.rope.dim // 2, device=self.device)
        sin = torch.empty_like(cos)
        chunks = torch.stack((lengths, positions // _CHUNK), dim=1)
        for key in {(length, chunk) for length, chunk in chunks.tolist()}:
            here = (chunks == chunks.new_tensor(key)).all(1).nonzero().squeeze(1)
            chunk_cos, chunk_sin = self._chunk(*key)
            at = positions[here] - key[1] * _CHUNK
            cos[here], sin[here] = chunk_cos[at], chunk_sin[at]
        return cos, sin

    def _chunk(self, length: int, chunk: int) -> tuple[Tensor, Tensor]:
        key = (length, chunk)
        if key not in self._memo:
            self._memo[key] = _angles(frequencies(self.rope, length).to(self.device), chunk, self.rope.attention_factor)
            if len(self._memo) > _MEMO:
                self._memo.popitem(last=False)
        self._memo.move_to_end(key)
        return self._memo[key]


class _Table:
    """Cosines and sines by position: grown as far as positions reach, or whole on an accelerator, which one does not ask."""

    def __init__(self, frequency: Tensor, rope: Rope, device: torch.device) -> None:
        self.frequency = frequency.to(device)
        self.scale = rope.attention_factor
        self.cos = self.sin = torch.empty(0, len(frequency), device=device)
        self.reached = 0
        """Positions that it holds."""
        if device.type != "cpu":
            self._grow(-(-rope.context // _CHUNK))

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if positions.is_cpu:
            self.reach(int(positions.max()) + 1)
        return self.cos[positions], self.sin[positions]

    def reach(self, n: int) -> None:
        """Hold positions below n, at least."""
        if n > self.reached:
            self._grow(max(-(-n // _CHUNK), 2 * self.reached // _CHUNK))

    def _grow(self, n_chunks: int) -> None:
        new = [_angles(self.frequency, chunk, self.scale) for chunk in range(self.reached // _CHUNK, n_chunks)]
        self.cos = torch.cat((self.cos, *(cos for cos, _ in new)))
        self.sin = torch.cat((self.sin, *(sin for _, sin in new)))
        self.reached = n_chunks * _CHUNK


def _angles(frequency: Tensor, chunk: int, scale: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of one chunk of positions, [_CHUNK, dim / 2], on the device of the frequencies.

    NumPy computes them, in float64, and they are rounded once. torch's float32 cosine is another one from machine to machine,
    at the end of a tensor, and now and then in the second thread of a process's first call, while its vector library is still
    making up its mind: then all that a process says differs from what the next one does.
    """
    positions = torch.arange(chunk * _CHUNK, (chunk + 1) * _CHUNK, dtype=torch.float32)
    angles = (positions[:, None] * frequency.cpu()).double().numpy()
    cos, sin = (torch.from_numpy(x.astype(np.float32)).to(frequency.device) for x in (np.cos(angles), np.sin(angles)))
    return cos * scale, sin * scale
