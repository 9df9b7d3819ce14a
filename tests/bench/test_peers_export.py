"""The exported folder is the same model as the GGUF file, to the rounding of bf16, for transformers and for specdec."""

import json

import pytest
import torch
from export import MARK, export
from forward import logits_of

from specdec import kernels
from specdec.config import DEFAULT_MODEL
from specdec.models.load import load_model, load_tokenizer
from specdec.models.source import resolve

MESSAGES = [{"role": "user", "content": "Write a short poem about the number 42 and the Élysée."}]


@pytest.mark.model
@pytest.mark.slow
def test_transformers_reads_the_folder_as_specdec_reads_the_file(tmp_path, default_model):
    import transformers

    source = resolve(DEFAULT_MODEL)
    folder = export(source.path, tmp_path / "model")
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
def test_a_folder_is_made_again_only_for_another_file(tmp_path):
    source = resolve(DEFAULT_MODEL).path
    folder = export(source, tmp_path / "model")
    (folder / "config.json").write_text("{}")
    assert (export(source, folder) / "config.json").read_text() == "{}"
    (folder / MARK).write_text(json.dumps({"file": "another.gguf", "bytes": 1}))
    assert json.loads((export(source, folder) / "config.json").read_text())["model_type"] == "llama"
