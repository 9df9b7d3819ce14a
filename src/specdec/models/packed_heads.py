"""Trained heads as they run when drafting: the modules of heads.py with packed weights and our kernels inside.

The class and its forward code stay the same; what changes is what a product, a norm and a gate are made of. Packed heads have
no parameters and no gradients.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from specdec.config import ConfigError, Precision
from specdec.kernels.base import Kernels
from specdec.models.heads import Gate, MedusaHead, Norm, RecurrentHead
from specdec.quant.linear import Embedding
from specdec.quant.make import make_linear

AnyHead = TypeVar("AnyHead", MedusaHead, RecurrentHead)

_OWN = "outputs", "embedding"
"""What a head may bring of its own instead of taking it from the target."""


class PackedLinear(nn.Module):
    """nn.Linear by a packed matrix."""

    def __init__(self, linear: nn.Linear, kernels: Kernels, precision: Precision, device: torch.device) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach()
        self.linear = make_linear([linear.weight.detach()], precision, kernels, device, bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., k] f32 -> [..., n] f32"""
        return self.linear(_rows(x)).view(*x.shape[:-1], -1)


class PackedEmbedding(nn.Module):
    """nn.Embedding by a packed matrix."""

    def __init__(self, table: nn.Embedding, kernels: Kernels, precision: Precision, device: torch.device) -> None:
        super().__init__()
        self.embedding = Embedding(make_linear([table.weight.detach()], precision, kernels, device, None))

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] int64 -> [..., k] f32"""
        return self.embedding(ids.reshape(-1)).view(*ids.shape, -1)


class PackedNorm(nn.Module):
    """Norm by the kernels."""

    def __init__(self, norm: Norm, kernels: Kernels, device: torch.device) -> None:
        super().__init__()
        self.weight = norm.weight.detach().float().to(device)
        self._eps, self._rms_norm = norm.eps, kernels.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        return self._rms_norm(_rows(x), self.weight, self._eps).view(x.shape)


class PackedGate(nn.Module):
    """Gate by the kernels."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self._silu_mul = kernels.silu_mul

    def forward(self, gate_up: Tensor) -> Tensor:
        return self._silu_mul(_rows(gate_up)).view(*gate_up.shape[:-1], -1)


def pack_head(head: AnyHead, kernels: Kernels, precision: Precision, device: torch.device | None = None) -> AnyHead:
    """A head for drafting, with weights in the precision asked for; the head given is left as it is.

    Args:
        head: float modules on the CPU.
        kernels: what computes.
        precision: of every matrix; norms and biases are float32. ``auto`` is ``bf16`` on an accelerator and ``q8`` on a CPU,
            but there ``q4`` for the layers of a recurrent head, whose drafts are no worse for it (those of an output matrix
            in ``q4`` are). ``blocks`` is ``q8``, as for the floats of a model.
        device: where it will run; None is the CPU.

    Raises:
        ConfigError: a matrix does not allow the precision; the message names it.
    """
    device = device or torch.device("cpu")
    coarse = precision == "auto" and device.type == "cpu" and isinstance(head, RecurrentHead)
    if precision in ("auto", "blocks"):
        precision = "q8" if precision == "blocks" or device.type == "cpu" else "bf16"
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        packed = type(head)(head.config)
    for name, module in head.named_modules():
        try:
            twin = _pack(module, kernels, "q4" if coarse and not name.startswith(_OWN) else precision, device)
        except ValueError as error:
            raise ConfigError(f"{name} of the trained drafter: {error}") from error
        if twin is not None:
            packed.set_submodule(name, twin)
    if left := [name for name, _ in packed.named_parameters()]:
        raise TypeError(f"no packed form is known for {left[0]}")
    return packed.eval()


def packed_bytes(head: nn.Module) -> int:
    """Memory of a packed head's matrices."""
    modules = list(head.modules())
    return sum(m.linear.n_bytes for m in modules if isinstance(m, PackedLinear)) + sum(
        m.embedding.n_bytes for m in modules if isinstance(m, PackedEmbedding)
    )


def _pack(module: nn.Module, kernels: Kernels, precision: Precision, device: torch.device) -> nn.Module | None:
    """The packed form of a leaf; None for a module that only holds others, or computes without weights."""
    match module:
        case nn.Linear():
            return PackedLinear(module, kernels, precision, device)
        case nn.Embedding():
            return PackedEmbedding(module, kernels, precision, device)
        case Norm():
            return PackedNorm(module, kernels, device)
        case Gate():
            return PackedGate(kernels)
    return None


def _rows(x: Tensor) -> Tensor:
    """[..., d] -> [M, d] contiguous"""
    return x.reshape(-1, x.shape[-1]).contiguous()
