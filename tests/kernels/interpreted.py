"""Triton's kernels where there is no accelerator: through Triton's interpreter, with the two faults that matter here mended.

The interpreter multiplies the bit patterns of bfloat16 numbers, and leaves products to a library that sums a row of a tile
differently from another. Tensor cores compute each entry of a tile from its own row and column in one order, and so does
the product below.
"""

from __future__ import annotations

import os

import pytest
import torch

ON_DEVICE = torch.cuda.is_available()
if not ON_DEVICE:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when a kernel is defined

triton = pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np  # noqa: E402
from torch import Tensor  # noqa: E402

from specdec.kernels.base import BlockWeight, DenseWeight, Kernels, Rows  # noqa: E402
from specdec.kernels.portable import PortableKernels  # noqa: E402
from specdec.kernels.triton import TritonKernels  # noqa: E402

DEVICE = torch.device("cuda" if ON_DEVICE else "cpu")


class OnDevice(Kernels):
    """Triton's kernels on tensors that lie on the CPU, as the checks of all kernels have them."""

    name = "triton"

    def __init__(self) -> None:
        self.kernels = TritonKernels(PortableKernels())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.kernels.rms_norm(x.to(DEVICE), weight.to(DEVICE), eps).cpu()

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self.kernels.silu_mul(gate_up.to(DEVICE)).cpu()

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        moved = x.to(DEVICE)
        self.kernels.rope(moved, cos.to(DEVICE), sin.to(DEVICE))
        x.copy_(moved)

    def block_linear(self, x: Tensor, weight: BlockWeight) -> Tensor:
        moved = BlockWeight(weight.data.to(DEVICE), weight.kind, weight.n, weight.k)
        return self.kernels.block_linear(x.to(DEVICE), moved).cpu()

    def dense_linear(self, x: Tensor, weight: DenseWeight) -> Tensor:
        return self.kernels.dense_linear(x.to(DEVICE), DenseWeight(weight.data.to(DEVICE), weight.n, weight.k)).cpu()

    def store(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> None:
        moved = keys.to(DEVICE), values.to(DEVICE)
        self.kernels.store(k.to(DEVICE), v.to(DEVICE), *moved, _moved(rows))
        keys.copy_(moved[0])
        values.copy_(moved[1])

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float, window: int) -> Tensor:
        return self.kernels.attend(q.to(DEVICE), keys.to(DEVICE), values.to(DEVICE), _moved(rows), scale, window).cpu()

    def top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return self.kernels.top(logits, k)

    def race(self, logp: Tensor, seed: int, position: int) -> int:
        return self.kernels.race(logp, seed, position)

    def candidates(
        self, logits: Tensor, heat: Tensor, seeds: Tensor, positions: Tensor, k: int, names: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self.kernels.candidates(logits, heat, seeds, positions, k, names)


def _moved(rows: Rows) -> Rows:
    fields = (rows.tables, rows.sequence, rows.slot, rows.prefix, rows.path, rows.n_path)
    return Rows(*(field.to(DEVICE) for field in fields))


def _widened(x):
    """The numbers of a tile, float32 where they are bfloat16."""
    if x.dtype.scalar.name == "bf16":
        return (x.data.astype(np.uint32) << 16).view(np.float32)
    return x.data


def _dot(_builder, a, b, total, _precision, _imprecise):
    from triton.runtime.interpreter import TensorHandle

    left, right, result = _widened(a), _widened(b), total.data.copy()
    for k in range(left.shape[1]):
        result += left[:, k, None].astype(result.dtype) * right[k].astype(result.dtype)
    return TensorHandle(result, total.dtype.scalar)


def _cast(plain):
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def cast(builder, source, target):
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle(_widened(source), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.array(source.data, np.float32)).bfloat16().view(torch.uint16).numpy()
            return TensorHandle(rounded, tl.bfloat16)
        return plain(builder, source, target)

    return cast


if not ON_DEVICE:
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.cast_impl = _cast(InterpreterBuilder.cast_impl)
