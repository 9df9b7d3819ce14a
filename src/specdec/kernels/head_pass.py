"""A pass of an EAGLE-3 head in one native call: from the target's features to ranked candidates (csrc/decoder.c).

A head is a small model that is asked after nearly every pass of the large one, when none of its code and none of its data is
in a cache any more. What Python does around the native call then counts as much as the products, so everything goes to it as
plain integers, packed a few times and not row by row.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.kernels.fused import DecoderWeights, native_decoder, raise_for
from specdec.kernels.library import INT, POINTER, Library
from specdec.kv import codec


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the rows of a pass start from, as addresses of float32 vectors [d]: a state each, or the features of each tap."""

    addresses: list[int]
    """Row by row; of features, tap by tap within a row."""
    fuse: bool
    """Are they features?"""
    alive: tuple[object, ...]
    """What owns the vectors."""


@dataclass(slots=True)
class RowList:
    """Rows of a pass, in plain integers (see ``kernels.base.Rows``)."""

    tokens: list[int] = field(default_factory=list)
    """The token whose embedding a row takes."""
    owners: list[int] = field(default_factory=list)
    """Which of the pass's sequences a row belongs to."""
    slots: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)

    def add(self, token: int, owner: int, slot: int, prefix: int, path: list[int]) -> None:
        self.tokens.append(token)
        self.owners.append(owner)
        self.slots.append(slot)
        self.prefixes.append(prefix)
        self.paths.append(path)

    def add_committed(self, tokens: Many[int], owner: int, first: int) -> None:
        """Rows from ``first`` on, each after all those before it."""
        n = len(tokens)
        self.tokens += tokens
        self.owners += [owner] * n
        self.slots += range(first, first + n)
        self.prefixes += range(first + 1, first + n + 1)
        self.paths += [[]] * n

    def __len__(self) -> int:
        return len(self.tokens)

    def positions(self) -> list[int]:
        """The position of each row: that of the last slot that it sees."""
        return [prefix + len(path) - 1 for prefix, path in zip(self.prefixes, self.paths, strict=True)]

    def padded_paths(self) -> tuple[list[int], int]:
        """All paths, one after the other, each filled up to the longest; and its length."""
        width = max(map(len, self.paths))
        if not width:  # committed rows
            return [], 0
        return [slot for path in self.paths for slot in (*path, *(-1,) * (width - len(path)))], width


@dataclass(frozen=True, slots=True)
class Races:
    """What decides the rank of the candidates of some rows (``kernels.base.Kernels.candidates``)."""

    temperatures: list[float]
    seeds: list[int]
    positions: list[int]
    """Absolute, of the tokens that the candidates are."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a head says after some rows, W of them."""

    ends: Tensor
    """[W, d] their states."""
    logits: Tensor
    """[W, Vd] float32 on the CPU where candidates were asked for."""
    tokens: list[list[int]]
    """The candidates of each row, best first, in the target's ids; empty where none were asked for."""
    chances: list[list[float]]


class HeadPass:
    """The native pass over a head.

    Args:
        weights: with an ``embedding_norm`` and ``fuse``; ``fused.why_not`` must have found nothing against them.
        keys, values: of the head's one layer, in a form of ``kv.codec``.
        names: int64 [Vd] the target's id of each token that the head can draft; None where they are the same.
        best: candidates of a row, at most 32 and Vd.

    Raises:
        ValueError: the pool does not fit the weights.
    """

    def __init__(
        self, library: Library, weights: DecoderWeights, keys: Tensor, values: Tensor, names: Tensor | None, best: int
    ) -> None:
        blocks, kind = keys.shape[1], keys.dtype
        of_keys, of_values = codec.block_shapes(kind, weights.head_dim)
        shapes = (1, blocks, weights.kv_heads, *of_keys), (1, blocks, weights.kv_heads, *of_values)
        if (keys.shape, values.shape) != shapes or values.dtype is not kind:
            raise ValueError(f"a pool of {shapes} was expected, got {tuple(keys.shape)} and {tuple(values.shape)}")
        if not (keys.is_contiguous() and values.is_contiguous() and keys.is_cpu and values.is_cpu):
            raise ValueError("the pool of a native pass must lie on the CPU in one piece")
        self._decode = library.function("decode", POINTER, POINTER, returns=INT)
        decoder, self._alive = native_decoder(weights)
        self._decoder_at = ctypes.addressof(decoder)
        self._alive += [decoder, keys, values, names]
        self._d, self._n = weights.norm.shape[0], weights.head.n
        assert weights.fuse
        self._taps = weights.fuse.parts[0].k // self._d
        self._pool = keys.data_ptr(), values.data_ptr(), blocks, codec.KINDS[kind]
        self._names = 0 if names is None else names.data_ptr()
        self._best = best

    def __call__(
        self,
        inputs: Inputs,
        rows: RowList,
        tables: Many[Many[int]],
        cos: Tensor,
        sin: Tensor,
        wanted: Many[int],
        races: Races | None,
    ) -> Said:
        """Run the rows: their keys and values are stored, and the wanted ones are heard.

        Args:
            tables: of each sequence, its blocks.
            cos, sin: float32 [A, hd / 2] by position, contiguous on the CPU.
            wanted: increasing.
            races: of the wanted rows, whose candidates are ranked; None: they are not.

        Raises:
            IndexError: a row, block or token that does not exist.
            MemoryError: there is none for the activations.
        """
        n, n_wanted, per_row = len(rows), len(wanted), self._taps if inputs.fuse else 1
        positions = rows.positions()
        if len(inputs.addresses) != n * per_row or cos.shape != sin.shape:
            raise ValueError(f"{n} rows need {n * per_row} vectors to start from, got {len(inputs.addresses)}")
        best = self._best if races else 0
        n_raced = n_wanted if races else 0
        padded, width = rows.padded_paths()
        longest = max(map(len, tables))
        blocks = [block for table in tables for block in (*table, *(0,) * (longest - len(table)))]
        lengths = map(len, rows.paths)
        narrow = array("i", (*blocks, *rows.owners, *rows.slots, *rows.prefixes, *lengths, *padded))
        wide = array("q", (*rows.tokens, *wanted, *positions))
        reals = array("d", bytes(8 * n_raced * (1 + best)))
        ranked = array("q", bytes(8 * n_raced * (2 + best)))
        if races:
            reals[:n_raced] = array("d", races.temperatures)
            ranked[: 2 * n_raced] = array("q", (*races.seeds, *races.positions))
        starts = array("Q", inputs.addresses)
        ends, logits = torch.empty(n_wanted, self._d), torch.empty(n_wanted, self._n)
        table = narrow.buffer_info()[0]
        owner = table + 4 * len(blocks)
        token, real, rank = wide.buffer_info()[0], reals.buffer_info()[0], ranked.buffer_info()[0]
        run = array("Q", (  # a NativePass, whose fields all have eight bytes: built so it takes a third of the time
            token, token + 8 * n, cos.data_ptr(), sin.data_ptr(), token + 8 * (n + n_wanted), len(cos), n, n_wanted,
            table, owner, owner + 4 * n, owner + 8 * n, owner + 16 * n, owner + 12 * n, len(tables), longest, width,
            *self._pool, logits.data_ptr(), 0, starts.buffer_info()[0], per_row, inputs.fuse, ends.data_ptr(),
            best, real, rank, rank + 8 * n_raced, self._names, rank + 16 * n_raced, real + 8 * n_raced,
        ))  # fmt: skip
        raise_for(self._decode(self._decoder_at, run.buffer_info()[0]))
        tokens, chances = ranked[2 * n_raced :].tolist(), reals[n_raced:].tolist()
        if n_raced == 1:
            return Said(ends, logits, [tokens], [chances])
        at = [slice(i * best, i * best + best) for i in range(n_raced)]
        return Said(ends, logits, [tokens[i] for i in at], [chances[i] for i in at])
