"""Folders of safetensors: one file or many, tied or not; whatever is damaged is named, and nothing is made up."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from checkpoints import EOS, random_weights, tiny, tiny_config, write
from forward import logits_of
from safetensors.torch import load_file, save_file

from specdec import kernels
from specdec.models.errors import ModelError
from specdec.models.load import end_tokens, load_model
from specdec.models.source import resolve

CPU = torch.device("cpu")
PROMPT = list(b"tick tok")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load(folder: Path, precision="fp32"):
    return load_model(resolve(str(folder)), precision, kernels.select(CPU), CPU)


def rewrite(folder: Path, **changes) -> None:
    """Replace tensors of a one-file checkpoint; None removes one."""
    path = folder / "model.safetensors"
    weights = {**load_file(path), **changes}
    save_file({name: value for name, value in weights.items() if value is not None}, path)


def reconfigure(folder: Path, **changes) -> None:
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.mark.parametrize("shards", [2, 5])
def test_many_files_are_one_model(tmp_path, shards):
    """A model cut into shards gives the same logits as in one file, bit for bit."""
    one, many = tiny(tmp_path / "one"), tmp_path / "many"
    write(many, tiny_config(), random_weights(tiny_config(), 0), shards=shards)
    assert len(list(many.glob("*.safetensors"))) == shards
    assert torch.equal(logits_of(load(many), PROMPT), logits_of(load(one), PROMPT))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types(tmp_path, dtype):
    """Checkpoints come in half precision; each value is taken as it is."""
    folder = tiny(tmp_path)
    rounded = {name: value.to(dtype) for name, value in load_file(folder / "model.safetensors").items()}
    rewrite(folder, **rounded)
    logits = logits_of(load(folder), PROMPT)
    rewrite(folder, **{name: value.float() for name, value in rounded.items()})
    assert torch.equal(logits, logits_of(load(folder), PROMPT))


def test_tied_without_and_with_an_equal_head(tmp_path):
    """A tied model may leave its output matrix out, or bring a copy of the embedding: the same logits."""
    folder = tiny(tmp_path, tie_word_embeddings=True)
    logits = logits_of(load(folder), PROMPT)
    rewrite(folder, **{HEAD: load_file(folder / "model.safetensors")[EMBEDDING]})
    model = load(folder)
    assert torch.equal(logits_of(model, PROMPT), logits)
    assert model.head is model.embedding.weight, "one table, not two"


def test_tied_with_a_head_of_its_own_is_a_contradiction(tmp_path):
    """Neither matrix is silently preferred; without the flag the file's own head is used."""
    folder = tiny(tmp_path)
    untied = logits_of(load(folder), PROMPT)
    reconfigure(folder, tie_word_embeddings=True)
    with pytest.raises(ModelError, match=r"lm_head.weight differs from model.embed_tokens.weight .*tie_word_embeddings"):
        load(folder)
    reconfigure(folder, tie_word_embeddings=None)
    assert torch.equal(logits_of(load(folder), PROMPT), untied)


@pytest.mark.parametrize("flag", [False, None])
def test_untied_without_a_head_is_an_error(tmp_path, flag):
    """An output matrix is never made up."""
    folder = tiny(tmp_path)
    reconfigure(folder, tie_word_embeddings=flag)
    rewrite(folder, **{HEAD: None})
    with pytest.raises(ModelError, match=r"tensor lm_head.weight is missing"):
        load(folder)


@pytest.mark.parametrize(
    "name", [EMBEDDING, "model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"]
)
def test_missing_tensor(tmp_path, name):
    """The error names the tensor and the folder."""
    folder = tiny(tmp_path)
    rewrite(folder, **{name: None})
    with pytest.raises(ModelError, match=f"{tmp_path.name}.*tensor {name} is missing"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (EMBEDDING, (319, 64)),
        ("model.layers.1.self_attn.k_proj.weight", (64, 64)),
        ("model.layers.0.mlp.up_proj.weight", (96, 32)),
        ("model.norm.weight", (63,)),
    ],
)
def test_wrong_shape(tmp_path, name, shape):
    """The error names the tensor, the shape it has and the one it should have."""
    folder = tiny(tmp_path)
    rewrite(folder, **{name: torch.zeros(shape)})
    with pytest.raises(ModelError, match=rf"{name} has shape \[{', '.join(map(str, shape))}\], the model needs \["):
        load(folder)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.input_layernorm.weight", "model.layers.0.mlp.gate.weight"]
)
def test_unexpected_tensor(tmp_path, name):
    """A tensor that nothing uses would be something left out of the computation: an error that names it."""
    folder = tiny(tmp_path)
    rewrite(folder, **{name: torch.zeros(64)})
    with pytest.raises(ModelError, match=f"holds tensor {name}"):
        load(folder)


def test_frequencies_saved_by_old_files_are_no_weights(tmp_path):
    """Old checkpoints hold rotary frequencies, which follow from the config."""
    folder = tiny(tmp_path)
    expected = logits_of(load(folder), PROMPT)
    rewrite(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((8,), 9.0)})
    assert torch.equal(logits_of(load(folder), PROMPT), expected)


def test_integer_tensor(tmp_path):
    """Weights packed by another library are integers, and are not read as numbers."""
    folder = tiny(tmp_path)
    rewrite(folder, **{"model.layers.0.mlp.up_proj.weight": torch.zeros(96, 64, dtype=torch.int8)})
    with pytest.raises(ModelError, match=r"up_proj.weight has type torch.int8"):
        load(folder)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def claim_a_huge_header(data: bytes) -> bytes:
    return struct.pack("<Q", 2**40) + data[8:]


def break_the_header(data: bytes) -> bytes:
    return data[:8] + b"!" + data[9:]


def empty(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [cut, claim_a_huge_header, break_the_header, empty, lambda data: data[:5]])
@pytest.mark.parametrize("shards", [1, 2])
def test_damaged_file(tmp_path, damage, shards):
    """A damaged or shortened file is an error that names it."""
    write(tmp_path, tiny_config(), random_weights(tiny_config(), 0), shards=shards)
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=f"{path.name} is damaged or cut short"):
        load(tmp_path)


def test_missing_shard(tmp_path):
    """A shard that the index names and the folder lacks is named."""
    write(tmp_path, tiny_config(), random_weights(tiny_config(), 0), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003.safetensors is missing"):
        load(tmp_path)


def test_shard_without_a_tensor_that_the_index_places_there(tmp_path):
    """The index and the files must agree."""
    write(tmp_path, tiny_config(), random_weights(tiny_config(), 0), shards=2)
    path = tmp_path / "model-00002-of-00002.safetensors"
    weights = load_file(path)
    weights.pop("model.norm.weight")
    save_file(weights, path)
    with pytest.raises(ModelError, match=r"model-00002-of-00002.safetensors lacks tensor model.norm.weight"):
        load(tmp_path)


def test_tensor_in_two_shards(tmp_path):
    """Two files that both claim a tensor leave open which one counts."""
    write(tmp_path, tiny_config(), random_weights(tiny_config(), 0), shards=2)
    path = tmp_path / "model-00002-of-00002.safetensors"
    save_file({**load_file(path), EMBEDDING: torch.zeros(320, 64)}, path)
    with pytest.raises(ModelError, match=rf"tensor {EMBEDDING} is in both"):
        load(tmp_path)


def test_folder_without_weights(tmp_path):
    """A folder with another format of weights says so."""
    folder = tiny(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"holds no .safetensors file"):
        load(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', b"\xff\xfe", "[" * 100_000, '{"weight_map": {"a": 3}}'])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_damaged_json(tmp_path, name, text):
    """A broken description is an error that names the file."""
    write(tmp_path, tiny_config(), random_weights(tiny_config(), 0), shards=2)
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelError, match=name):
        load(tmp_path)


def test_precision_that_the_sizes_do_not_allow(tmp_path):
    """Blocks hold 32 weights: other widths are refused with a precision that works."""
    folder = tiny(tmp_path, intermediate_size=80)
    load(folder, "bf16")
    with pytest.raises(ModelError, match=r"mlp.down_proj.*multiple of 32.*bf16"):
        load(folder, "q8")


def test_end_tokens_come_from_every_file(tmp_path):
    """Chat models name the end of a turn in generation_config.json or the tokenizer's files alone."""
    folder = tiny(tmp_path)
    assert end_tokens(resolve(str(folder))) == {EOS}
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 260]}')
    assert end_tokens(resolve(str(folder))) == {257, 260}
    reconfigure(folder, eos_token_id=5)
    (folder / "generation_config.json").unlink()
    assert end_tokens(resolve(str(folder))) == {5, EOS}, "the tokenizer's own"
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert end_tokens(resolve(str(folder))) == {5, 260}
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|nowhere|>"}')
    with pytest.raises(ModelError, match="nowhere"):
        end_tokens(resolve(str(folder)))
