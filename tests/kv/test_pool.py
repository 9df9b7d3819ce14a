"""Storage of keys and values: the accepted path closes up in every layer, and poison reaches every slot of a block."""

from __future__ import annotations

import pytest
import torch

from specdec.config import ConfigError
from specdec.kv.codec import KINDS, decode, name_of, quantised
from specdec.kv.pool import Pool

BLOCKS = [4, 0, 2]


def numbered(dtype: torch.dtype = torch.float32) -> Pool:
    """A pool in which every element is different (float32) or random, and each block belongs to BLOCKS or to nobody."""
    pool = Pool(3, 6, 2, 16, dtype, torch.device("cpu"))
    if quantised(dtype):
        noise = torch.Generator().manual_seed(0)
        for storage in (pool.keys, pool.values):
            storage.copy_(torch.randint(-128, 128, storage.shape, generator=noise).to(dtype))
        return pool
    pool.keys.copy_(torch.arange(pool.keys.numel()).view(pool.keys.shape))
    pool.values.copy_(-torch.arange(pool.values.numel()).view(pool.values.shape))
    return pool


def slots(pool: Pool) -> list[torch.Tensor]:
    """Everything that BLOCKS hold, by slot: each [layers, slots, KV, bytes]."""
    parts = (*pool.key_parts, *pool.value_parts)
    return [part[:, BLOCKS].flatten(1, 2).contiguous().view(torch.uint8) for part in parts]


@pytest.mark.parametrize("dtype", list(KINDS), ids=name_of)
@pytest.mark.parametrize(
    ("sources", "targets"),
    [([], []), ([20], [20]), ([21, 22], [20, 21]), ([17, 30, 31, 32, 47], [14, 15, 16, 17, 18]), ([40, 47], [3, 40])],
)
def test_move_copies_each_slot_before_it_is_overwritten(dtype: torch.dtype, sources: list[int], targets: list[int]) -> None:
    """Within a block and across blocks, in place; other slots and other blocks stay as they are."""
    pool, before = numbered(dtype), numbered(dtype)
    pool.move(BLOCKS, sources, targets)
    for now, was in zip(slots(pool), slots(before), strict=True):
        expected = was.clone()
        expected[:, targets] = was[:, sources]
        assert torch.equal(now, expected)
    others = [1, 3, 5]
    assert torch.equal(pool.keys[:, others], before.keys[:, others])
    assert torch.equal(pool.values[:, others], before.values[:, others])


@pytest.mark.parametrize(
    ("sources", "targets"), [([5], [6]), ([7, 7], [5, 6]), ([7, 8], [6, 6]), ([9, 8], [5, 6]), ([3], [-1])]
)
def test_moves_that_could_lose_a_slot_are_refused(sources: list[int], targets: list[int]) -> None:
    with pytest.raises(ValueError, match="in order"):
        numbered().move(BLOCKS, sources, targets)


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError):
        numbered().move(BLOCKS, [5, 6], [5])


@pytest.mark.parametrize("dtype", list(KINDS), ids=name_of)
def test_poison_fills_its_blocks_and_no_other(dtype: torch.dtype) -> None:
    """Whatever is read of them is NaN."""
    pool = Pool(3, 6, 2, 16, dtype, torch.device("cpu"))
    pool.keys.zero_(), pool.values.zero_()
    pool.poison([1, 4])
    for parts in (pool.key_parts, pool.value_parts):
        assert decode(tuple(part[:, [1, 4]] for part in parts)).isnan().all()
        assert not decode(tuple(part[:, [0, 2, 3, 5]] for part in parts)).isnan().any()


@pytest.mark.parametrize(("dtype", "row"), [(torch.bfloat16, 32), (torch.int8, 16 + 2), (torch.uint8, 8 + 2)])
def test_size(dtype: torch.dtype, row: int) -> None:
    """Two tensors of 3 layers, 6 blocks, 2 heads of 16, 16 slots; codes have a scale for sixteen entries."""
    pool = numbered(dtype)
    assert (pool.n_layers, pool.n_blocks, pool.n_bytes) == (3, 6, 2 * 3 * 6 * 2 * 16 * row)


def test_heads_that_no_group_divides_are_refused() -> None:
    with pytest.raises(ConfigError, match="int8 takes heads of a multiple of 16"):
        Pool(1, 1, 1, 8, torch.int8, torch.device("cpu"))
