"""Attention over a pool of several layers: rows see what they and earlier passes stored, whichever implementation runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdec.attention import select
from specdec.attention.base import Attention
from specdec.attention.cpu import NativeAttention
from specdec.attention.reference import ReferenceAttention
from specdec.kernels.base import Rows
from specdec.kernels.cpu import NativeKernels
from specdec.kernels.library import LIBRARY, Library
from specdec.kernels.portable import PortableKernels
from specdec.kv.pool import Pool

LAYERS, HEADS, KV_HEADS, HD = 2, 4, 2, 16
TABLE = torch.tensor([[3, 1, 4]], dtype=torch.int32)


def make(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Attention, Pool]:
    pool = Pool(LAYERS, 6, KV_HEADS, HD, dtype, torch.device("cpu"))
    pool.poison(range(6))
    return select(pool, NativeKernels(Library(LIBRARY, None)) if kind == "native" else PortableKernels()), pool


both = pytest.mark.parametrize("kind", ["native", "reference"])


def line(start: int, stop: int) -> Rows:
    """Consecutive tokens, each of which sees all before it and itself."""
    slot = torch.arange(start, stop, dtype=torch.int32)
    none = torch.zeros_like(slot)
    return Rows(TABLE, none, slot, slot + 1, torch.empty(len(slot), 0, dtype=torch.int32), none)


def tokens(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q [n, H, hd], k and v [n, KV, hd]: slices of one projection, as a model makes them."""
    fused = torch.randn(n, HEADS + 2 * KV_HEADS, HD, generator=torch.Generator().manual_seed(seed))
    return fused[:, :HEADS], fused[:, HEADS : HEADS + KV_HEADS], fused[:, HEADS + KV_HEADS :]


def plain(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Masked attention over all tokens in float64: visible [M, n] -> [M, H * hd]."""
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = scale * torch.einsum("mhd,nhd->mhn", q.double(), k)
    p = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    return torch.einsum("mhn,nhd->mhd", p, v).flatten(1).float()


def test_native_kernels_get_the_attention_that_reads_in_place() -> None:
    assert isinstance(make("native")[0], NativeAttention)
    assert isinstance(make("reference")[0], ReferenceAttention)


@both
@pytest.mark.parametrize("window", [0, 9])
def test_prompt_then_tokens_one_by_one(kind: str, window: int) -> None:
    """Each layer attends over its own keys of all passes so far; poisoned slots ahead are never seen."""
    attention, _ = make(kind)
    n, scale = 40, 0.3
    ahead = torch.arange(n)[:, None] - torch.arange(n)
    visible = (ahead >= 0) & ((ahead < window) if window else True)
    data = [tokens(n, seed=layer) for layer in range(LAYERS)]
    got: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    for start, stop in [(0, 23), *((t, t + 1) for t in range(23, n))]:
        for layer, (q, k, v) in enumerate(data):
            got[layer].append(attention(layer, q[start:stop], k[start:stop], v[start:stop], line(start, stop), scale, window))
    for layer, (q, k, v) in enumerate(data):
        torch.testing.assert_close(torch.cat(got[layer]), plain(q, k, v, visible, scale), rtol=1e-5, atol=1e-6)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_accepted_path_is_as_if_decoded_in_line(kind: str, dtype: torch.dtype) -> None:
    """A tree of five nodes after 20 tokens; the path 0, 2, 4 is accepted and closes up. The next token's attention, and the
    nodes' own, equal plain decoding of the same tokens bit for bit."""
    (speculative, pool), (decoding, _) = make(kind, dtype), make(kind, dtype)
    prompt, nodes, after = tokens(20), tokens(5, seed=1), tokens(1, seed=2)
    parents, path = [-1, -1, 0, 0, 2], [0, 2, 4]
    seen: list[list[int]] = []
    for node, parent in enumerate(parents):
        seen.append([*(seen[parent] if parent >= 0 else []), 20 + node])
    tree = Rows(
        TABLE,
        torch.zeros(5, dtype=torch.int32),
        torch.arange(20, 25, dtype=torch.int32),
        torch.full((5,), 20, dtype=torch.int32),
        torch.tensor([slots + [-1] * (3 - len(slots)) for slots in seen], dtype=torch.int32),
        torch.tensor([len(slots) for slots in seen], dtype=torch.int32),
    )
    for attention in (speculative, decoding):
        attention(0, *prompt, line(0, 20), 0.25, 0)
    verified = speculative(0, *nodes, tree, 0.25, 0)
    pool.move(TABLE[0].tolist(), [20 + node for node in path], [20, 21, 22])
    for place, node in enumerate(path):
        one = (x[node : node + 1] for x in nodes)
        assert torch.equal(decoding(0, *one, line(20 + place, 21 + place), 0.25, 0), verified[node : node + 1])
    assert torch.equal(speculative(0, *after, line(23, 24), 0.25, 0), decoding(0, *after, line(23, 24), 0.25, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [lambda q: q, lambda q: q * 40], ids=["ordinary", "peaked"])
def test_native_agrees_with_the_reference(dtype: torch.dtype, change: Callable[[Tensor], Tensor]) -> None:
    """Also where scores reach hundreds and one key takes nearly all the weight."""
    results = []
    for kind in ("native", "reference"):
        attention, _ = make(kind, dtype)
        q, k, v = tokens(45)
        results.append(attention(1, change(q).contiguous(), k, v, line(0, 45), 0.25, 0))
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5)
