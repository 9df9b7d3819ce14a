"""The name of a trained drafter becomes the drafter of its kind, or an error that says what to do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import tiny
from published_heads import eagle1, eagle3, medusa, write

from specdec import kernels
from specdec.config import ConfigError, SpeculationConfig
from specdec.draft import build
from specdec.draft.base import Drafter, Target
from specdec.draft.merge import Merge
from specdec.models import source
from specdec.models.errors import ModelError
from specdec.models.fingerprint import Fingerprint
from specdec.models.head_config import HeadConfig
from specdec.models.head_files import save_head
from specdec.models.heads import make_head
from specdec.models.load import load_model
from specdec.models.source import resolve

CPU = torch.device("cpu")
N_LAYERS = 8


def target_of(folder: Path, **config) -> Target:
    model = load_model(resolve(str(tiny(folder, **config))), "fp32", kernels.select(CPU), CPU)
    return Target(model, kernels.select(CPU), 8)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return target_of(tmp_path_factory.mktemp("model"), num_hidden_layers=N_LAYERS)


@pytest.fixture(autouse=True)
def heads(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of trained drafters that ship."""
    monkeypatch.setattr(source, "HEADS", tmp_path / "heads")
    return tmp_path / "heads"


def ship(heads: Path, target: Target, alias: str = "tiny-mtp") -> Path:
    config = HeadConfig(
        kind="mtp", hidden_size=64, vocab_size=320, taps=(7,), n_heads=4, n_kv_heads=2, head_dim=16, ffn_size=96, depth=1
    )
    made_for = Fingerprint.of(target.model, "tiny")
    save_head(heads / alias, make_head(config), target=made_for, provenance={"hours": 2.0}, measured={"tau": {"chat": 3.1}})
    return heads / alias


def names(drafter: Drafter | None) -> list[str]:
    assert drafter is not None
    return [part.name for part in drafter.drafters] if isinstance(drafter, Merge) else [drafter.name]


@pytest.mark.parametrize(("make", "kind"), [(eagle1, "eagle"), (eagle3, "eagle3"), (medusa, "medusa")])
def test_a_head_becomes_the_drafter_of_its_kind(tmp_path, target, make, kind: str) -> None:
    """And its card says what it is."""
    if kind == "medusa":
        pytest.importorskip("specdec.draft.medusa")
    folder = write(tmp_path / "head", *make())
    drafter = build(SpeculationConfig(drafters=("trained",), trained=str(folder)), target)
    assert names(drafter) == [kind]
    card = drafter.card
    assert card["kind"] == kind
    assert card["name"] == str(folder)
    assert card["parameters"] > 10_000
    assert card["bytes"] == drafter.n_bytes > 0
    assert card["vocabulary"] == (48 if kind == "eagle3" else 320)


def test_a_model_becomes_a_draft_model(tmp_path, target) -> None:
    pytest.importorskip("specdec.draft.model")
    folder = tiny(tmp_path / "small", num_hidden_layers=1)
    drafter = build(SpeculationConfig(drafters=("trained",), trained=str(folder)), target)
    assert names(drafter) == ["draft"]
    assert drafter.card["kind"] == "llama with 1 layers"


def test_auto_takes_the_one_that_ships_for_the_model(heads, tmp_path, target) -> None:
    """Known by the model's embedding, not by its name: another model of the same shape has none, and goes without."""
    ship(heads, target)
    drafter = build(SpeculationConfig.parse("auto"), target)
    assert names(drafter) == ["suffix", "mtp", "recycling"]
    card = next(part.card for part in drafter.drafters if part.card)
    assert (card["name"], card["provenance"]) == ("tiny-mtp", {"hours": 2.0, "made for": "tiny"})
    assert card["measured"] == {"tau": {"chat": 3.1}}
    other = target_of(tmp_path / "other", num_hidden_layers=N_LAYERS, seed=1)
    assert names(build(SpeculationConfig.parse("auto"), other)) == ["suffix", "recycling"]


def test_auto_goes_without_where_none_ships(target) -> None:
    assert names(build(SpeculationConfig.parse("auto"), target)) == ["suffix", "recycling"]
    table = Target(SimpleNamespace(shape=SimpleNamespace(vocab_size=50)), SimpleNamespace(top=None), 0)
    assert names(build(SpeculationConfig.parse("auto"), table)) == ["suffix", "recycling"]


@pytest.mark.parametrize("method", ["trained", "suffix,trained", "suffix,trained,recycling"])
def test_what_is_asked_for_by_name_must_be_there(heads, target, method: str) -> None:
    with pytest.raises(ConfigError, match="no trained drafter ships for this model: name one"):
        build(SpeculationConfig.parse(method), target)
    ship(heads, target)
    assert "mtp" in names(build(SpeculationConfig.parse(method), target))


def test_a_trained_drafter_alone_is_not_left_out_in_silence(target) -> None:
    with pytest.raises(ConfigError, match="no trained drafter ships"):
        build(SpeculationConfig(drafters=("trained",)), target)


def test_an_alias_names_one_that_ships(heads, target) -> None:
    ship(heads, target, "tiny-b")
    ship(heads, target, "tiny-a")
    drafter = build(SpeculationConfig(drafters=("trained",), trained="tiny-b"), target)
    assert drafter is not None
    assert drafter.card["name"] == "tiny-b"
    with pytest.raises(ModelError, match=r"trained drafter: there is no model 'tiny-c'.*one that ships: tiny-a, tiny-b"):
        build(SpeculationConfig(drafters=("trained",), trained="tiny-c"), target)


def test_a_head_for_another_model_is_refused(heads, tmp_path, target) -> None:
    """Ours by its fingerprint, a published one by its sizes."""
    folder = ship(heads, target)
    other = target_of(tmp_path / "other", num_hidden_layers=N_LAYERS, seed=1)
    with pytest.raises(ModelError, match="was trained for tiny, and this model is another: other embeddings"):
        build(SpeculationConfig(trained=str(folder)), other)
    wide = target_of(tmp_path / "wide", hidden_size=128)
    with pytest.raises(ModelError, match="hidden_size is 64, and this model has 128"):
        build(SpeculationConfig(trained=str(write(tmp_path / "head", *eagle3()))), wide)


def test_a_model_without_weights_has_no_trained_drafters(tmp_path) -> None:
    table = Target(SimpleNamespace(shape=SimpleNamespace(vocab_size=50)), SimpleNamespace(top=None), 0)
    with pytest.raises(ConfigError, match="need a model whose weights are known"):
        build(SpeculationConfig(trained="somewhere"), table)


def test_aliases_of_what_ships_are_not_those_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not set(source.shipped_heads()) & set(source.ALIASES)
