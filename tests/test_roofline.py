"""What bounds a pass, and the memory of keys and values, beside figures worked out by hand."""

from __future__ import annotations

import pytest

from specdec.roofline import KV_BYTES, Machine, Sizes, Work, kv_bytes, widest_within

SMALL = Sizes(
    n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, layer_weights=1000, head_weights=500, weight_bytes=3000, kv_entry_bytes=2
)


def test_memory_of_keys_and_values() -> None:
    """SmolLM2-135M: 30 layers, 3 of 9 heads keep keys, 64 wide. Llama 3 8B: 32 layers, 8 of 32 heads, 128 wide."""
    assert kv_bytes(30, 3, 64, KV_BYTES["bf16"]) == 22.5 * 1024
    assert kv_bytes(32, 8, 128, KV_BYTES["bf16"]) == 128 * 1024
    assert kv_bytes(32, 8, 128, KV_BYTES["bf16"], tokens=8192) == 2**30
    assert kv_bytes(32, 32, 128, KV_BYTES["bf16"]) == 4 * kv_bytes(32, 8, 128, KV_BYTES["bf16"]), "without shared heads"
    assert kv_bytes(80, 8, 128, KV_BYTES["bf16"], tokens=131072) == 40 * 2**30
    assert kv_bytes(32, 8, 128, KV_BYTES["fp8"]) == kv_bytes(32, 8, 128, KV_BYTES["fp32"]) // 4


def test_the_work_of_a_pass_is_counted_term_by_term() -> None:
    """Every product and every key, one by one."""
    rows, cached, wanted = 3, 10, 2
    operations = 2 * (rows * 1000 + wanted * 500)
    for row in range(rows):
        for _ in range(cached + row + 1):  # each key that it sees, itself among them
            operations += 2 * 4 * 2 * 8 * 2  # layers, heads, score and value, dimensions; multiplied and added
    work = SMALL.work(rows, cached, wanted)
    assert work.operations == operations
    assert SMALL.kv_bytes == 2 * 2 * 2 * 8 * 2
    assert work.n_bytes == 3000 + 13 * 128


def test_the_roof_and_its_ridge() -> None:
    """Below the ridge memory bounds, above it arithmetic; both meet there."""
    machine = Machine(bytes_per_second=10.0, operations_per_second=80.0)
    assert machine.ridge == 8.0
    assert [machine.roof(x) for x in (1.0, 8.0, 20.0)] == [10.0, 80.0, 80.0]
    assert machine.seconds(Work(operations=80.0, n_bytes=100.0)) == 10.0
    assert machine.seconds(Work(operations=800.0, n_bytes=10.0)) == 10.0
    work = Work(operations=16.0, n_bytes=4.0)
    assert work.operations / machine.seconds(work) == machine.roof(work.intensity)


def test_more_rows_are_free_up_to_the_ridge() -> None:
    """The widest burst bound by memory: the next one is not, and a machine with no arithmetic to spare has none."""
    machine = Machine(bytes_per_second=1.0, operations_per_second=5.0)
    widest = widest_within(machine, SMALL, cached=16, rows=64)
    assert SMALL.work(widest, 16, widest).intensity <= 5.0 < SMALL.work(widest + 1, 16, widest + 1).intensity
    assert machine.seconds(SMALL.work(widest, 0, 0)) == pytest.approx(3000 + widest * 128)
    assert widest_within(Machine(1.0, 0.1), SMALL, 16, 64) == 0
    assert widest_within(Machine(1.0, 1e9), SMALL, 16, 64) == 64
