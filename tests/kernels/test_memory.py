"""Memory for weights: copies that share nothing with their source, lie aligned behind each other, and outlive each other."""

from __future__ import annotations

import gc

import pytest
import torch
from native import NATIVE

from specdec.kernels import memory
from specdec.kernels.library import load


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_a_settled_tensor_is_a_copy(dtype: torch.dtype) -> None:
    """Shape, type and content are kept, also of a strided one; the original may go or change."""
    x = torch.arange(3 * 5 * 7).view(3, 5, 7).to(dtype).transpose(0, 2)
    settled = memory.settle(x)
    assert settled.is_contiguous()
    assert torch.equal(settled, x)
    x.zero_()
    assert settled.count_nonzero() == 3 * 5 * 7 - 1


def test_weights_follow_each_other_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass streams through them in the order in which they were loaded; each begins at a line of the cache."""
    monkeypatch.setattr(memory, "_free", torch.empty(0, dtype=torch.uint8))
    weights = [memory.settle(torch.full((size,), i, dtype=torch.uint8)) for i, size in enumerate((1, 64, 65, 1000))]
    starts = [weight.data_ptr() for weight in weights]
    assert starts[0] % memory.PAGE == 0
    assert [start - starts[0] for start in starts] == [0, 64, 128, 256]
    assert [int(weight.sum()) for weight in weights] == [0, 64, 130, 3000]


def test_what_exceeds_a_chunk_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights fit, and later small ones go into a new chunk; memory lives as long as any weight in it."""
    monkeypatch.setattr(memory, "_free", torch.empty(0, dtype=torch.uint8))
    monkeypatch.setattr(memory, "CHUNK", 4096)
    small, large, after = (memory.settle(torch.full((size,), 7, dtype=torch.uint8)) for size in (100, 5000, 100))
    del small
    gc.collect()
    assert int(large.sum()) == 7 * 5000
    assert int(after.sum()) == 700
    assert torch.equal(memory.settle(torch.empty(0, 3)), torch.empty(0, 3))


@pytest.mark.skipif(not NATIVE, reason="the native kernels are not built")
def test_the_rate_of_reading_is_that_of_all_bytes() -> None:
    """A rate that no machine reaches would make every pass look slow, and one of kilobytes every pass look good."""
    assert 1e8 < memory.read_rate(load(), 8 << 20, repeats=3) < 1e12


def test_scratch_is_the_same_memory_until_somebody_holds_it() -> None:
    """What is made of it in any way keeps it from being written again; what nobody holds is not kept twice."""
    scratch = memory.Scratch()
    first = scratch.rows(3, 5).fill_(1)
    row = first[1]
    del first
    second = scratch.rows(3, 5).fill_(2)
    assert row.tolist() == [1] * 5, "a row of an array that is gone is still read"
    array = second.numpy()[2]
    del second, row
    third = scratch.rows(3, 5).fill_(3)
    assert array.tolist() == [2] * 5
    place = third.data_ptr()
    del array, third
    gc.collect()
    for n in (3, 1, 0, 2):
        assert scratch.rows(n, 5).data_ptr() in (place, 0) or n == 0
        assert scratch.rows(n, 5).shape == (n, 5)


def test_scratch_grows_and_does_not_keep_what_is_very_large(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = memory.Scratch()
    small = scratch.rows(1, 8).data_ptr()
    assert scratch.rows(4096, 8).fill_(1).sum() == 4096 * 8
    grown = scratch.rows(1, 8).data_ptr()
    assert grown != small
    monkeypatch.setattr(memory, "CHUNK", 1024)
    assert scratch.rows(33, 8).data_ptr() != grown, "more than a chunk"
    assert scratch.rows(1, 8).data_ptr() == grown
