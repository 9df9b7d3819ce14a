"""Storage of keys and values for all layers, in blocks of 16 slots. Who owns which block is no concern of this module."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from specdec.config import BLOCK_SIZE


class Pool:
    """Keys [layers, blocks, KV, hd, 16] and values [layers, blocks, KV, 16, hd], laid out for the attention kernels."""

    def __init__(
        self, n_layers: int, n_blocks: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # Not cleared: a slot is never read before it is written, and untouched pages cost no memory.
        shape = n_layers, n_blocks, n_kv_heads
        self.keys = torch.empty(*shape, head_dim, BLOCK_SIZE, dtype=dtype, device=device)
        self.values = torch.empty(*shape, BLOCK_SIZE, head_dim, dtype=dtype, device=device)

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
                self.keys[:, blocks[c], :, :, t] = self.keys[:, blocks[b], :, :, s]
                self.values[:, blocks[c], :, t] = self.values[:, blocks[b], :, s]

    def poison(self, blocks: Many[int]) -> None:
        """Fill blocks with NaN, so that a test notices whoever reads what no row wrote."""
        self.keys[:, list(blocks)] = torch.nan
        self.values[:, list(blocks)] = torch.nan
