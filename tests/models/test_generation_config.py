"""generation_config.json: what it says of sampling is taken or told, and a bad value is named with its file."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from specdec.config import DEFAULT_MODEL
from specdec.models.errors import ModelError
from specdec.models.generation_config import FILE, GenerationConfig, find
from specdec.models.source import Source, resolve


def write(folder: Path, **values: Any) -> Source:
    (folder / FILE).write_text(json.dumps(values))
    return Source("model", "folder", folder)


@pytest.mark.parametrize(
    ("values", "defaults"),
    [
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}, None),
        ({"temperature": 0.6, "top_p": None}, {"temperature": 0.6}),
        ({"max_new_tokens": 64}, {"max_tokens": 64}),
        ({"bad_words_ids": [[5], [6, 7]]}, {"bad_words_ids": [[5], [6, 7]]}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": True, "top_p": 0.9}, {"top_p": 0.9, "temperature": 1.0}),
        ({"do_sample": False, "top_p": 0.9}, {"top_p": 0.9, "temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"top_p": 0.9}, {"top_p": 0.9}),
        ({"transformers_version": "4.57.1", "_from_model_config": True, "pad_token_id": 2, "use_cache": True}, {}),
        ({}, {}),
    ],
)
def test_what_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture, values: dict, defaults: dict | None) -> None:
    """Fields under our names; do_sample decides whether a temperature counts, and says 1 where none is given. The rest of the
    file is no matter of sampling."""
    assert find(write(tmp_path, **values), "auto").defaults == (values if defaults is None else defaults)
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1), ("temperature", "hot"), ("temperature", True), ("top_k", 2.5), ("top_p", 0), ("top_p", 1.2),
        ("min_p", 2), ("repetition_penalty", 0), ("max_new_tokens", 0), ("bad_words_ids", "x"), ("do_sample", "yes"),
        ("eos_token_id", "x"),
    ],
)  # fmt: skip
def test_a_bad_value_is_named(tmp_path: Path, name: str, value: object) -> None:
    """With its file and its field as the file calls it: who wrote the file is not who reads the message."""
    with pytest.raises(ModelError) as error:
        find(write(tmp_path, **{name: value}), "auto")
    assert str(tmp_path / FILE) in str(error.value)
    assert f" {name} must be " in str(error.value)
    assert repr(value) in str(error.value)


def test_what_is_not_done_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All of it in one line, by name and value; what asks for nothing is none of it."""
    nothing = {"num_beams": 1, "typical_p": 1.0, "penalty_alpha": None, "no_repeat_ngram_size": 0, "suppress_tokens": []}
    find(write(tmp_path, **nothing), "auto")
    assert not caplog.records
    found = find(write(tmp_path, num_beams=4, typical_p=0.9, penalty_alpha=0.6, temperature=0.5), "auto")
    assert found.defaults == {"temperature": 0.5}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(tmp_path / FILE) in record.getMessage()
    assert record.getMessage().endswith(": num_beams 4, penalty_alpha 0.6, typical_p 0.9")


def test_where_it_is_looked_for(tmp_path: Path) -> None:
    """In the model's folder, nowhere, or in another folder; one that is not there is told."""
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other", temperature=0.3, eos_token_id=[7, 8])
    model = write(tmp_path, temperature=0.6)
    assert find(model, "auto").defaults == {"temperature": 0.6}
    assert find(model, "none") == GenerationConfig()
    assert find(model, str(other.path)) == GenerationConfig({"temperature": 0.3}, frozenset({7, 8}))
    (tmp_path / FILE).unlink()
    assert find(model, "auto") == GenerationConfig()
    with pytest.raises(ModelError, match=r"there is no .*/nowhere/generation_config.json; .* auto, none, or a folder"):
        find(model, str(tmp_path / "nowhere"))


@pytest.mark.model
def test_the_default_model_has_none() -> None:
    """So whoever measures it measures what the library does by default."""
    assert find(resolve(DEFAULT_MODEL), "auto") == GenerationConfig()
