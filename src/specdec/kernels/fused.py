"""A whole pass of a decoder in one native call (csrc/decoder.c): the same bits as operation by operation, without the gaps."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.base import GROUP, LANES, BlockWeight, DenseWeight, Rows
from specdec.kernels.cpu_rows import BAD_BLOCK, BAD_ROW, ERRORS, NO_MEMORY, check_rows
from specdec.kernels.library import FLOAT, INT, LONG, POINTER, Library
from specdec.kernels.memory import Scratch
from specdec.kv import codec

MOST_HEAD = 256
"""The widest head that csrc/decoder.c has room for."""
_ERRORS: dict[int, tuple[type[Exception], str]] = {
    BAD_ROW: (IndexError, ERRORS[BAD_ROW] + "; wanted rows must increase"),
    BAD_BLOCK: (IndexError, ERRORS[BAD_BLOCK]),
    NO_MEMORY: (MemoryError, "there is no memory for the activations of this pass"),
    4: (IndexError, "a token is outside the vocabulary"),
}


@dataclass(frozen=True, slots=True)
class Matrix:
    """Packed weights over the same inputs, one below the other, and a bias [sum of n] f32 or None."""

    parts: tuple[BlockWeight | DenseWeight, ...]
    bias: Tensor | None = None

    @property
    def n(self) -> int:
        return sum(part.n for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer; norms are float32 [d], or [head_dim] for queries and keys."""

    attention_norm: Tensor
    qkv: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Matrix
    ffn_norm: Tensor
    gate_up: Matrix
    down: Matrix
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """Everything that a pass computes with."""

    layers: Sequence[LayerWeights]
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    norm: Tensor
    head: Matrix
    embedding: Matrix
    embedding_norm: Tensor | None = None
    """[d] f32. Where it is given these are the weights of an EAGLE-3 head (head_pass.py): the one layer takes the normed
    embedding and the normed state side by side."""
    fuse: Matrix | None = None
    """Of such a head: from features, [taps * d], to the state that a row starts from."""


class _Part(ctypes.Structure):
    _fields_ = (("data", POINTER), ("n", LONG), ("kind", LONG))


class _Matrix(ctypes.Structure):
    _fields_ = (("parts", ctypes.POINTER(_Part)), ("n_parts", LONG), ("n", LONG), ("k", LONG), ("bias", POINTER))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("attention_norm", "q_norm", "k_norm", "ffn_norm")),
        *((name, _Matrix) for name in ("qkv", "out", "gate_up", "down")),
        ("window", LONG),
    )


class NativeDecoder(ctypes.Structure):
    """``Decoder`` of csrc/decoder.h."""

    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        *((name, LONG) for name in ("n_layers", "d", "heads", "kv_heads", "hd", "ffn")),
        *((name, FLOAT) for name in ("eps", "scale")),
        ("norm", POINTER),
        ("head", _Matrix),
        ("embedding", _Matrix),
        ("embedding_norm", POINTER),
        ("fuse", _Matrix),
    )


class NativePass(ctypes.Structure):
    """``Pass`` of csrc/decoder.h; what is left out is null or 0."""

    _fields_ = (
        *((name, POINTER) for name in ("tokens", "wanted", "cosine", "sine", "angle")),
        *((name, LONG) for name in ("n_angles", "rows", "n_wanted")),
        *((name, POINTER) for name in ("tables", "sequence", "slot", "prefix", "path", "n_path")),
        *((name, LONG) for name in ("sequences", "table_width", "path_width")),
        *((name, POINTER) for name in ("keys", "values")),
        *((name, LONG) for name in ("n_blocks", "kind")),
        *((name, POINTER) for name in ("logits", "taps", "inputs")),
        *((name, LONG) for name in ("per_row", "fuse")),
        ("ends", POINTER),
        ("best", LONG),
        *((name, POINTER) for name in ("heat", "seeds", "positions", "names", "candidates", "chances")),
    )


_NO_HEAD = (0,) * (len(NativePass._fields_) - [field[0] for field in NativePass._fields_].index("inputs"))
"""The last fields of a pass that starts from embeddings."""


class FusedDecoder:
    """The native pass over some weights. Calls may come from several threads at once."""

    def __init__(self, library: Library, weights: DecoderWeights) -> None:
        """Keep the weights alive and their addresses at hand; ``why_not`` must have found nothing against them."""
        self._run = library.function("decode", POINTER, POINTER, returns=INT)
        self._layers = len(weights.layers)
        self._d, self._vocab_size = weights.norm.shape[0], weights.head.n
        self._kv = weights.kv_heads, weights.head_dim
        decoder, alive = native_decoder(weights)
        self._decoder_at = ctypes.addressof(decoder)
        self._alive = decoder, alive
        self._logits = Scratch()

    def __call__(
        self,
        tokens: Tensor,
        cos: Tensor,
        sin: Tensor,
        angles: Tensor,
        rows: Rows,
        wanted: Tensor,
        keys: Tensor,
        values: Tensor,
        taps: Collection[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run rows that are tensors.

        Args:
            tokens: int64 [M].
            cos, sin: float32 [A, head_dim / 2].
            angles: int64 [M]: which of these turns a row.
            rows: where each row's key and value go, and what it sees.
            wanted: int64 [W], increasing: rows whose logits are wanted.
            keys, values: the pool of all layers.
            taps: layers whose output is wanted, of every row.

        Returns:
            logits [W, V] float32, and for each tap [M, d] float32.

        Raises:
            IndexError: a row, block or token that does not exist.
            MemoryError: there is none for the activations.
        """
        n_rows, n_wanted = len(tokens), len(wanted)
        check_rows(rows)
        for name, x, n in (("tokens", tokens, len(rows)), ("wanted", wanted, n_wanted), ("angles", angles, len(rows))):
            _check(name, x, torch.int64, (n,))
        self.check_held(cos=cos, sin=sin, keys=keys, values=values)
        inputs = (
            tokens.data_ptr(), wanted.data_ptr(), cos.data_ptr(), sin.data_ptr(), angles.data_ptr(), cos.shape[0], n_rows,
            n_wanted, rows.tables.data_ptr(), rows.sequence.data_ptr(), rows.slot.data_ptr(), rows.prefix.data_ptr(),
            rows.path.data_ptr(), rows.n_path.data_ptr(), *rows.tables.shape, rows.path.shape[1], keys.data_ptr(),
            values.data_ptr(), keys.shape[1], codec.KINDS[keys.dtype],
        )  # fmt: skip
        return self.run(inputs, n_rows, n_wanted, taps)

    def run(
        self, inputs: tuple[int, ...], n_rows: int, n_wanted: int, taps: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As a call, after the checks of everything that would make the native code read or write outside a tensor; values of
        integers it checks itself.

        Args:
            inputs: the fields of ``NativePass`` down to ``kind``.
        """
        logits = self._logits.rows(n_wanted, self._vocab_size)
        tapped = {tap: torch.empty(n_rows, self._d) for tap in taps}
        places = array("Q", bytes(8 * self._layers if tapped else 0))
        for tap, x in tapped.items():
            places[tap] = x.data_ptr()
        # All fields of a NativePass have eight bytes, and to build one takes three times as long.
        run = array("Q", (*inputs, logits.data_ptr(), places.buffer_info()[0] if tapped else 0, *_NO_HEAD))
        raise_for(self._run(self._decoder_at, run.buffer_info()[0]))
        return logits, tapped

    def check_held(self, *, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor) -> None:
        """Raise ValueError where the native code would read or write outside what many passes share."""
        kv_heads, hd = self._kv
        pool, dtype = (self._layers, keys.shape[1], kv_heads), keys.dtype if keys.dtype in codec.KINDS else torch.float32
        of_keys, of_values = codec.block_shapes(dtype, hd)
        _check("cos", cos, torch.float32, (cos.shape[0], hd // 2))
        _check("sin", sin, torch.float32, tuple(cos.shape))
        _check("keys", keys, dtype, (*pool, *of_keys))
        _check("values", values, dtype, (*pool, *of_values))


def _check(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if x.shape != shape or x.dtype is not dtype or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(
            f"{name} must be contiguous {dtype} {list(shape)} on the CPU, got {x.dtype} {list(x.shape)} on {x.device}"
        )


def native_decoder(weights: DecoderWeights) -> tuple[NativeDecoder, list[Any]]:
    """Weights as the native pass takes them, and what must live as long."""
    alive: list[Any] = [weights]

    def matrix(m: Matrix) -> _Matrix:
        parts = (_Part * len(m.parts))(*(_Part(part.data.data_ptr(), part.n, _kind(part)) for part in m.parts))
        alive.append(parts)
        return _Matrix(parts, len(parts), m.n, m.parts[0].k, _address(m.bias))

    def layer(one: LayerWeights) -> _Layer:
        norms = (one.attention_norm, one.q_norm, one.k_norm, one.ffn_norm)
        return _Layer(*map(_address, norms), *map(matrix, (one.qkv, one.out, one.gate_up, one.down)), one.window)

    layers = (_Layer * len(weights.layers))(*map(layer, weights.layers))
    decoder = NativeDecoder(
        layers, len(layers), weights.norm.shape[0], weights.heads, weights.kv_heads, weights.head_dim,
        weights.layers[0].down.parts[0].k, weights.eps, weights.scale, weights.norm.data_ptr(), matrix(weights.head),
        matrix(weights.embedding), _address(weights.embedding_norm), matrix(weights.fuse) if weights.fuse else _Matrix(),
    )  # fmt: skip
    return decoder, alive


def raise_for(wrong: int) -> None:
    """Raise what the native pass found wrong, if it did."""
    if wrong:
        kind, message = _ERRORS[wrong]
        raise kind(message)


def why_not(weights: DecoderWeights) -> str | None:
    """The reason why the native pass cannot take these weights; None where it can.

    It cuts matrices between heads, and between groups of 32 of the feed-forward, so those must fall on whole blocks of
    sixteen channels.
    """
    if weights.head_dim % LANES or weights.head_dim > MOST_HEAD:
        return f"heads of {weights.head_dim} (it takes multiples of {LANES} up to {MOST_HEAD})"
    for layer in weights.layers:
        if layer.down.parts[0].k % GROUP:
            return f"a feed-forward of {layer.down.parts[0].k} (it takes multiples of {GROUP})"
        for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
            if any(part.n % LANES for part in matrix.parts[:-1]):
                return f"joined matrices of {[part.n for part in matrix.parts]} channels (all but the last by {LANES}s)"
    if len(weights.head.parts) + len(weights.embedding.parts) > 2 or weights.head.bias is not None:
        return "an output matrix or embedding of several parts or with a bias"
    return None


def _kind(part: BlockWeight | DenseWeight) -> int:
    """As csrc/decoder.h numbers them."""
    if isinstance(part, BlockWeight):
        return 0 if part.kind == "q4" else 1
    return 2 if part.data.dtype is torch.bfloat16 else 3


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
