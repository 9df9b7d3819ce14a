"""Attention over the paged pool."""

from __future__ import annotations

from specdec.attention.base import Attention
from specdec.attention.cpu import NativeAttention
from specdec.attention.reference import ReferenceAttention
from specdec.kernels.base import Kernels
from specdec.kernels.portable import PortableKernels
from specdec.kv.pool import Pool


def select(pool: Pool, kernels: Kernels) -> Attention:
    """The attention that fits the kernels: native ones and Triton's read the pool in place, torch gathers from it."""
    return ReferenceAttention(pool) if isinstance(kernels, PortableKernels) else NativeAttention(pool, kernels)
