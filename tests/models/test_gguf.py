"""GGUF: the header, bit-exact blocks, llama.cpp's order of rows and names, and the same logits as the safetensors twin."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf as library
import numpy as np
import pytest
import torch
from checkpoints import random_weights, tiny, tiny_config
from forward import greedy, logits_of
from safetensors.torch import load_file
from scalings import LLAMA3

from specdec import kernels
from specdec.models import gguf, gguf_model
from specdec.models.errors import ModelError
from specdec.models.gguf_model import GgufWeights
from specdec.models.load import end_tokens, load_model, load_tokenizer
from specdec.models.source import Source, resolve
from specdec.models.weights import Blocks
from specdec.quant.blocks import dequantize, from_gguf

CPU = torch.device("cpu")
PROMPT = list(b"tick tock tick")
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def load(path: Path, precision="fp32"):
    return load_model(resolve(str(path)), precision, kernels.select(CPU), CPU)


def their_name(name: str) -> str:
    module, part = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, inner = module.split(".", 3)
        return f"blk.{layer}.{NAMES[inner]}.{part}"
    return f"{NAMES[module]}.{part}"


def rotate_neighbours(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to llama's query and key rows: the two halves of a head become neighbours."""
    halves = rows.reshape(n_heads, 2, rows.shape[0] // n_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, family: str, weights, types=None, *, metadata=(), extra=(), drop=(), eos=257) -> Path:
    """A tiny model as llama.cpp's converter writes it. ``types`` gives the encoding of a matrix by its GGUF name."""
    writer = library.GGUFWriter(path, family)
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    if family == "qwen3":
        writer.add_key_length(16)
        writer.add_value_length(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(eos)
    for key, value in dict(metadata).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    tensors = {}
    for name, value in weights.items():
        array = value.numpy()
        if family == "llama" and any(p in name for p in ("q_proj", "k_proj")):
            array = rotate_neighbours(array, 4 if "q_proj" in name else 2)
        tensors[their_name(name)] = array
    for name, array in {**tensors, **dict(extra)}.items():
        if name in drop:
            continue
        kind = (types or {}).get(name, library.GGMLQuantizationType.F32) if array.ndim > 1 else library.GGMLQuantizationType.F32
        writer.add_tensor(name, library.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def every(weights, kind: str) -> dict:
    return {their_name(name): library.GGMLQuantizationType[kind] for name, value in weights.items() if value.ndim > 1}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_same_logits_as_its_safetensors_twin(tmp_path, family, tied):
    """Rows of queries and keys come back in order, a missing output matrix means the embedding: bit for bit the same."""
    folder = tiny(tmp_path / "twin", family, tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "model.gguf", family, load_file(folder / "model.safetensors"))
    model = load(path)
    assert torch.equal(logits_of(model, PROMPT), logits_of(load(folder), PROMPT))
    assert model.shape == load(folder).shape
    assert end_tokens(resolve(str(path))) == {257}


def test_biases_of_llama_are_reordered_with_their_rows(tmp_path):
    """The converter moves query and key biases along."""
    folder = tiny(tmp_path / "twin", attention_bias=True, mlp_bias=True)
    path = write_gguf(tmp_path / "model.gguf", "llama", load_file(folder / "model.safetensors"))
    assert torch.equal(logits_of(load(path), PROMPT), logits_of(load(folder), PROMPT))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_are_kept_bit_for_bit(tmp_path, kind):
    """Precision ``blocks`` multiplies by the very numbers in the file; reading them as floats gives the library's own."""
    weights = random_weights(tiny_config(), 0)
    path = write_gguf(tmp_path / "model.gguf", "llama", weights, every(weights, kind))
    file = GgufWeights(gguf.read(path))
    for name, rows, columns in (("model.layers.0.mlp.down_proj.weight", 64, 96), ("model.layers.1.mlp.up_proj.weight", 96, 64)):
        blocks = file.matrix(name, rows, columns)
        assert isinstance(blocks, Blocks)
        expected = library.quants.dequantize(file.file.raw(their_name(name)), library.GGMLQuantizationType[kind])
        assert torch.equal(dequantize(from_gguf(blocks.raw, blocks.kind)), torch.from_numpy(expected))
    queries = file.matrix("model.layers.0.self_attn.q_proj.weight", 64, 64)
    ours = dequantize(from_gguf(queries.raw, queries.kind))
    error = (ours - weights["model.layers.0.self_attn.q_proj.weight"]).abs().max()
    assert error < (0.01 if kind == "Q8_0" else 0.1), "rows in another order would be off by the size of the weights"


@pytest.mark.parametrize("precision", ["auto", "blocks"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_blocks_run_as_they_are(tmp_path, kind, precision):
    """A model of blocks gives what its dequantised twin gives, but for the rounding of rows."""
    weights = random_weights(tiny_config(), 0)
    path = write_gguf(tmp_path / "model.gguf", "llama", weights, every(weights, kind))
    exact = logits_of(load(path, "fp32"), PROMPT)
    found = logits_of(load(path, precision), PROMPT)
    assert 0 < float((found - exact).square().mean().sqrt()) < 0.1


def test_other_encodings_become_q8(tmp_path):
    """F16, BF16 and Q5_0 are read as numbers; under ``blocks`` they are kept as q8, beside blocks that stay what they are."""
    weights = random_weights(tiny_config(), 0)
    types = every(weights, "F16") | {
        "blk.0.attn_q.weight": library.GGMLQuantizationType.Q4_0,
        "blk.0.attn_k.weight": library.GGMLQuantizationType.Q4_1,
        "blk.1.attn_v.weight": library.GGMLQuantizationType.Q8_0,
        "blk.1.ffn_up.weight": library.GGMLQuantizationType.Q4_1,
        "blk.1.attn_q.weight": library.GGMLQuantizationType.BF16,
        "blk.0.ffn_down.weight": library.GGMLQuantizationType.Q5_0,
    }
    path = write_gguf(tmp_path / "model.gguf", "llama", weights, types)
    exact = logits_of(load(path, "fp32"), PROMPT)
    found = logits_of(load(path, "blocks"), PROMPT)
    assert 0 < float((found - exact).square().mean().sqrt()) < 0.1
    coarser = logits_of(load(path, "q4"), PROMPT)
    assert float((coarser - exact).square().mean()) > float((found - exact).square().mean())


def test_the_types_read_without_the_library_are_as_the_library_has_them():
    """A wrong size in this table would cut every tensor of a type at the wrong place."""
    for number, (name, *sizes) in gguf._USUAL.items():
        type_ = library.GGMLQuantizationType(number)
        assert (name, *sizes) == (type_.name, *library.GGML_QUANT_SIZES[type_])


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q3_K", "IQ4_XS"])
def test_encodings_without_a_kernel_are_dequantised(tmp_path, kind):
    """The commonest files in circulation are K-quants: their numbers are the library's."""
    type_ = library.GGMLQuantizationType[kind]
    size = library.GGML_QUANT_SIZES[type_][1]
    raw = np.random.default_rng(0).integers(0, 60, (3, 2 * size), dtype=np.uint8)  # small bytes keep the scales finite
    writer = library.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x.weight", raw, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = gguf.read(tmp_path / "x.gguf")
    assert file.info("x.weight").shape == (3, 512)
    np.testing.assert_array_equal(file.values("x.weight"), library.quants.dequantize(raw, type_))


def test_llama3_scaling_kept_as_divisors(tmp_path):
    """llama.cpp writes Llama 3's scaling into a tensor of divisors: the same frequencies come out."""
    from specdec.models.architecture import from_config
    from specdec.models.layers import frequencies

    folder = tiny(tmp_path / "twin", rope_scaling=LLAMA3)
    plain = frequencies(from_config(tiny_config(), Path()).rope, 1)
    scaled = frequencies(from_config(tiny_config(rope_scaling=LLAMA3), Path()).rope, 1)
    divisors = (plain / scaled).numpy()
    weights = load_file(folder / "model.safetensors")
    path = write_gguf(tmp_path / "model.gguf", "llama", weights, extra={"rope_freqs.weight": divisors})
    torch.testing.assert_close(logits_of(load(path), PROMPT * 8), logits_of(load(folder), PROMPT * 8), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "yarn", "longrope"])
def test_rope_scaling_in_metadata(tmp_path, kind):
    """Scalings that llama.cpp keeps as metadata equal those of the config."""
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 32}
    metadata = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    metadata["llama.rope.scaling.original_context_length"] = 32
    extra = {}
    if kind == "longrope":
        for side, values in (("short", np.linspace(1, 2, 8)), ("long", np.linspace(2, 9, 8))):
            extra[f"rope_factors_{side}.weight"] = values.astype(np.float32)
            scaling[f"{side}_factor"] = extra[f"rope_factors_{side}.weight"].tolist()
    folder = tiny(tmp_path / "twin", rope_scaling=scaling)
    path = write_gguf(tmp_path / "m.gguf", "llama", load_file(folder / "model.safetensors"), metadata=metadata, extra=extra)
    assert torch.equal(logits_of(load(path), PROMPT * 8), logits_of(load(folder), PROMPT * 8))


def test_sliding_window_of_llama_files(tmp_path):
    """Mistral's files go by the name llama; a window that one names is for all layers."""
    folder = tiny(tmp_path / "twin", "mistral", sliding_window=8)
    weights = load_file(folder / "model.safetensors")
    path = write_gguf(tmp_path / "m.gguf", "llama", weights, metadata={"llama.attention.sliding_window": 8})
    assert torch.equal(logits_of(load(path), PROMPT), logits_of(load(folder), PROMPT))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"metadata": {"llama.expert_count": 8}}, "mixtures of experts"),
        ({"metadata": {"llama.attn_logit_softcapping": 30.0}}, "soft caps"),
        ({"metadata": {"llama.rope.scaling.type": "su"}}, "none, linear, yarn or longrope"),
        ({"metadata": {"llama.rope.scaling.type": "linear"}}, "lacks factor"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "belong together"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "rope.dimension_count must be the head dimension, 16"),
        ({"metadata": {"llama.attention.value_length": 32}}, "attention.value_length"),
        ({"metadata": {"llama.rope.scaling.yarn_log_multiplier": 0.1}}, "yarn_log_multiplier is not supported"),
        ({"metadata": {"split.count": 2}}, "merge the parts"),
        ({"metadata": {"general.type": "adapter"}}, "general.type must be model"),
        ({"extra": {"rope_freqs.weight": np.ones(7, dtype=np.float32)}}, "a list of 8 numbers"),
        (
            {"extra": {"blk.0.ffn_gate_inp.weight": np.ones((4, 64), dtype=np.float32)}},
            "holds tensor blk.0.ffn_gate_inp.weight",
        ),
        ({"drop": ("blk.1.attn_k.weight",)}, "tensor blk.1.attn_k.weight is missing"),
        ({"drop": ("token_embd.weight",)}, "tensor token_embd.weight is missing"),
        (
            {"extra": {"blk.1.ffn_up.weight": np.ones((64, 64), dtype=np.float32)}},
            "has shape [64, 64], the model needs [96, 64]",
        ),
    ],
)
def test_what_is_refused(tmp_path, settings, said):
    """An unsupported setting, and a missing, unexpected or misshapen tensor, are errors that name it and the file."""
    path = write_gguf(tmp_path / "model.gguf", "llama", random_weights(tiny_config(), 0), **settings)
    with pytest.raises(ModelError) as caught:
        load(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_unknown_architecture(tmp_path):
    """The error lists what is supported."""
    path = write_gguf(tmp_path / "model.gguf", "gemma2", {})
    with pytest.raises(ModelError, match=r"'gemma2' is not supported in GGUF; supported: llama, qwen2, qwen3"):
        load(path)


@pytest.mark.parametrize("keep", [0, 3, 10, 40, 300, 2000, -1])
def test_file_cut_short(tmp_path, keep):
    """Wherever the file breaks off, the error names it and says so."""
    path = write_gguf(tmp_path / "model.gguf", "llama", random_weights(tiny_config(), 0))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"is cut short|is not a GGUF file"):
        gguf.read(path)


def test_every_cut_of_the_header_is_an_error(tmp_path):
    """No prefix of the header is taken for a whole file, and none raises anything but a ModelError."""
    whole = write_gguf(tmp_path / "model.gguf", "llama", random_weights(tiny_config(), 0)).read_bytes()
    path = tmp_path / "cut.gguf"
    for keep in range(24, 2200, 37):
        path.write_bytes(whole[:keep])
        with pytest.raises(ModelError, match="cut short"):
            gguf.read(path)


@pytest.mark.parametrize(
    ("at", "data", "said"),
    [
        (0, b"GGML", "is not a GGUF file"),
        (4, struct.pack("<I", 1), "GGUF version 1"),
        (4, struct.pack(">I", 3), "little-endian"),
        (24, struct.pack("<Q", 2**62), "cut short"),
        (16, struct.pack("<Q", 2**40), "damaged|cut short"),
        (24 + 8 + len("general.architecture"), struct.pack("<I", 99), "value type 99 is unknown"),
    ],
)
def test_damaged_header(tmp_path, at, data, said):
    """Wrong magic, versions, lengths and types are told apart from a good file."""
    path = write_gguf(tmp_path / "model.gguf", "llama", random_weights(tiny_config(), 0))
    whole = bytearray(path.read_bytes())
    whole[at : at + len(data)] = data
    path.write_bytes(whole)
    with pytest.raises(ModelError, match=said):
        gguf.read(path)


def test_metadata_of_every_type(tmp_path):
    """Numbers, strings, bools and lists of them, as the library's own reader finds them."""
    writer = library.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint8("a", 255)
    writer.add_int16("b", -5)
    writer.add_uint64("c", 2**63)
    writer.add_float64("d", 0.1)
    writer.add_bool("e", True)
    writer.add_string("f", "Ġé\n")
    writer.add_array("g", ["<|x|>", "", "ĊĠ"])
    writer.add_array("h", [1, 2, 3])
    writer.add_array("i", [0.5, -1.0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = gguf.read(tmp_path / "x.gguf").metadata
    theirs = library.GGUFReader(tmp_path / "x.gguf").fields
    assert {key: field.contents() for key, field in theirs.items() if not key.startswith("GGUF.")} == metadata
    assert metadata["g"] == ["<|x|>", "", "ĊĠ"]
    assert metadata["e"] is True


def _nested(path: Path, depth: int) -> Path:
    """A file whose only value is a 7 inside that many arrays."""
    arrays = struct.pack("<IQ", 9, 1) * (depth - 1) + struct.pack("<IQI", 4, 1, 7)
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 9) + arrays)
    return path


@pytest.mark.parametrize("depth", [9, 100_000])
def test_arrays_nested_without_end_are_damage(tmp_path, depth):
    """A small file must not exhaust the stack."""
    with pytest.raises(ModelError, match=r"x.gguf is damaged in the metadata of k: arrays are nested more than 8 deep"):
        gguf.read(_nested(tmp_path / "x.gguf", depth))


def test_arrays_within_arrays(tmp_path):
    """The format allows them."""
    assert gguf.read(_nested(tmp_path / "x.gguf", 3)).metadata == {"k": [[[7]]]}


def test_a_tokenizer_that_cannot_be_read_names_its_file(tmp_path):
    """Whoever has several models must know which one it is."""
    path = _nested(tmp_path / "x.gguf", 1)
    with pytest.raises(ModelError, match=r"x.gguf: this GGUF file holds a tokenizer of type None"):
        load_tokenizer(Source("x", "gguf", path))


def test_end_of_turn_tokens_end_too(tmp_path):
    """Chat models end a turn with a token other than the end of text."""
    metadata = {"tokenizer.ggml.eot_token_id": 260}
    path = write_gguf(tmp_path / "m.gguf", "llama", random_weights(tiny_config(), 0), metadata=metadata)
    assert end_tokens(resolve(str(path))) == {257, 260}
    assert gguf_model.read_architecture(gguf.read(path)).end_tokens == {257, 260}


def numbers(weights: GgufWeights, name: str, shape) -> torch.Tensor:
    if len(shape) == 1:
        return weights.vector(name, *shape)
    matrix = weights.matrix(name, *shape)
    return dequantize(from_gguf(matrix.raw, matrix.kind)) if isinstance(matrix, Blocks) else matrix


@pytest.mark.model
def test_the_default_model_is_the_one_that_transformers_computes():
    """Read as floats, the default model gives transformers' logits, and greedy text like it under blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers import initialization as init

    source = resolve("smollm2-135m-instruct")
    weights = GgufWeights(gguf.read(source.path))
    a = weights.architecture
    config = LlamaConfig(
        vocab_size=a.vocab_size,
        hidden_size=a.hidden_size,
        num_hidden_layers=a.n_layers,
        num_attention_heads=a.n_heads,
        num_key_value_heads=a.n_kv_heads,
        intermediate_size=a.ffn_size,
        max_position_embeddings=a.context,
        rms_norm_eps=a.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": a.rope.theta},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    with init.no_init_weights():
        reference = LlamaForCausalLM(config).eval()
    reference.tie_weights()
    prompt = [1, 520, 9531, 198, 504, 3575, 282, 4649, 314, 7042, 30, 378, 2940, 6355, 314, 260]
    with torch.no_grad():
        for name, value in reference.named_parameters():  # the tied head is no parameter of its own
            value.copy_(numbers(weights, name, value.shape))
        expected = reference(torch.tensor([prompt])).logits[0]
    del reference
    exact = logits_of(load(source.path), prompt)
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-3)
    model = load(source.path, "blocks")
    assert float((logits_of(model, prompt).argmax(-1) == expected.argmax(-1)).float().mean()) > 0.8
    assert model.n_bytes < 1.05 * source.path.stat().st_size
    tokens, _ = greedy(model, prompt, 8)
    assert len(set(tokens)) > 3
