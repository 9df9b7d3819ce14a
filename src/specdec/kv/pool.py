"""Storage of keys and values for all layers, in blocks of 16 slots. Who owns which block is no concern of this module."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

import torch

from specdec.config import BLOCK_SIZE, ConfigError
from specdec.kv import codec


class Pool:
    """Keys [layers, blocks, KV, hd, 16] and values [layers, blocks, KV, 16, hd], laid out for the attention kernels.

    Where they are quantised, a block of either is one run of bytes, codes and then scales: [layers, blocks, KV, bytes].

    Args:
        dtype: of the storage; ``codec.DTYPES`` has one for each format.

    Raises:
        ConfigError: heads of that width cannot be held so, or there is no memory for so many blocks.
    """

    def __init__(
        self, n_layers: int, n_blocks: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        codec.check_head(dtype, head_dim)
        shape = n_layers, n_blocks, n_kv_heads
        of_keys, of_values = codec.block_shapes(dtype, head_dim)
        # Not cleared: a slot is never read before it is written, and untouched pages cost no memory.
        try:
            self.keys = torch.empty(*shape, *of_keys, dtype=dtype, device=device)
            self.values = torch.empty(*shape, *of_values, dtype=dtype, device=device)
        except RuntimeError as error:  # torch's for a lack of memory, of any device
            n_bytes = math.prod(shape) * (math.prod(of_keys) + math.prod(of_values)) * dtype.itemsize
            raise ConfigError(
                f"a pool of {n_blocks * BLOCK_SIZE:,} tokens takes {n_bytes / 1e9:,.1f} GB, which cannot be had: "
                "lower kv_tokens or max_len, or take kv_format int8"
            ) from error
        self.key_parts = codec.key_parts(self.keys, head_dim)
        """Views of the keys by slot, each [layers, blocks, 16, KV, x]."""
        self.value_parts = codec.value_parts(self.values, head_dim)

    @property
    def n_layers(self) -> int:
        return self.keys.shape[0]

    @property
    def n_blocks(self) -> int:
        return self.keys.shape[1]

    @property
    def n_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def move(self, blocks: Many[int], sources: Many[int], targets: Many[int]) -> None:
        """Copy slots of a sequence to other slots of it, in every layer: the accepted path closes up behind the prefix.

        Args:
            blocks: the sequence's block table.
            sources: slots to copy, increasing.
            targets: where each goes, increasing, never behind its source, so that nothing is overwritten before it is read.

        Raises:
            ValueError: the lists are not of that kind.
        """
        pairs = list(zip(sources, targets, strict=True))
        for i, (source, target) in enumerate(pairs):
            if target > source or target < 0 or (i and (source <= pairs[i - 1][0] or target <= pairs[i - 1][1])):
                raise ValueError(f"slots must move forward to earlier ones, in order: got {list(sources)} -> {list(targets)}")
        for source, target in pairs:
            if source != target:
                (b, s), (c, t) = divmod(source, BLOCK_SIZE), divmod(target, BLOCK_SIZE)
                for part in (*self.key_parts, *self.value_parts):
                    part[:, blocks[c], t] = part[:, blocks[b], s]

    def poison(self, blocks: Many[int]) -> None:
        """Fill blocks with NaN, so that a test notices whoever reads what no row wrote. (Scales of codes become NaN.)"""
        for part in (self.key_parts[-1], self.value_parts[-1]):
            part[:, list(blocks)] = torch.nan
