"""Heads that others published compute here what they compute there; a variant that does not is refused with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import tiny
from forward import attention_of, batch_of
from published_heads import (
    HD,
    HEADS,
    KV,
    N_LAYERS,
    D,
    V,
    attend,
    eagle1,
    eagle1_reference,
    eagle3,
    eagle3_reference,
    medusa,
    medusa_reference,
    normal,
    speculators,
    write,
)
from torch import Tensor

from specdec import kernels
from specdec.models.errors import ModelError
from specdec.models.fingerprint import Fingerprint
from specdec.models.head_files import LoadedHead, is_head, load_head
from specdec.models.heads import MedusaHead, RecurrentHead
from specdec.models.load import load_model
from specdec.models.source import resolve

TARGET = Fingerprint(name="the model", vocab_size=V, hidden_size=D, n_layers=N_LAYERS, glimpse=())
T = 7


def ours(qkv: Tensor) -> Tensor:
    """Attention over a text as our modules ask for it."""
    return attend(*qkv.split([HEADS * HD, KV * HD, KV * HD], -1))


def recurrent(loaded: LoadedHead) -> RecurrentHead:
    assert isinstance(loaded.head, RecurrentHead)
    return loaded.head


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("bias", [True, False])
def test_eagle_1(tmp_path, file: str, bias: bool) -> None:
    """Also EAGLE-2, whose files are the same: the state of each position, twice in a row, from the normed feature."""
    config, tensors = eagle1(bias=bias)
    loaded = load_head(
        write(tmp_path, config, {**tensors, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, file), TARGET
    )
    head = recurrent(loaded)
    assert (head.config.kind, head.config.taps, head.config.normed) == ("eagle", (N_LAYERS - 1,), True)
    features, embedded = normal(T, D, seed=1, scale=1.0), normal(T, D, seed=2, scale=1.0)
    state, expected = head.start(features), features
    for _ in range(2):
        state, expected = head(embedded, state, ours), eagle1_reference(tensors, expected, embedded)
        torch.testing.assert_close(head.ready(state), expected, rtol=0, atol=1e-4)
    assert head.embedding is not None
    assert torch.equal(head.embedding(torch.tensor([3, 319])), tensors["embed_tokens.weight"][[3, 319]])
    assert loaded.vocabulary_ids is None
    assert not head.outputs


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_eagle_3(tmp_path, layout: str) -> None:
    """Logits over the draft vocabulary at the first step and at the second, which starts from the head's own state."""
    config, tensors = eagle3() if layout == "eagle3" else speculators("eagle3")
    loaded = load_head(write(tmp_path, config, tensors), TARGET)
    head, normed = recurrent(loaded), layout == "speculators"
    features, embedded = normal(T, 3 * D, seed=1, scale=1.0), normal(T, D, seed=2, scale=1.0)
    state = head(embedded, head.start(features), ours)
    expected, logits = eagle3_reference(tensors, features, embedded, normed=normed)
    torch.testing.assert_close(state, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(head.outputs[0](head.ready(state)), logits, rtol=0, atol=1e-4)
    again, more = eagle3_reference(tensors, expected, embedded, normed=normed, fuse=False)
    torch.testing.assert_close(head.outputs[0](head.ready(head(embedded, state, ours))), more, rtol=0, atol=1e-4)
    assert not torch.allclose(again, expected)
    assert loaded.vocabulary_ids is not None
    assert loaded.vocabulary_ids.tolist() == [5 + 6 * i for i in range(48)]


@pytest.mark.parametrize("bias", [True, False])
def test_eagle_of_speculators(tmp_path, bias: bool) -> None:
    config, tensors = speculators("eagle", fusion_bias=bias)
    loaded = load_head(write(tmp_path, config, tensors), TARGET)
    features, embedded = normal(T, D, seed=1, scale=1.0), normal(T, D, seed=2, scale=1.0)
    state = recurrent(loaded)(embedded, features, ours)
    torch.testing.assert_close(state, eagle1_reference(tensors, features, embedded), rtol=0, atol=1e-4)
    assert loaded.provenance == {"layout": "speculators eagle", "made for": "some/model"}


@pytest.mark.parametrize(
    ("file", "prefix"),
    [("medusa_lm_head.safetensors", ""), ("medusa_lm_head.pt", ""), ("model.safetensors", "medusa_head.")],
)
def test_medusa(tmp_path, file: str, prefix: str) -> None:
    """Each head's logits by its own output matrix."""
    config, tensors = medusa(heads=3, layers=2, prefix=prefix)
    head = load_head(write(tmp_path, config, tensors, file), TARGET).head
    assert isinstance(head, MedusaHead)
    assert (head.config.depth, head.config.blocks, head.config.normed) == (3, 2, True)
    feature = normal(T, D, seed=1, scale=1.0)
    for k in range(3):
        expected = medusa_reference(tensors, k, 2, feature, prefix)
        torch.testing.assert_close(head.outputs[k](head(k, feature)), expected, rtol=0, atol=1e-4)


def test_medusa_heads_that_the_config_forgot_are_used_too(tmp_path) -> None:
    """Files with five heads say two."""
    config, tensors = medusa(heads=3)
    assert load_head(write(tmp_path, {**config, "medusa_num_heads": 2}, tensors), TARGET).config.depth == 3


def test_the_features_of_eagle_3_are_what_goes_into_the_layers_that_it_names(tmp_path) -> None:
    """The taps are the hidden states 2, L // 2 and L - 3 of transformers, where the first is the embedding."""
    from transformers import AutoModelForCausalLM

    folder = tiny(tmp_path / "model", num_hidden_layers=N_LAYERS)
    config, tensors = eagle3()
    taps = load_head(write(tmp_path / "head", config, tensors), TARGET).config.taps
    model = load_model(resolve(str(folder)), "fp32", kernels.select("cpu"), torch.device("cpu"))
    text = list(b"It was the best of times")
    _, tapped = model.forward(batch_of(text), attention_of(model), taps)
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        states = reference(torch.tensor([text]), output_hidden_states=True).hidden_states
    for tap, layer in zip(taps, (2, N_LAYERS // 2, N_LAYERS - 3), strict=True):
        torch.testing.assert_close(tapped[tap], states[layer][0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "taps"),
    [
        ({}, (1, 3, 4)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, (1, 3, 4)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 6, 8]}, (0, 5, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, (1, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}}, (1, 3, 4)),
    ],
)
def test_layers_that_a_config_names(tmp_path, settings: dict[str, Any], taps: tuple[int, ...]) -> None:
    config, tensors = eagle3()
    assert load_head(write(tmp_path, {**config, **settings}, tensors), TARGET).config.taps == taps


def test_a_head_that_drafts_every_token_has_no_vocabulary(tmp_path) -> None:
    """Whether d2t says so or is not there."""
    config, tensors = eagle3(drafts=48)
    whole = {**tensors, "lm_head.weight": normal(V, D, seed=1)}
    for extra in ({}, {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}):
        some = {name: x for name, x in whole.items() if name not in ("d2t", "t2d")}
        loaded = load_head(write(tmp_path, {**config, "draft_vocab_size": V}, {**some, **extra}), TARGET)
        assert loaded.vocabulary_ids is None
        assert loaded.config.vocabulary is None


def changed(tensors: dict[str, Tensor], name: str, value: Tensor | None) -> dict[str, Tensor]:
    rest = {key: x for key, x in tensors.items() if key != name}
    return rest if value is None else {**rest, name: value}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"hidden_size": 128}, "hidden_size is 128, and this model has 64: the head was made for another model"),
        ({"vocab_size": 400}, "vocab_size is 400, and this model has 320"),
        ({"target_hidden_size": 128}, "target_hidden_size is 128"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"attention_bias": True}, "biases in attention are not supported"),
        ({"norm_before_fc": True}, "a norm before the features are joined"),
        ({"logit_scale": 0.5}, "scaled logits"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary positions of kind linear"),
        ({"draft_vocab_size": 47}, r"tensor d2t has shape \[48\], the head needs \[47\]"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, "programs disagree"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 4, 5]}, r"outputs of layers \[-1, 3, 4\]"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "the model has layers 0 to 7"),
        ({"eagle_aux_hidden_state_layer_ids": "2,4,5"}, "must be a list of layers"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused(tmp_path, settings: dict[str, Any], reason: str) -> None:
    config, tensors = eagle3()
    with pytest.raises(ModelError, match=reason) as caught:
        load_head(write(tmp_path, {**config, **settings}, tensors), TARGET)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("midlayer.mlp.up_proj.weight", None, "tensor midlayer.mlp.up_proj.weight is missing"),
        (
            "midlayer.self_attn.q_norm.weight",
            torch.ones(HD),
            "midlayer.self_attn.q_norm.weight, for which a head of this layout",
        ),
        ("fc.weight", torch.ones(D, 2 * D), r"tensor fc.weight has shape \[64, 128\], the head needs \[64, 192\]"),
        ("d2t", None, "tensor d2t is missing"),
        ("d2t", torch.full((48,), 300), "d2t must lead to 48 different tokens below 320"),
        ("d2t", -torch.arange(48), "d2t must lead to 48 different tokens"),
        ("d2t", torch.arange(48), "t2d and d2t name different tokens"),
        ("norm.weight", torch.ones(D, dtype=torch.complex64), "tensor norm.weight has type torch.complex64"),
    ],
)
def test_tensors_that_do_not_make_a_head_are_refused(tmp_path, name: str, value: Tensor | None, reason: str) -> None:
    config, tensors = eagle3()
    with pytest.raises(ModelError, match=reason) as caught:
        load_head(write(tmp_path, config, changed(tensors, name, value)), TARGET)
    assert str(tmp_path) in str(caught.value)


def test_an_input_norm_before_eagle_1_is_refused(tmp_path) -> None:
    config, tensors = eagle1()
    with pytest.raises(ModelError, match=r"input_layernorm\.weight, for which a head of this layout"):
        load_head(write(tmp_path, config, {**tensors, "layers.0.input_layernorm.weight": torch.ones(D)}), TARGET)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"layernorms": True}, "norms around the product"), ({"speculators_model_type": "mtp"}, "'mtp' is not supported; eagle")],
)
def test_other_heads_of_speculators_are_refused(tmp_path, settings: dict[str, Any], reason: str) -> None:
    config, tensors = speculators("eagle")
    with pytest.raises(ModelError, match=reason):
        load_head(write(tmp_path, {**config, **settings}, tensors), TARGET)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"medusa_num_heads": 4}, "medusa_num_heads must be 3, the heads that the weights hold, got 4"),
        ({"medusa_num_layers": 1}, r"tensor medusa_head.0.1.weight is missing"),
        ({"medusa_num_layers": 3}, r"tensor medusa_head.0.2.linear.weight is missing"),
    ],
)
def test_medusa_configs_that_contradict_their_weights_are_refused(tmp_path, settings: dict[str, Any], reason: str) -> None:
    config, tensors = medusa()
    with pytest.raises(ModelError, match=reason):
        load_head(write(tmp_path, {**config, **settings}, tensors), TARGET)


def test_a_medusa_head_for_another_width_is_refused(tmp_path) -> None:
    other = Fingerprint(name="the model", vocab_size=V, hidden_size=128, n_layers=N_LAYERS, glimpse=())
    with pytest.raises(ModelError, match=r"shape \[64, 64\], the head needs \[128, 128\]"):
        load_head(write(tmp_path, *medusa()), other)


def test_pickles_that_hold_more_than_tensors_are_not_read(tmp_path) -> None:
    config, tensors = eagle1()
    with pytest.raises(ModelError, match="could run code"):
        load_head(write(tmp_path, config, {**tensors, "x": Harmful()}, "pytorch_model.bin"), TARGET)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(ModelError, match=r"pytorch_model.bin cannot be read|could run code"):
        load_head(tmp_path, TARGET)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this ran",)


def test_heads_are_told_from_models(tmp_path) -> None:
    """By their config or their tensors, whatever the architecture in the config says."""
    layouts = {"eagle1": eagle1(), "eagle3": eagle3(), "medusa": medusa(), "speculators": speculators("eagle3")}
    for name, (config, tensors) in layouts.items():
        assert is_head(write(tmp_path / name, config, tensors))
    assert not is_head(tiny(tmp_path / "model"))
