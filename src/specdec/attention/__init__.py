"""Attention over the paged pool."""

from __future__ import annotations

from specdec.attention.base import Attention
from specdec.attention.cpu import NativeAttention
from specdec.attention.reference import ReferenceAttention
from specdec.kernels.base import Kernels
from specdec.kernels.cpu import NativeKernels
from specdec.kv.pool import Pool


def select(pool: Pool, kernels: Kernels) -> Attention:
    """The attention that fits the kernels: native ones read the pool in place, without them torch gathers from it."""
    return NativeAttention(pool, kernels) if isinstance(kernels, NativeKernels) else ReferenceAttention(pool)
