"""From the tensors of a file to a matrix that runs: encoded as asked for, packed for the kernels, joined where parts allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from specdec.config import Precision
from specdec.kernels.base import LANES, BlockWeight, Kernels
from specdec.kernels.portable import PortableKernels
from specdec.quant.blocks import GgufKind, dequantize, from_float, from_gguf, join
from specdec.quant.linear import (
    BiasedLinear,
    BlockLinear,
    DenseLinear,
    DeviceLinear,
    Linear,
    StackedLinear,
    pack_dense,
    place,
)


class GgufTensor(Protocol):
    """A matrix [N, K] as a GGUF file encodes it."""

    @property
    def kind(self) -> GgufKind: ...

    @property
    def raw(self) -> Tensor:
        """uint8 [N, bytes of a row]"""
        ...


def make_linear(
    parts: Sequence[Tensor | GgufTensor], precision: Precision, kernels: Kernels, device: torch.device, bias: Tensor | None
) -> Linear:
    """One matrix from parts that lie one below the other (query, key, value; gate, up), in the precision that was asked for.

    ``auto`` takes each part as it comes: blocks stay blocks, bfloat16 stays bfloat16, other floats become float32.
    ``blocks`` does the same and refuses floats. ``q4`` and ``q8`` quantise what is not already of that kind; ``bf16`` and
    ``fp32`` read blocks back into floats.

    Args:
        parts: float tensors [N, K] or GGUF tensors, over the same K inputs.
        kernels: what multiplies.
        device: where the weights will lie.
        bias: [sum of N], added to the product, or None.

    Raises:
        ValueError: a part that does not allow the precision, or parts of different widths.
    """
    packed = [_encode(part, precision) for part in parts]
    linears: list[Linear] = []
    for run in _runs(packed):
        if isinstance(run[0], BlockWeight):
            weight = join([w for w in run if isinstance(w, BlockWeight)])
            data = place(weight.data, device)
            linears.append(BlockLinear(BlockWeight(data, weight.kind, weight.n, weight.k), kernels))
            continue
        dense = torch.cat([w for w in run if isinstance(w, Tensor)])
        if device.type != "cpu" and isinstance(kernels, PortableKernels):
            linears.append(DeviceLinear(dense.to(device)))
        else:
            packed_dense = pack_dense(dense, dense.dtype)
            linears.append(DenseLinear(replace(packed_dense, data=place(packed_dense.data, device)), kernels))
    if len({linear.k for linear in linears}) > 1:
        raise ValueError(f"parts of one matrix need the same width, got {[linear.k for linear in linears]}")
    whole = linears[0] if len(linears) == 1 else StackedLinear(linears)
    return whole if bias is None else BiasedLinear(whole, bias.to(device))


def _encode(part: Tensor | GgufTensor, precision: Precision) -> BlockWeight | Tensor:
    """Block weights, or floats [N, K] in the type that they are to be kept in."""
    if isinstance(part, Tensor):
        if precision == "blocks":
            raise ValueError(
                f"precision blocks keeps the blocks of a GGUF file, but here are floats ({part.dtype}): choose auto, q4 or q8"
            )
        if precision == "q4" or precision == "q8":
            return from_float(part, precision)
        keep = precision == "bf16" or (precision == "auto" and part.dtype is torch.bfloat16)
        return part.detach().to("cpu", torch.bfloat16 if keep else torch.float32)
    blocks = from_gguf(part.raw, part.kind)
    if precision in ("auto", "blocks", blocks.kind):
        return blocks
    return _encode(dequantize(blocks), precision)


def _runs(packed: Sequence[BlockWeight | Tensor]) -> list[list[BlockWeight | Tensor]]:
    """Neighbours that can be joined into one weight: of one encoding, and all but the last of whole blocks of channels."""
    runs: list[list[BlockWeight | Tensor]] = []
    for weight in packed:
        last = runs[-1][-1] if runs else None
        if isinstance(weight, BlockWeight) and isinstance(last, BlockWeight):
            fits = (weight.kind, weight.k) == (last.kind, last.k) and last.n % LANES == 0
        else:
            fits = (
                isinstance(weight, Tensor)
                and isinstance(last, Tensor)
                and (weight.dtype, weight.shape[1]) == (last.dtype, last.shape[1])
            )
        if fits:
            runs[-1].append(weight)
        else:
            runs.append([weight])
    return runs
