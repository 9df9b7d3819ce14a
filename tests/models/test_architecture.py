"""What config.json asks for is read under every name it has had, or refused; nothing is passed over."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import ARCHITECTURES, tiny_config

from specdec.models.architecture import from_config
from specdec.models.errors import ModelError


def read(family: str = "llama", *, without: tuple[str, ...] = (), **overrides):
    values = {key: value for key, value in tiny_config(family, **overrides).items() if key not in without}
    return from_config(values, Path("some/config.json"))


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_sizes(family):
    """Every size lands where it belongs."""
    a = read(family)
    assert (a.family, a.vocab_size, a.hidden_size, a.n_layers) == (family, 320, 64, 2)
    assert (a.n_heads, a.n_kv_heads, a.head_dim, a.ffn_size, a.context) == (4, 2, 16, 96, 256)
    assert (a.rms_eps, a.rope.theta, a.tied, a.end_tokens) == (1e-5, 10000.0, False, frozenset({257}))
    assert (a.q_size, a.kv_size) == (64, 32)
    assert a.qkv_bias == (family == "qwen2")
    assert a.qk_norm == (family == "qwen3")
    assert not a.out_bias


def test_sizes_that_follow_from_others():
    """Llama files of old leave out the head dimension and the key heads."""
    a = read(without=("head_dim", "num_key_value_heads"))
    assert (a.head_dim, a.n_kv_heads) == (16, 4)


def test_head_dimension_of_its_own():
    """qwen3's heads are wider than the hidden size divided among them; its file must say how wide."""
    assert read("qwen3", head_dim=128).q_size == 512
    with pytest.raises(ModelError, match="lacks head_dim"):
        read("qwen3", without=("head_dim",))


def test_biases():
    """attention_bias is for all four projections, mlp_bias for the feed-forward."""
    a = read(attention_bias=True, mlp_bias=True)
    assert (a.qkv_bias, a.out_bias, a.mlp_bias) == (True, True, True)
    assert read("qwen3", attention_bias=True).out_bias


@pytest.mark.parametrize(
    ("family", "settings", "windows"),
    [
        ("llama", {}, (0, 0)),
        ("llama", {"sliding_window": None}, (0, 0)),
        ("mistral", {"sliding_window": 8}, (8, 8)),
        ("mistral", {"sliding_window": None}, (0, 0)),
        ("mistral", {}, (4096, 4096)),
        ("mistral", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, (8, 8)),
        ("qwen2", {"sliding_window": 8}, (0, 0)),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (0, 8)),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, (8, 8)),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, (0, 0)),
        (
            "qwen3",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            (8, 0),
        ),
    ],
)
def test_sliding_windows(family, settings, windows):
    """Each family has its own way of saying which layers slide."""
    assert read(family, **settings).windows == windows


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_scaling_under_every_name(name, key):
    """Old and new names of the object and of its key mean the same."""
    rope = read(**{name: {key: "linear", "factor": 4.0}}).rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 4.0, 10000.0)


def test_theta_inside_rope_parameters():
    """The new form keeps theta with the scaling."""
    rope = read(without=("rope_theta",), rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope
    assert (rope.kind, rope.theta) == ("default", 5e5)


@pytest.mark.parametrize("scaling", [None, {}])
def test_no_scaling(scaling):
    """null and an empty object are both no scaling."""
    assert read(rope_scaling=scaling).rope.kind == "default"


def test_original_context_beside_the_scaling_counts():
    """Some files keep the context before scaling next to the scaling."""
    scaling = {"rope_type": "yarn", "factor": 4.0}
    assert read(rope_scaling=scaling, original_max_position_embeddings=64).rope.original_context == 64
    assert read(rope_scaling={**scaling, "original_max_position_embeddings": 32}).rope.original_context == 32
    assert read(rope_scaling=scaling).rope.original_context == 256


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not supported; supported: llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type None"),
        ({"num_local_experts": 8}, "num_local_experts = 8: mixtures of experts"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; silu is"),
        ({"architectures": 3}, "architectures must be a list of names"),
        ({"layer_types": 3}, "layer_types must be a list of 2"),
        ({"layer_types": [["full_attention"]] * 2}, "layer_types must be a list of 2"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"sliding_window": 8}, "sliding_window is not a setting of llama"),
        (
            {"rope_scaling": {"type": "su"}},
            "'su' is not supported; known types: default, linear, dynamic, yarn, longrope, llama3",
        ),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "'mrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor must be a number above 0, got '4'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "betafast": 1}}, "unknown keys betafast"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "a list of 8 numbers"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1}},
            "high_freq",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 key heads"),
        ({"head_dim": 15}, "even head dimension"),
        ({"head_dim": None, "hidden_size": 66}, "a multiple of num_attention_heads"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"vocab_size": 0}, "vocab_size must be a whole number above 0, got 0"),
        ({"vocab_size": True}, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 2"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types"),
    ],
)
def test_what_is_refused(settings, said):
    """An unsupported or malformed setting is an error that names the file and the setting."""
    with pytest.raises(ModelError) as caught:
        read(**settings)
    assert said in str(caught.value)
    assert "some/config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}, "use_sliding_window"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
        ("qwen2", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias"),
        (
            "mistral",
            {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            "in every layer",
        ),
    ],
)
def test_what_a_family_has_no_setting_for(family, settings, said):
    """A setting that another family has is not silently ignored in this one."""
    with pytest.raises(ModelError, match=said):
        read(family, **settings)


def test_several_end_tokens():
    """Llama 3 names a list of end tokens."""
    assert read(eos_token_id=[3, 5]).end_tokens == {3, 5}
    assert read(eos_token_id=None).end_tokens == frozenset()
