"""The native kernels on the CPU: rows that do not fit a weight are errors, never reads out of bounds."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from specdec.kernels.base import BlockWeight, DenseWeight
from specdec.kernels.cpu_rows import RowOps
from specdec.kernels.fused import DecoderWeights, FusedDecoder, why_not
from specdec.kernels.head_pass import HeadPass
from specdec.kernels.library import FULL_NAMES, INT, LONG, POINTER, Library

_log = logging.getLogger(__name__)


class NativeKernels(RowOps):
    """Every operation in C, for the instruction set that ``library`` was loaded for."""

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self._library = library
        self.name = FULL_NAMES[library.isa]
        self._block = library.function("block_linear", POINTER, POINTER, POINTER, LONG, LONG, LONG, INT, returns=INT)
        self._dense = library.function("dense_linear", POINTER, POINTER, POINTER, LONG, LONG, LONG, INT)

    def block_linear(self, x: Tensor, weight: BlockWeight) -> Tensor:
        rows = _check(x, weight.k)
        y = torch.empty((rows, weight.n), dtype=torch.float32)
        if self._block(x.data_ptr(), weight.data.data_ptr(), y.data_ptr(), rows, weight.n, weight.k, weight.kind == "q4"):
            raise MemoryError(f"no memory to quantise {rows} rows of {weight.k} entries")
        return y

    def dense_linear(self, x: Tensor, weight: DenseWeight) -> Tensor:
        rows = _check(x, weight.k)
        y = torch.empty((rows, weight.n), dtype=torch.float32)
        bf16 = weight.data.dtype is torch.bfloat16
        self._dense(x.data_ptr(), weight.data.data_ptr(), y.data_ptr(), rows, weight.n, weight.k, bf16)
        return y

    def fuse(self, weights: DecoderWeights) -> FusedDecoder | None:
        if reason := why_not(weights):
            _log.warning("passes run operation by operation, more slowly: the fused pass does not take %s", reason)
            return None
        return FusedDecoder(self._library, weights)

    def fuse_head(
        self, weights: DecoderWeights, keys: Tensor, values: Tensor, names: Tensor | None, best: int
    ) -> HeadPass | None:
        if reason := why_not(weights):
            _log.warning("a trained drafter runs operation by operation, more slowly: the fused pass does not take %s", reason)
            return None
        return HeadPass(self._library, weights, keys, values, names, best)


def _check(x: Tensor, k: int) -> int:
    """The number of rows of x, which must be [M, k] float32, contiguous and on the CPU."""
    if x.dtype is not torch.float32 or x.dim() != 2 or x.shape[1] != k or not x.is_contiguous() or not x.is_cpu:
        layout = "contiguous" if x.is_contiguous() else "strided"
        raise ValueError(
            f"a product needs contiguous float32 rows [M, {k}] on the CPU, got {layout} {x.dtype} {list(x.shape)} on {x.device}"
        )
    return x.shape[0]
