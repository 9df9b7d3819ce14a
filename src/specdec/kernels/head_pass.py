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
from typing import TypeAlias

import torch
from torch import Tensor

from specdec.kernels.fused import DecoderWeights, NativePass, native_decoder, raise_for
from specdec.kernels.library import INT, POINTER, Library
from specdec.kv import codec

_FIELDS = len(NativePass._fields_)


@dataclass(slots=True)
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


@dataclass(slots=True)
class Races:
    """What decides the rank of the candidates of some rows (``kernels.base.Kernels.candidates``)."""

    temperatures: list[float]
    seeds: list[int]
    positions: list[int]
    """Absolute, of the tokens that the candidates are."""
    logits: bool = True
    """Are the logits that they are ranked by wanted as well?"""


States: TypeAlias = "Tensor | array[float]"
"""[N, d] float32; of a native pass the numbers as they lie in memory, since to make a tensor takes as long as much else."""


@dataclass(slots=True)
class Said:
    """What a head says after some rows, W of them."""

    ends: States
    """[W, d] their states."""
    logits: Tensor | None
    """[W, Vd] float32 on the CPU where they were asked for."""
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
        self._hd = weights.head_dim
        self._angles, self._n_angles = (0, 0), 0
        self._room, self._rows = 0, 0
        self._reserve(256, 4)

    def _reserve(self, n: int, rows: int) -> None:
        """Have room for n integers of eight bytes, as many reals, and logits of some rows that nobody wants: what a call reads
        and writes lies in the same places from call to call, since to make an array takes longer than to fill it."""
        n, rows = max(n, self._room), max(rows, self._rows)
        self._room, self._rows = n, rows
        self._words, self._reals, self._spare = array("q", bytes(8 * n)), array("d", bytes(8 * n)), torch.empty(rows, self._n)
        self._word, self._real = self._words.buffer_info()[0], self._reals.buffer_info()[0]
        self._unwanted = self._spare.data_ptr()

    def turn(self, cos: Tensor, sin: Tensor) -> int:
        """Take the angles by which positions are turned, float32 [A, hd / 2], contiguous on the CPU, for the calls that follow.

        Returns:
            A, the most positions that there may be.

        Raises:
            ValueError: they are of another shape or kind.
        """
        if not all(x.dtype is torch.float32 and x.is_contiguous() and x.shape == (len(cos), self._hd // 2) for x in (cos, sin)):
            raise ValueError(f"angles must be contiguous float32 [A, {self._hd // 2}], got {cos.dtype} {list(cos.shape)}")
        self._alive_angles = cos, sin
        self._angles, self._n_angles = (cos.data_ptr(), sin.data_ptr()), len(cos)
        return self._n_angles

    def __call__(
        self,
        inputs: Inputs,
        rows: RowList,
        tables: Many[Many[int]],
        wanted: Many[int],
        races: Races | None,
    ) -> Said:
        """Run the rows: their keys and values are stored, and the wanted ones are heard.

        Args:
            tables: of each sequence, its blocks.
            wanted: increasing.
            races: of the wanted rows, whose candidates are ranked; None: they are not.

        Raises:
            IndexError: a row, block or token that does not exist.
            MemoryError: there is none for the activations.
        """
        n, n_wanted, per_row = len(rows.tokens), len(wanted), self._taps if inputs.fuse else 1
        n_starts = n * per_row
        if len(inputs.addresses) != n_starts:
            raise ValueError(f"{n} rows need {n_starts} vectors to start from, got {len(inputs.addresses)}")
        best, n_raced = (self._best, n_wanted) if races else (0, 0)
        first = _FIELDS + n_starts + 2 * n + n_wanted + 2 * n_raced  # the candidates, behind all that is read
        stop = first + n_raced * best
        if stop > self._room or n_wanted > self._rows:
            self._reserve(2 * stop, 2 * n_wanted)
        padded, width = rows.padded_paths()
        longest = max(map(len, tables))
        blocks = [block for table in tables for block in (*table, *(0,) * (longest - len(table)))]
        narrow = array("i", (*blocks, *rows.owners, *rows.slots, *rows.prefixes, *map(len, rows.paths), *padded))
        ends = array("f", bytes(4 * n_wanted * self._d))
        logits = torch.empty(n_wanted, self._n) if races and races.logits else None
        table = narrow.buffer_info()[0]
        owner = table + 4 * len(blocks)
        start = self._word + 8 * _FIELDS
        token = start + 8 * n_starts
        wish = token + 8 * n
        angle = wish + 8 * n_wanted
        seed = angle + 8 * n
        self._words[:first] = array("q", (
            # A NativePass, whose fields all have eight bytes: built so it takes a third of the time.
            token, wish, *self._angles, angle, self._n_angles, n, n_wanted,
            table, owner, owner + 4 * n, owner + 8 * n, owner + 16 * n, owner + 12 * n, len(tables), longest, width,
            *self._pool, self._unwanted if logits is None else logits.data_ptr(), 0, start, per_row, inputs.fuse,
            ends.buffer_info()[0],
            best, self._real, seed, seed + 8 * n_raced, self._names, seed + 16 * n_raced, self._real + 8 * n_raced,
            # What it points to.
            *inputs.addresses, *rows.tokens, *wanted, *rows.positions(), *(races.seeds + races.positions if races else ()),
        ))  # fmt: skip
        if races:
            self._reals[:n_raced] = array("d", races.temperatures)
        raise_for(self._decode(self._decoder_at, self._word))
        if n_raced == 0:
            return Said(ends, logits, [], [])
        tokens, chances = self._words[first:stop].tolist(), self._reals[n_raced : n_raced + n_raced * best].tolist()
        if n_raced == 1:
            return Said(ends, logits, [tokens], [chances])
        at = [slice(i * best, i * best + best) for i in range(n_raced)]
        return Said(ends, logits, [tokens[i] for i in at], [chances[i] for i in at])
