"""Heads as they draft: the same numbers as the modules that were trained, whatever they are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from specdec import kernels
from specdec.config import ConfigError, Precision
from specdec.kernels.portable import PortableKernels
from specdec.models.head_config import HeadConfig
from specdec.models.heads import MedusaHead, RecurrentHead, make_head
from specdec.models.packed_heads import pack_head, packed_bytes

D, V, HEADS, KV, HD = 64, 96, 4, 2, 16
BASE = {"hidden_size": D, "vocab_size": V}
LAYER = {**BASE, "n_heads": HEADS, "n_kv_heads": KV, "head_dim": HD, "ffn_size": 96}

MEDUSA = {
    "medusa": HeadConfig(kind="medusa", taps=(1,), depth=3, blocks=2, **BASE),
    "medusa-markov": HeadConfig(kind="medusa", taps=(1,), depth=2, correction="markov", rank=32, vocabulary=40, **BASE),
    "medusa-hydra": HeadConfig(kind="medusa", taps=(1,), depth=3, correction="hydra", **BASE),
    "medusa-own": HeadConfig(kind="medusa", taps=(1,), depth=2, own_output=True, own_embedding=True, **BASE),
}
RECURRENT = {
    "eagle": HeadConfig(kind="eagle", taps=(1,), fc_bias=True, **LAYER),
    "eagle3": HeadConfig(kind="eagle3", taps=(0, 1, 2), own_output=True, vocabulary=40, **LAYER),
    "mtp": HeadConfig(kind="mtp", taps=(1,), depth=2, **LAYER),
}


def trained(config: HeadConfig) -> MedusaHead | RecurrentHead:
    """A head none of whose parameters is at its start value, where many of them would have no effect."""
    torch.manual_seed(0)
    head = make_head(config)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return head


def medusa_numbers(head: MedusaHead) -> Iterator[Tensor]:
    """Everything that a Medusa head can be asked, with leading dimensions of several kinds."""
    torch.manual_seed(1)
    feature, embedded, ids = torch.randn(2, 3, D), torch.randn(2, 3, head.config.depth * D), torch.tensor([[5, 90], [0, 7]])
    for k in range(head.config.depth):
        state = head(k, feature, embedded[..., : (k + 1) * D])
        yield state
        yield head(k, feature[0, 0], embedded[0, 0, : (k + 1) * D])
        if head.config.own_output:
            yield head.outputs[k](state)
    bias = head.bias(ids)
    if bias is not None:
        yield bias
    if head.embedding is not None:
        yield head.embedding(ids)


def recurrent_numbers(head: RecurrentHead) -> Iterator[Tensor]:
    torch.manual_seed(1)
    features, embedded = torch.randn(2, 3, len(head.config.taps) * D), torch.randn(2, 3, D)
    state = head.start(features)
    for step in range(3):
        module = head.module(step)
        state = head(embedded, state, lambda qkv: qkv[..., : HEADS * HD] + qkv[..., -HEADS * HD :], module)
        yield state
        ready = head.ready(state, module)
        yield ready
        if head.config.own_output:
            yield head.outputs[0](ready)


def numbers(head: MedusaHead | RecurrentHead) -> list[Tensor]:
    return list(medusa_numbers(head) if isinstance(head, MedusaHead) else recurrent_numbers(head))


@pytest.mark.parametrize(("precision", "close"), [("fp32", 1e-4), ("q8", 0.03)])
@pytest.mark.parametrize("name", [*MEDUSA, *RECURRENT])
@pytest.mark.parametrize("chosen", [PortableKernels(), kernels.select("cpu")], ids=["torch", "chosen"])
def test_a_packed_head_computes_what_the_trained_one_does(chosen, name: str, precision: Precision, close: float) -> None:
    """Every kind and every part of it, within what the precision's rounding allows, and without gradients."""
    head = trained({**MEDUSA, **RECURRENT}[name])
    packed = pack_head(head, chosen, precision)
    assert type(packed) is type(head)
    with torch.inference_mode():
        expected, found = numbers(head), numbers(packed)
    assert len(expected) == len(found)
    for right, given in zip(expected, found, strict=True):
        assert given.shape == right.shape
        assert (given - right).norm() / right.norm() < close
    assert not list(packed.parameters())
    assert all(not x.requires_grad for x in numbers(packed))
    assert any(p.requires_grad for p in head.parameters())  # the head that was given still trains


def test_packing_takes_the_memory_of_its_precision() -> None:
    head = trained(MEDUSA["medusa-own"])
    matrices, biases = (sum(p.numel() for p in head.parameters() if p.dim() == n) for n in (2, 1))
    assert packed_bytes(pack_head(head, PortableKernels(), "fp32")) == 4 * (matrices + biases)
    for precision in ("q8", "auto", "blocks"):
        assert packed_bytes(pack_head(head, PortableKernels(), precision)) == matrices * 34 // 32 + 4 * biases
    recurrent = trained(RECURRENT["eagle3"])
    output = recurrent.outputs[0].weight.numel()
    layer = sum(p.numel() for p in recurrent.parameters() if p.dim() == 2) - output
    assert packed_bytes(pack_head(recurrent, PortableKernels(), "auto")) == (layer * 20 + 48 * D * 34) // 32  # 40 rows padded


def test_a_width_that_the_precision_cannot_hold_is_named() -> None:
    """Groups of 32 do not divide a rank of 20."""
    config = dataclasses.replace(MEDUSA["medusa-markov"], rank=20)
    with pytest.raises(ConfigError, match=r"markov\.0\.\w+ of the trained drafter.*use precision bf16 or fp32"):
        pack_head(trained(config), PortableKernels(), "q8")
