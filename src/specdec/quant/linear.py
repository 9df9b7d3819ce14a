"""The matrices of a model, whatever they are made of: a model calls them and looks rows up, and knows no more than that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.base import LANES, BlockWeight, DenseWeight, Kernels
from specdec.kernels.fused import Matrix
from specdec.kernels.memory import settle
from specdec.quant.blocks import pick, rows


class Linear(ABC):
    """y = x W^T with W [n, k]; a row of y depends on that row of x alone."""

    n: int
    k: int

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x [M, k] f32 -> [M, n] f32"""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Rows of W itself: ids [M] int64 -> [M, k] f32."""

    @abstractmethod
    def subset(self, ids: Tensor) -> Linear:
        """The outputs ``ids`` [n] int64 alone, in that order, as a matrix of their own that gives the same bits for them.

        Raises:
            IndexError: an id outside [0, n).
            ValueError: no id at all.
        """

    def matrix(self) -> Matrix | None:
        """The packed weights, for kernels that take a whole model; None where they are not packed for the CPU."""
        return None

    @property
    @abstractmethod
    def n_bytes(self) -> int:
        """Memory that the weight takes."""


class BlockLinear(Linear):
    """Weights in groups of 32 (q4, q8)."""

    def __init__(self, weight: BlockWeight, kernels: Kernels) -> None:
        self.n, self.k = weight.n, weight.k
        self.weight = weight
        self._kernels, self._product = kernels, kernels.block_linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self.weight)

    def rows(self, ids: Tensor) -> Tensor:
        return rows(self.weight, ids)

    def subset(self, ids: Tensor) -> BlockLinear:
        _check_ids(ids, self.n)
        device = self.weight.data.device
        weight = pick(self.weight, ids.to(device))
        return BlockLinear(replace(weight, data=place(weight.data, device)), self._kernels)

    def matrix(self) -> Matrix:
        return Matrix((self.weight,))

    @property
    def n_bytes(self) -> int:
        return self.weight.data.nbytes


class DenseLinear(Linear):
    """float32 or bfloat16 weights, packed for the dense product."""

    def __init__(self, weight: DenseWeight, kernels: Kernels) -> None:
        self.n, self.k = weight.n, weight.k
        self.weight = weight
        self._kernels, self._product = kernels, kernels.dense_linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self.weight)

    def rows(self, ids: Tensor) -> Tensor:
        if ids.is_cpu and ids.numel():
            _check_ids(ids, self.n)
        return self._channels(ids).float()

    def subset(self, ids: Tensor) -> DenseLinear:
        _check_ids(ids, self.n)
        data = self.weight.data
        weight = pack_dense(self._channels(ids.to(data.device)), data.dtype)
        return DenseLinear(replace(weight, data=place(weight.data, data.device)), self._kernels)

    def _channels(self, ids: Tensor) -> Tensor:
        """[n, k] in the weight's own type"""
        return self.weight.data[ids // LANES, :, ids % LANES]

    def matrix(self) -> Matrix:
        return Matrix((self.weight,))

    @property
    def n_bytes(self) -> int:
        return self.weight.data.nbytes


class DeviceLinear(Linear):
    """float32 or bfloat16 weights [n, k] where no kernel of ours runs, multiplied by torch in their own type.

    Fast, but torch picks its product by the number of rows, so rows are not independent of their company.
    """

    def __init__(self, weight: Tensor) -> None:
        self.n, self.k = weight.shape
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight).float()

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids].float()

    def subset(self, ids: Tensor) -> DeviceLinear:
        _check_ids(ids, self.n)
        return DeviceLinear(self.weight[ids.to(self.weight.device)])

    @property
    def n_bytes(self) -> int:
        return self.weight.nbytes


class StackedLinear(Linear):
    """Matrices over the same inputs that cannot be packed as one (their encodings differ), one below the other."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.n, self.k = sum(part.n for part in parts), parts[0].k

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], 1)

    def rows(self, ids: Tensor) -> Tensor:
        y = torch.empty(len(ids), self.k, device=ids.device)
        start = 0
        for part in self.parts:
            inside = (ids >= start) & (ids < start + part.n)
            y[inside] = part.rows(ids[inside] - start)
            start += part.n
        if len(ids):
            _check_ids(ids, self.n)
        return y

    def subset(self, ids: Tensor) -> Linear:
        _check_ids(ids, self.n)
        ends = torch.tensor([part.n for part in self.parts], device=ids.device).cumsum(0)
        owners = torch.bucketize(ids, ends, right=True)  # [n], which part each id lies in
        picked: list[Linear] = []
        start = 0
        for owner, count in zip(*(x.tolist() for x in torch.unique_consecutive(owners, return_counts=True)), strict=True):
            part = self.parts[owner]
            picked.append(part.subset(ids[start : start + count] - (int(ends[owner]) - part.n)))
            start += count
        return picked[0] if len(picked) == 1 else StackedLinear(picked)

    def matrix(self) -> Matrix | None:
        matrices = [part.matrix() for part in self.parts]
        return None if None in matrices else Matrix(tuple(p for matrix in matrices if matrix for p in matrix.parts))

    @property
    def n_bytes(self) -> int:
        return sum(part.n_bytes for part in self.parts)


class BiasedLinear(Linear):
    """A matrix and a bias [n] f32, added last."""

    def __init__(self, linear: Linear, bias: Tensor) -> None:
        if bias.shape != (linear.n,):
            raise ValueError(f"a bias of {list(bias.shape)} does not fit a matrix with {linear.n} outputs")
        self.n, self.k = linear.n, linear.k
        self.linear, self.bias = linear, bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.bias

    def rows(self, ids: Tensor) -> Tensor:
        return self.linear.rows(ids)

    def subset(self, ids: Tensor) -> BiasedLinear:
        return BiasedLinear(self.linear.subset(ids), self.bias[ids.to(self.bias.device)])

    def matrix(self) -> Matrix | None:
        matrix = self.linear.matrix()
        return matrix and Matrix(matrix.parts, self.bias)

    @property
    def n_bytes(self) -> int:
        return self.linear.n_bytes + self.bias.nbytes


class Embedding:
    """Token ids to rows of a matrix, which may be the output matrix as well (a tied embedding: no second table)."""

    def __init__(self, weight: Linear) -> None:
        self.weight = weight

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [M] int64 -> [M, k] f32"""
        return self.weight.rows(ids)

    def shares(self, head: Linear) -> bool:
        """Is the table the output matrix itself?"""
        return self.weight is head

    @property
    def n_bytes(self) -> int:
        """Memory that the table takes, were it not shared."""
        return self.weight.n_bytes


def pack_dense(weight: Tensor, dtype: torch.dtype) -> DenseWeight:
    """A float weight [N, K] packed [ceil(N / 16), K, 16] in float32 or bfloat16; channels past N are zero."""
    if weight.dim() != 2:
        raise ValueError(f"a matrix is [N, K], got {list(weight.shape)}")
    n, k = weight.shape
    whole = n // LANES * LANES
    data = torch.zeros(-(-n // LANES), k, LANES, dtype=dtype)
    data[: whole // LANES] = weight[:whole].view(-1, LANES, k).transpose(1, 2)
    if whole < n:
        data[-1, :, : n - whole] = weight[whole:].t()
    return DenseWeight(data, n, k)


def place(data: Tensor, device: torch.device) -> Tensor:
    """Packed weights where they stay."""
    return settle(data) if device.type == "cpu" else data.to(device)


def _check_ids(ids: Tensor, n: int) -> None:
    if not ids.numel():
        raise ValueError("a matrix needs at least one output, and no id was given")
    if not 0 <= int(ids.min()) <= int(ids.max()) < n:
        raise IndexError(f"rows {int(ids.min())} to {int(ids.max())} were asked of a weight with {n}")
