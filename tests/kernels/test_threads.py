"""The worker threads: every chunk runs once, whoever calls, and calls from several threads at once stay apart."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
from collections import Counter

import pytest
import torch
from native import FAST, NATIVE

from specdec.kernels import set_threads
from specdec.kernels.library import LIBRARY
from specdec.quant.linear import pack_dense

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native kernels are not built")

CHUNK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


@pytest.fixture(autouse=True)
def _same_threads():
    before = torch.get_num_threads()
    set_threads(3)
    yield
    set_threads(before)


WEIGHT = pack_dense(torch.randn(2048, 256, generator=torch.Generator().manual_seed(0)), torch.float32)
ROWS = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))


def product() -> torch.Tensor:
    """Large enough to be split."""
    return FAST.dense_linear(ROWS, WEIGHT)


@pytest.mark.parametrize("chunks", [0, 1, 2, 3, 100, 5000])
def test_every_chunk_runs_exactly_once(chunks: int) -> None:
    """No chunk is lost and none is done twice, also right after another call."""
    parallel = ctypes.CDLL(str(LIBRARY)).specdec_parallel
    parallel.argtypes = [ctypes.c_int, ctypes.c_int64, CHUNK, ctypes.c_void_p]
    for _ in range(20):
        seen: list[int] = []
        parallel(3, chunks, CHUNK(lambda context, i, seen=seen: seen.append(i)), None)
        assert Counter(seen) == Counter(range(chunks))


def test_callers_on_several_threads_get_their_own_results() -> None:
    """A server and a client in one process may both compute: whoever comes second works alone, and correctly."""
    expected, wrong = product(), []

    def caller() -> None:
        wrong.extend(i for i in range(30) if not torch.equal(product(), expected))

    callers = [threading.Thread(target=caller) for _ in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not wrong


def _in_child(expected: torch.Tensor) -> None:
    # Nothing of torch that may use its own threads: those do not survive fork() either.
    os._exit(0 if product().numpy().tobytes() == expected.numpy().tobytes() else 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_starts_its_own_threads() -> None:
    """The workers do not survive fork(); a child that waited for them would hang."""
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(product(),))
    child.start()
    child.join(timeout=20)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0
