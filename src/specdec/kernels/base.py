"""The arithmetic that exactness rests on, as a contract with two implementations: native C and portable torch.

Every function here is *row-invariant*: a row of the result is a function of that row of the input and of nothing else,
not of how many rows ran beside it, of where they lie, or of how many threads ran. Tensors are contiguous and on the CPU
unless an implementation says otherwise; M is a number of rows, d and N and K are widths, G = K / 32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specdec.kernels.fused import DecoderWeights, FusedDecoder
    from specdec.kernels.head_pass import HeadPass

GROUP = 32
"""Weights, and entries of a row, that share a scale."""

LANES = 16
"""Output channels that a packed weight keeps together."""

WIDTH = 32
"""Most likely tokens of a row that ``candidates`` gives noise to."""


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight [N, K] in groups of 32, packed for the block product; N is padded to a multiple of 16 inside ``data``.

    ``q4``: codes 0..15, value = d * code + m (Q4_1; Q4_0 is m = -8 d). ``q8``: codes -128..127, value = d * code (Q8_0).
    d and m are float16, as in GGUF. The layout of ``data`` is written down in kernels/csrc/blocks.h.
    """

    data: Tensor
    """uint8 [ceil(N / 16), G, bytes of a group of 16 channels]"""
    kind: Literal["q4", "q8"]
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A weight [N, K] in float32 or bfloat16, packed [ceil(N / 16), K, 16] so that 16 channels are summed side by side."""

    data: Tensor
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Where each row of a pass writes its key and value, and which slots it sees, in order of position.

    A *slot* is a place in a sequence's block table: slot s is offset ``s % 16`` of block ``tables[seq, s // 16]``.
    Row i sees slots 0 .. prefix[i]-1 and then path[i, :n_path[i]] (its ancestors in a draft tree and itself), so the key at
    index j of that list has position j, and the row's own position is ``prefix[i] + n_path[i] - 1``.

    A row may be padding, so that a recorded pass always has the same number: its slot is -1, prefix and n_path are 0. It
    writes nothing and sees nothing. Kernels whose passes are never recorded may refuse it.
    """

    tables: Tensor
    """int32 [S, B] block ids, padded with 0"""
    sequence: Tensor
    """int32 [M] which table"""
    slot: Tensor
    """int32 [M] where the row's own key and value go"""
    prefix: Tensor
    """int32 [M]"""
    path: Tensor
    """int32 [M, P], padded with -1; P may be 0"""
    n_path: Tensor
    """int32 [M]"""

    def __len__(self) -> int:
        return self.slot.shape[0]


@dataclass(slots=True)
class PlainRows:
    """The rows of a pass as plain integers, from which tensors or the addresses of a native pass follow.

    Between two passes over a model's weights nothing is left in a cache, and to make a tensor then takes longer than to list
    a dozen rows: so there are two arrays, one for each width of integer.
    """

    wide: array[int]
    """64 bits: tokens, positions and context lengths [M], wanted rows [W] (``models.base.Batch``)"""
    narrow: array[int]
    """32 bits: sequence, slot, prefix, n_path [M], tables [S, B], path [M, P] (``Rows``)"""
    n_rows: int
    n_wanted: int
    n_tables: int
    table_width: int
    path_width: int
    longest: int
    """The largest of the context lengths."""


class Draw(NamedTuple):
    """What decides the token of a row of logits: the largest entry at temperature 0, else the race of its position."""

    row: int
    seed: int
    position: int
    top_k: int
    """0 for all."""
    temperature: float
    top_p: float
    min_p: float


class Kernels(ABC):
    """The operations of a decoder layer and of the sampler."""

    name: str
    """What runs: ``amx-int8``, ``avx512-vnni``, ``avx2``, ``c`` (native, any machine), ``triton`` or ``torch``."""

    capturable: ClassVar[bool] = False
    """May calls be recorded and replayed? Then what is launched follows from shapes alone, and nothing waits for the device."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [M, d] f32, weight [d] f32 -> [M, d] f32: x / sqrt(mean(x^2) + eps) * weight. x may be [M, H, d] (per head)."""

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[M, 2 f] f32, gate then up -> [M, f]: silu(gate) * up."""

    @abstractmethod
    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate x [M, H, hd] f32 (H * hd contiguous, rows may be strided) in place; cos, sin [M, hd / 2] f32.

        Halves, as Hugging Face: (a, b) -> (a cos - b sin, b cos + a sin) with a = x[..., :hd/2], b = x[..., hd/2:].
        """

    @abstractmethod
    def block_linear(self, x: Tensor, weight: BlockWeight) -> Tensor:
        """x [M, K] f32 -> [M, N] f32. Rows become int8 in groups of 32; integer sums inside a group, groups added in order."""

    @abstractmethod
    def dense_linear(self, x: Tensor, weight: DenseWeight) -> Tensor:
        """x [M, K] f32 -> [M, N] f32, accumulated in float32 over k in order."""

    @abstractmethod
    def store(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> None:
        """Write k, v [M, KV, hd] f32 (rows may be strided) to the rows' slots.

        keys [blocks, KV, hd, 16] and values [blocks, KV, 16, hd]: one layer of the pool, bfloat16 or float32; or both
        [blocks, KV, bytes], int8 or uint8, in the quantised forms of ``kv.codec``.
        """

    @abstractmethod
    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float, window: int) -> Tensor:
        """q [M, H, hd] f32 (rows may be strided) -> [M, H * hd] f32.

        Reads the pool's blocks where they lie and never touches a slot that the row does not see. ``window`` > 0 hides keys
        more than window - 1 positions back.
        """

    @abstractmethod
    def top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """[W, V] f32 -> values [W, k] f32 and ids [W, k] int64, descending, lowest id first on ties; k is at most 32.

        Where a row holds a NaN, its ``values[:, 0]`` is NaN and its ids mean nothing.
        """

    @abstractmethod
    def race(self, z: Tensor, seed: int, position: int, temperature: float = 1.0) -> int:
        """The index of the maximum of (z[v] - max z) / temperature + gumbel(seed, position, v), lowest id on ties.

        z [V] f32 or f64 with -inf allowed; the arithmetic is in f64. The noise is the counter-based one of ``gumbel`` below,
        evaluated only where it can matter. -1 where every entry is -inf, or one is +inf or NaN.
        """

    @abstractmethod
    def candidates(
        self, logits: Tensor, heat: Tensor, seeds: Tensor, positions: Tensor, k: int, names: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What a drafter expects to win the race at each row's position, best first, and the chance of each.

        Of the ``WIDTH`` largest logits z (``top``; only k where heat is 0) of a row, those with the largest
        ``s = log_softmax(z) + heat * gumbel(seed, position, token)``, with chances ``exp(s) / (sum of exp(s) + rest)``, where
        ``rest = (1 - the softmax of those ranked) * (1 + 4 heat^2) * 1000^max(0, heat - 1)`` stands for all other tokens.

        Args:
            logits: [n, V] f32.
            heat: f64 [n], the temperatures.
            seeds, positions: int64 [n].
            k: at most V and ``WIDTH``.
            names: int64 [V] the token that each column stands for; None for its own number.

        Returns:
            tokens [n, k] int64 and chances [n, k] f64; where a row holds a NaN, its chances are NaN.
        """

    def race_among(
        self, z: Tensor, seed: int, position: int, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> int | None:
        """``race`` among the tokens that top-k (0 for all), then top-p, then min-p leave (``sampling.warp`` defines them).

        None where this does not say: rounding could decide who is left, or an implementation has no such race.
        """
        return None

    def draw_rows(self, logits: Tensor, draws: Many[Draw]) -> list[int]:
        """For each draw the token of its row of logits [W, V] f32: the lowest id of the largest entry at temperature 0, else
        what ``race_among`` gives, or ``race`` where nothing is filtered. -1 where these do not say, or an implementation
        does not."""
        return [-1] * len(draws)

    def fuse(self, weights: DecoderWeights) -> FusedDecoder | None:
        """All operations of a pass over these weights as one call with the same bits; None where they run one by one."""
        return None

    def fuse_head(
        self, weights: DecoderWeights, keys: Tensor, values: Tensor, names: Tensor | None, best: int
    ) -> HeadPass | None:
        """The same for a trained head, candidates included (head_pass.py): None where its operations run one by one."""
        return None


_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), on int64 tensors that wrap around."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & (2**33 - 1))


def gumbel(seed: int, position: int, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise of tokens [n] int64 at an absolute position, float64 [n]: a pure function of the three.

    u = (h >> 11 + 1/2) 2^-53 with h = mix(mix(seed + golden (position + 1)) + golden (token + 1)); g = -log(-log(u)).
    """
    start = torch.tensor(seed, dtype=torch.int64, device=tokens.device)
    key = _mix(start + _GOLDEN * torch.tensor(position + 1, dtype=torch.int64, device=tokens.device))
    h = _mix(key + _GOLDEN * (tokens + 1))
    u = (((h >> 11) & (2**53 - 1)).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(u))
