"""Memory for weights: large pages, one weight behind the other in the order in which a pass reads them.

A pass streams all weights. On pages of 4 KiB the processor's prefetching stops at each border and the addresses of 20,000
pages a pass must be looked up; on pages of 2 MiB the same kernels read a third to a half faster.
"""

from __future__ import annotations

import math
import mmap
import sys
import time
from threading import Lock

import torch
from torch import Tensor

from specdec.kernels.library import LONG, POINTER, Library

PAGE = 2 << 20
CHUNK = 32 << 20
"""Mapped at a time. What is not used of it is never touched, so it costs nothing."""
_LINE = 64
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if sys.platform == "linux" else {}
"""Linux has large pages for memory that no other process can see."""

_lock = Lock()
_free = torch.empty(0, dtype=torch.uint8)
"""What is left of the chunk mapped last."""


def settle(x: Tensor) -> Tensor:
    """A copy of a CPU tensor in memory that the system maps in large pages where it can; contiguous, aligned to 64 bytes."""
    global _free
    size = -(-x.nbytes // _LINE) * _LINE
    with _lock:
        if size > len(_free):
            _free = _map(max(size, CHUNK))
        place, _free = _free[: x.nbytes], _free[size:]
    return place.view(x.dtype).view(x.shape).copy_(x)


def _map(size: int) -> Tensor:
    """Untouched bytes that begin at a border of large pages; they are unmapped when the last tensor in them is gone."""
    mapping = mmap.mmap(-1, size + PAGE, **_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE
    return whole[start : start + size]


def read_rate(library: Library, n_bytes: int, repeats: int = 5) -> float:
    """Bytes a second at which the threads read memory that is laid out like weights: the best of some passes over it.

    A pass over a model's weights cannot be faster than its bytes at this rate, as long as they exceed the caches.
    """
    stream = library.function("stream", POINTER, LONG, returns=LONG)
    memory = _map(max(n_bytes, PAGE)).fill_(1)
    best = math.inf
    for _ in range(repeats):
        started = time.perf_counter()
        stream(memory.data_ptr(), len(memory))
        best = min(best, time.perf_counter() - started)
    return len(memory) / best
