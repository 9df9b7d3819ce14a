"""The forms of the model that engines are given are the same model as the GGUF file, to the rounding of their numbers."""

import json
import re

import numpy as np
import pytest
import torch
from export import MARK, export
from forward import logits_of
from gguf import GGUFReader
from gguf.quants import dequantize
from requantise import requantise

from specdec import kernels
from specdec.config import DEFAULT_MODEL
from specdec.models.load import load_model, load_tokenizer
from specdec.models.source import resolve

ROWS = 1024
MESSAGES = [{"role": "user", "content": "Write a short poem about the number 42 and the Élysée."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The default model, exported: dequantising it takes seconds."""
    return export(resolve(DEFAULT_MODEL).path, tmp_path_factory.mktemp("exported") / "model")


@pytest.mark.model
@pytest.mark.slow
def test_transformers_reads_the_folder_as_specdec_reads_the_file(folder, default_model):
    import transformers

    source = resolve(DEFAULT_MODEL)
    ours, theirs = load_tokenizer(source), transformers.AutoTokenizer.from_pretrained(folder)
    ids = ours.chat(MESSAGES)
    assert theirs.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"] == ids
    assert theirs.decode(ids) == ours.decode(ids, skip_special=False)

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert set(model.generation_config.eos_token_id) == {ours.eos_id}
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    cpu = torch.device("cpu")
    same = logits_of(load_model(resolve(str(folder)), "fp32", kernels.select(cpu), cpu), ids)
    torch.testing.assert_close(logits, same, rtol=0, atol=2e-3)

    exact = logits_of(default_model("fp32"), ids)
    rounding = (logits - exact).square().mean().sqrt()
    assert rounding < 0.05 * exact.square().mean().sqrt()
    assert (logits.argmax(-1) == exact.argmax(-1)).float().mean() > 0.95


@pytest.mark.model
def test_a_folder_is_made_again_only_for_another_file(folder):
    source = resolve(DEFAULT_MODEL).path
    (folder / "config.json").write_text("{}")
    assert (export(source, folder) / "config.json").read_text() == "{}"
    (folder / MARK).write_text(json.dumps({"file": "another.gguf", "bytes": 1}))
    assert json.loads((export(source, folder) / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.model
@pytest.mark.slow
def test_blocks_change_their_layout_and_nothing_else_changes(tmp_path, monkeypatch):
    """All metadata of the default model, its first layer and what lies outside of layers: the other layers are like it, and
    the rows of the embedding beyond the first thousand are like those."""

    class OneLayer(GGUFReader):
        def __init__(self, path) -> None:
            super().__init__(path)
            self.tensors = [
                tensor._replace(
                    data=tensor.data[:ROWS], shape=np.minimum(tensor.shape, [tensor.shape[0], ROWS][: len(tensor.shape)])
                )
                for tensor in self.tensors
                if not re.match(r"blk\.[1-9]", tensor.name)
            ]

    source = resolve(DEFAULT_MODEL).path
    before = OneLayer(source)  # once: reading a vocabulary takes seconds
    monkeypatch.setattr("requantise.GGUFReader", lambda path: before)
    file = requantise(source, "Q4_0", tmp_path / "other.gguf")
    after = GGUFReader(file)
    assert {old.tensor_type.name for old in before.tensors} >= {"Q4_1", "F32"}
    assert requantise(source, "Q4_0", file).stat().st_mtime == file.stat().st_mtime
    ours = {name for name in before.fields if not name.startswith("GGUF.")} - {"general.file_type"}
    assert ours == {name for name in after.fields if not name.startswith("GGUF.")} - {"general.file_type"}
    assert all(before.fields[name].contents() == after.fields[name].contents() for name in ours)
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (old.name, old.shape.tolist()) == (new.name, new.shape.tolist())
        if old.tensor_type.name != "Q4_1":
            assert np.array_equal(old.data, new.data)
            continue
        assert new.tensor_type.name == "Q4_0"
        some = slice(8)  # rows
        weights = dequantize(old.data[some], old.tensor_type)
        assert np.std(dequantize(new.data[some], new.tensor_type) - weights) < 0.12 * np.std(weights)
