"""Memory for weights: large pages, one weight behind the other in the order in which a pass reads them.

A pass streams all weights. On pages of 4 KiB the processor's prefetching stops at each border and the addresses of 20,000
pages a pass must be looked up; on pages of 2 MiB the same kernels read a third to a half faster.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import time
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
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


_OWN = 2
"""References to an array that nobody holds but a ``Scratch``: its own, and that of the call that counts them."""


class Scratch:
    """Memory for an array that every pass makes anew: the same again, unless somebody still holds what was made in it.

    Were such arrays allocated and freed, small ones that outlive a pass would come to lie between them, and the memory of a
    process would grow by one of them a pass. Calls may come from several threads at once.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._memory: NDArray[np.float32] = np.empty(0, np.float32)
        self._made: NDArray[np.float32] = self._memory.reshape(0, 0)
        """What was made last, for the next pass of as many rows."""

    def rows(self, n: int, width: int) -> Tensor:
        """[n, width] float32, filled with anything."""
        size = n * width
        if 4 * size > CHUNK:
            return torch.empty(n, width)  # of a long text, every row of which is wanted: seldom, and much to keep
        with self._lock:
            # A tensor holds the array that it was made of, and so does all that is made of the tensor.
            held = sys.getrefcount(self._made) > _OWN
            if held or size > len(self._memory):
                self._memory = _map(4 * max(size, len(self._memory))).view(torch.float32).numpy()
            if held or self._made.shape != (n, width):
                self._made = self._memory[:size].reshape(n, width)
            return torch.from_numpy(self._made)


def give_back() -> None:
    """Return to the system what was freed and is kept for later: a quarter of a small model's size after it was read.

    Does nothing where the C library has no such call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


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
