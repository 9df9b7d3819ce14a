"""Trained heads come back from the disk as they were; what does not fit, or was not written whole, does not come back."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path

import pytest
import torch
from checkpoints import tiny

from specdec import kernels
from specdec.models.decoder import Decoder
from specdec.models.errors import ModelError
from specdec.models.fingerprint import Fingerprint
from specdec.models.head_config import HeadConfig
from specdec.models.head_files import load_head, save_head
from specdec.models.heads import Head, make_head
from specdec.models.load import load_model
from specdec.models.source import resolve

CPU = torch.device("cpu")
BASE = {"hidden_size": 64, "vocab_size": 320, "taps": (1,)}
CONFIGS = {
    "medusa": HeadConfig(kind="medusa", depth=2, correction="markov", rank=32, vocabulary=40, **BASE),
    "mtp": HeadConfig(kind="mtp", depth=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_size=96, **BASE),
}
IDS = torch.arange(0, 320, 8)


def model(folder: Path, precision="fp32", **config) -> Decoder:
    return load_model(resolve(str(tiny(folder, **config))), precision, kernels.select(CPU), CPU)


@pytest.fixture
def target(tmp_path) -> Fingerprint:
    return Fingerprint.of(model(tmp_path / "model"), "the model")


def random_head(name: str, seed: int = 0) -> Head:
    torch.manual_seed(seed)
    head = make_head(CONFIGS[name])
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    return head


def same(a: Head, b: Head) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(x.float(), theirs[name].float()) for name, x in mine.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_head_comes_back_as_it_was(tmp_path, target, name: str, dtype: torch.dtype) -> None:
    """Its weights in the type they had, its vocabulary, and everything that is known of it."""
    head = random_head(name).to(dtype)
    ids = IDS if head.config.vocabulary else None
    folder = tmp_path / "new" / "head"
    save_head(folder, head, target=target, vocabulary_ids=ids, provenance={"hours": 1.5}, measured={"top": [[0.5, 0.2]]})
    loaded = load_head(folder, target)
    assert same(loaded.head, head)
    assert loaded.config == head.config
    assert loaded.provenance == {"hours": 1.5}
    assert loaded.measured == {"top": [[0.5, 0.2]]}
    assert loaded.target == target
    if ids is None:
        assert loaded.vocabulary_ids is None
    else:
        assert loaded.vocabulary_ids.dtype is torch.int64
        assert torch.equal(loaded.vocabulary_ids, ids)
    assert {p.dtype for p in loaded.head.parameters()} == {torch.float32}
    size = sum(p.numel() for p in head.parameters()) * dtype.itemsize
    assert size < sum(file.stat().st_size for file in folder.iterdir()) < size + 8192
    assert len(list(folder.iterdir())) == 2


def test_a_head_replaces_the_one_before(tmp_path, target) -> None:
    first, second = random_head("mtp", 1), random_head("mtp", 2)
    save_head(tmp_path / "head", first, target=target)
    save_head(tmp_path / "head", second, target=target)
    assert same(load_head(tmp_path / "head", target).head, second)
    assert len(list((tmp_path / "head").iterdir())) == 2


@pytest.mark.parametrize("failing", [1, 2])
def test_a_full_disk_leaves_the_head_before(tmp_path, target, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever write fails, the error says so, the old head is read, and no half-written file stays."""
    first, second = random_head("mtp", 1), random_head("mtp", 2)
    save_head(tmp_path / "head", first, target=target)
    calls = []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ModelError, match=r"head: the trained drafter could not be written .*No space left"):
            save_head(tmp_path / "head", second, target=target)
    assert same(load_head(tmp_path / "head", target).head, first)
    assert not list((tmp_path / "head").glob(".writing-*"))
    save_head(tmp_path / "head", second, target=target)
    assert same(load_head(tmp_path / "head", target).head, second)
    assert len(list((tmp_path / "head").iterdir())) == 2


def test_other_types_and_vocabularies_are_not_saved(tmp_path, target) -> None:
    medusa = random_head("medusa")
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        save_head(tmp_path / "head", random_head("mtp").half(), target=target)
    for ids in (None, IDS[:-1], IDS + 8, torch.zeros(40, dtype=torch.int64)):
        with pytest.raises(ValueError, match="vocabulary"):
            save_head(tmp_path / "head", medusa, target=target, vocabulary_ids=ids)
    with pytest.raises(ValueError, match="vocabulary"):
        save_head(tmp_path / "head", random_head("mtp"), target=target, vocabulary_ids=IDS)
    with pytest.raises(ValueError, match="does not fit the model"):
        save_head(tmp_path / "head", medusa, target=dataclasses.replace(target, hidden_size=32), vocabulary_ids=IDS)
    with pytest.raises(ValueError, match="taps layer 1 of the model, which has layers 0 to 0"):
        save_head(tmp_path / "head", medusa, target=dataclasses.replace(target, n_layers=1), vocabulary_ids=IDS)
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"seed": 1}, "trained for the model, and this model is another: other embeddings"),
        ({"num_hidden_layers": 3}, "number of layers 2 against 3"),
        ({"vocab_size": 330}, "vocabulary 320 against 330"),
        ({"hidden_size": 96}, "hidden size 64 against 96"),
    ],
)
def test_a_head_for_another_model_is_refused(tmp_path, target, config, reason: str) -> None:
    """Also one of the same shape."""
    save_head(tmp_path / "head", random_head("mtp"), target=target)
    other = Fingerprint.of(model(tmp_path / "other", **config), "another")
    with pytest.raises(ModelError, match=reason):
        load_head(tmp_path / "head", other)


@pytest.mark.parametrize("precision", ["q4", "q8", "bf16"])
def test_the_same_model_in_another_precision_is_the_same(tmp_path, target, precision) -> None:
    save_head(tmp_path / "head", random_head("mtp"), target=target)
    rounded = Fingerprint.of(model(tmp_path / "again", precision), "the model")
    assert rounded.glimpse != target.glimpse
    load_head(tmp_path / "head", rounded)


def edit(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_folder_that_was_tampered_with_is_refused(tmp_path, target) -> None:
    folder = tmp_path / "head"
    head = dataclasses.asdict(CONFIGS["mtp"])
    cases = [
        ({"format": 2}, "format 2 is not supported"),
        ({"tree": {}}, "tree too much or too little"),
        ({"head": {**head, "knd": 1}}, "unknown HeadConfig setting knd"),
        ({"head": {**head, "kind": "eagle3"}}, "tensor .* is (missing|not part)"),
        ({"head": {**head, "vocabulary": 40}}, "vocabulary ids if, and only if"),
        ({"head": {**head, "taps": [2]}}, "taps layer 2"),
        ({"target": {"name": "x"}}, "hidden_size, n_layers, vocab_size is missing"),
        ({"weights": "model-0.safetensors"}, "model-0.safetensors is missing"),
    ]
    for changes, reason in cases:
        save_head(folder, random_head("mtp"), target=target)
        edit(folder, **changes)
        with pytest.raises(ModelError, match=reason):
            load_head(folder, target)


def test_weights_that_are_cut_short_are_refused(tmp_path, target) -> None:
    save_head(tmp_path / "head", random_head("mtp"), target=target)
    weights = next((tmp_path / "head").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="damaged or cut short"):
        load_head(tmp_path / "head", target)


def test_a_published_head_needs_its_target(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3}')
    with pytest.raises(ModelError, match="can only be read for a target"):
        load_head(tmp_path)
