"""Storage of keys and values: the accepted path closes up in every layer, and poison reaches every slot of a block."""

from __future__ import annotations

import pytest
import torch

from specdec.kv.pool import Pool

BLOCKS = [4, 0, 2]


def numbered(dtype: torch.dtype = torch.float32) -> Pool:
    """A pool in which every element is different (float32), and each block belongs to BLOCKS or to nobody."""
    pool = Pool(3, 6, 2, 8, dtype, torch.device("cpu"))
    pool.keys.copy_(torch.arange(pool.keys.numel()).view(pool.keys.shape))
    pool.values.copy_(-torch.arange(pool.values.numel()).view(pool.values.shape))
    return pool


def slots(pool: Pool) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of BLOCKS by slot: [layers, slots, KV, hd]."""
    return pool.keys[:, BLOCKS].permute(0, 1, 4, 2, 3).flatten(1, 2), pool.values[:, BLOCKS].transpose(2, 3).flatten(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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


def test_poison_fills_its_blocks_and_no_other() -> None:
    pool = numbered()
    pool.poison([1, 4])
    for storage in (pool.keys, pool.values):
        assert storage[:, [1, 4]].isnan().all()
        assert not storage[:, [0, 2, 3, 5]].isnan().any()


def test_size() -> None:
    """Two tensors of 3 layers, 6 blocks, 2 heads of 8, 16 slots."""
    pool = numbered(torch.bfloat16)
    assert (pool.n_layers, pool.n_blocks, pool.n_bytes) == (3, 6, 2 * 2 * 3 * 6 * 2 * 8 * 16)
