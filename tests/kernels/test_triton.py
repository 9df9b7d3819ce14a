"""Triton's kernels: right by the portable ones, and a row's bits decided by the row alone.

They run on a CUDA device where there is one, else through Triton's interpreter, which is slow: shapes are small.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import tiny
from interpreted import ON_DEVICE, OnDevice
from paged import Paged, Row, burst

from specdec.kernels import triton as face
from specdec.kernels.base import Rows
from specdec.kernels.portable import PortableKernels
from specdec.kv import codec
from specdec.models.load import load_model
from specdec.models.source import resolve
from specdec.quant.blocks import from_float
from specdec.quant.linear import pack_dense
from specdec.runner.invariance import check_invariance

if ON_DEVICE:
    pytestmark = pytest.mark.gpu

TRITON, PORTABLE = OnDevice(), PortableKernels()
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_product(dtype: torch.dtype, n: int, k: int, rows: tuple[int, ...]) -> None:
    weight, x = pack_dense(noise(n, k) / k**0.5, dtype), noise(max(rows), k, seed=1)
    alone = torch.cat([TRITON.dense_linear(x[i : i + 1].clone(), weight) for i in range(len(x))])
    torch.testing.assert_close(alone, PORTABLE.dense_linear(x, weight), rtol=1e-4, atol=1e-4)
    for m in rows:
        assert torch.equal(TRITON.dense_linear(x[:m].clone(), weight), alone[:m]), f"rows differ among {m}"


@DTYPES
@pytest.mark.parametrize(("n", "k"), [(40, 96), (33, 48), (16, 528)])
def test_a_product_is_right_and_its_rows_are_alone(dtype: torch.dtype, n: int, k: int) -> None:
    """Channels and inputs that fill no tile, a sum in parts, and 1 to 19 rows: two tiles of rows."""
    check_product(dtype, n, k, (2, 16, 19))


def test_bfloat16_products_keep_more_of_the_row_than_bfloat16() -> None:
    """A row goes in as two bfloat16 numbers: the error is far below that of rounding the row."""
    weight, x = pack_dense(noise(16, 64) / 8, torch.bfloat16), noise(2, 64, seed=1)
    exact = PORTABLE.dense_linear(x, weight)
    error = (TRITON.dense_linear(x, weight) - exact).abs().max()
    assert error * 20 < (PORTABLE.dense_linear(x.bfloat16().float(), weight) - exact).abs().max()


@pytest.mark.parametrize("kind", ["q4", "q8"])
@pytest.mark.parametrize(("n", "k"), [(40, 96), (16, 320)])
def test_a_block_product_is_right_and_its_rows_are_alone(kind: str, n: int, k: int) -> None:
    """One part and several; rows that are zero, tiny, huge or broken are as the contract says and disturb no other."""
    weight, x = from_float(noise(n, k) / k**0.5, kind), noise(18, k, seed=1)
    x[1], x[2, :32], x[3, 5], x[4, 40], x[5] = 0, 1e-38, torch.inf, torch.nan, 1e30
    alone = torch.cat([TRITON.block_linear(x[i : i + 1].clone(), weight) for i in range(len(x))])
    torch.testing.assert_close(alone, PORTABLE.block_linear(x, weight), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert alone[3:5].isnan().all()
    for m in (2, 18):
        torch.testing.assert_close(TRITON.block_linear(x[:m].clone(), weight), alone[:m], rtol=0, atol=0, equal_nan=True)


def test_the_check_notices_a_sum_cut_by_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What libraries do, and why there are kernels of our own: parts that depend on how many rows there are."""

    class ByRows(face.TritonKernels):
        def dense_linear(self, x, weight):
            monkeypatch.setattr(face, "plan", lambda n, k, depth: (32, 9, 1) if len(x) == 1 else (32, 3, 3))
            return super().dense_linear(x, weight)

    monkeypatch.setattr(TRITON, "kernels", ByRows(PORTABLE))
    with pytest.raises(AssertionError, match="rows differ among 2"):
        check_product(torch.float32, 16, 528, (2,))


@pytest.mark.parametrize(("n", "k"), [(576, 576), (960, 576), (49152, 576), (576, 1536), (8, 16), (152_064, 8192)])
def test_a_plan_covers_its_weight_once(n: int, k: int) -> None:
    for depth in (32, 64):
        columns, steps, parts = face.plan(n, k, depth)
        assert columns % 16 == 0
        assert (parts - 1) * steps * depth < k <= parts * steps * depth


def test_row_passes_are_right_and_alone() -> None:
    """Norm, per head too, gate, and rotation of a strided view: each equals the portable one and itself alone."""
    x, weight = noise(5, 7, 24), noise(24, seed=1)
    normed = TRITON.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(normed, PORTABLE.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6)
    assert torch.equal(TRITON.rms_norm(x[3:4, 2:3].clone(), weight, 1e-5), normed[3:4, 2:3])

    gate_up = noise(4, 2 * 1100)
    gated = TRITON.silu_mul(gate_up)
    torch.testing.assert_close(gated, PORTABLE.silu_mul(gate_up), rtol=1e-5, atol=1e-6)
    assert torch.equal(TRITON.silu_mul(gate_up[2:3].clone()), gated[2:3])

    cos, sin = noise(5, 12, seed=2), noise(5, 12, seed=3)
    turned, expected, alone = x.clone(), x.clone(), x[4:].clone()
    TRITON.rope(turned[:, :5], cos, sin)
    PORTABLE.rope(expected[:, :5], cos, sin)
    TRITON.rope(alone[:, :5], cos[4:].clone(), sin[4:].clone())
    torch.testing.assert_close(turned, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(turned[:, 5:], x[:, 5:]), "heads outside the view were turned"
    assert torch.equal(alone, turned[4:])


ROWS = [*burst(0, 62, 66), Row(0, 66, (67, 69, 71)), Row(0, 3, (3,)), Row(1, 17, (18,)), Row(0, 0, (5,))]


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "hd"),
    [
        *((dtype, *shape) for dtype in (torch.bfloat16, torch.float32) for shape in ((9, 3, 64), (4, 1, 24), (2, 2, 8))),
        *((dtype, *shape) for dtype in (torch.int8, torch.uint8) for shape in ((9, 3, 64), (4, 1, 48))),
    ],
)
def test_attention_is_right_and_its_rows_are_alone(dtype: torch.dtype, heads: int, kv_heads: int, hd: int) -> None:
    """Bursts across a tile, paths, two sequences; heads that fill no tile; every slot that a row does not see is NaN."""
    paged = Paged(TRITON, [72, 20], heads=heads, kv_heads=kv_heads, hd=hd, dtype=dtype)
    q = paged.queries(len(ROWS))
    got = paged.attend(q, ROWS)
    np.testing.assert_allclose(got.numpy(), paged.expected(q, ROWS), rtol=2e-5, atol=3e-5)
    assert torch.equal(got, paged.alone(q, ROWS))


def test_attention_over_parts_equals_attention_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of one part has the same bits beside rows of several, windows count positions, and other blocks change nothing."""
    monkeypatch.setattr(face, "PART", 128)  # two parts of two tiles
    paged, elsewhere = (Paged(TRITON, [136, 9], heads=4, kv_heads=2, hd=16, layout=layout) for layout in (0, 5))
    short = Paged(TRITON, [128], heads=4, kv_heads=2, hd=16)
    rows = [*burst(0, 126, 130), Row(0, 60, (62, 70)), Row(0, 120, tuple(range(121, 135))), Row(1, 3, (5,))]
    q = paged.queries(len(rows))
    for window in (0, 5, 70):
        got = paged.attend(q, rows, window)
        np.testing.assert_allclose(got.numpy(), paged.expected(q, rows, window), rtol=2e-5, atol=3e-5)
        assert torch.equal(got, paged.alone(q, rows, window))
        assert torch.equal(got, elsewhere.attend(q, rows, window))
        assert torch.equal(got[:2], _first_sequence(short, paged).attend(q[:2].clone(), rows[:2], window))


def _first_sequence(short: Paged, paged: Paged) -> Paged:
    """``short`` with the first keys of the other's first sequence, in a table so short that no list has parts."""
    every = [Row(0, slot) for slot in range(len(short.k[0]))]
    TRITON.store(paged.k[0][: len(every)], paged.v[0][: len(every)], short.keys, short.values, short.rows(every))
    return short


def test_a_path_equals_the_same_keys_in_line() -> None:
    """A tree node whose ancestors lie scattered has the bits of a row whose prefix holds the same keys."""
    tree = Paged(TRITON, [72], heads=4, kv_heads=2, hd=16)
    node = Row(0, 60, (61, 64, 65, 69, 71))
    line = Paged(TRITON, [len(node.slots)], heads=4, kv_heads=2, hd=16, layout=3)
    everywhere = line.rows([Row(0, slot) for slot in range(len(node.slots))])
    TRITON.store(tree.k[0][node.slots], tree.v[0][node.slots], line.keys, line.values, everywhere)
    q = tree.queries(1)
    assert torch.equal(tree.attend(q, [node]), line.attend(q, [Row(0, len(node.slots))]))


def test_padding_writes_nothing_and_sees_nothing() -> None:
    paged = Paged(TRITON, [20], heads=4, kv_heads=2, hd=16)
    keys, values = paged.keys.clone(), paged.values.clone()
    one, none = torch.zeros(1, dtype=torch.int32), torch.full((1,), -1, dtype=torch.int32)
    rows = Rows(paged.tables, one, none, one, torch.zeros(1, 4, dtype=torch.int32), one)
    TRITON.store(torch.ones(1, 2, 16), torch.ones(1, 2, 16), paged.keys, paged.values, rows)
    assert torch.equal(keys.nan_to_num(7), paged.keys.nan_to_num(7))
    assert torch.equal(values.nan_to_num(7), paged.values.nan_to_num(7))
    for kernels in (TRITON, PORTABLE):
        assert not kernels.attend(torch.ones(1, 4, 16), paged.keys, paged.values, rows, 1.0, 0).any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=codec.name_of)
@pytest.mark.parametrize("hd", [48, 64])
def test_rows_become_the_codes_of_the_portable_kernels(dtype: torch.dtype, hd: int) -> None:
    """Also where they are zero, tiny or broken; a row whose slot is -1 writes nothing."""
    pools = [Paged(kernels, [20], heads=4, kv_heads=2, hd=hd, dtype=dtype) for kernels in (TRITON, PORTABLE)]
    x = noise(6, 2, hd)
    x[1], x[2, 0, 3], x[3, 1, 20], x[4] = 0, torch.inf, torch.nan, 1e-37
    rows = pools[0].rows([Row(0, slot) for slot in (0, 7, 8, 15, 16, 17)])
    rows.slot[5] = -1
    for paged, kernels in zip(pools, (TRITON, PORTABLE), strict=True):
        kernels.store(x, -x, paged.keys, paged.values, rows)
    for ours, theirs in zip(pools[0].parts, pools[1].parts, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.skipif(ON_DEVICE, reason="tests/test_gpu.py does this on the device")
def test_the_self_test_finds_a_model_on_these_kernels_exact(tmp_path: Path) -> None:
    """Bursts, trees, chunks and batches through a whole model."""
    model = load_model(resolve(str(tiny(tmp_path))), "bf16", TRITON.kernels, torch.device("cpu"))
    found = check_invariance(model, TRITON.kernels)
    assert found.exact, found.describe()


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_once_for_the_devices_that_people_have(tmp_path: Path, capability: int) -> None:
    """A100, H100 and H200, B200: compiled to machine code without one, by way of the launcher, for 1 to 33 rows.

    Rows of any number run the same machine code: one program a kernel (two where q4 and q8, or two and four parts, differ).
    Products take one instruction of one shape on every device, and read weights 16 bytes at a time.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(Path(__file__).with_name("compile_triton.py")), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    compiled = {each["kernel"]: each for each in json.loads(done.stdout)}
    assert {name: each["programs"] for name, each in compiled.items()} == {
        "rms_norm": 1, "silu_mul": 1, "rope": 1, "store": 1, "attend": 1, "join": 1, "dense": 1, "add_parts": 2, "blocks": 2,
        "store_codes int8": 1, "store_codes int4": 1, "attend int8": 1, "attend int4": 1,
    }  # fmt: skip
    for name in ("dense", "attend"):
        assert compiled[name]["products"] == ["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"]
        assert compiled[name]["wide_reads"] > 0
    assert compiled["blocks"]["products"] == ["mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"]
