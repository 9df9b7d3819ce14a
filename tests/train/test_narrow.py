"""A head that drafts fewer tokens: the same head over the most frequent of them, measured again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from checkpoints import tiny
from typer.testing import CliRunner

from specdec.cli import app
from specdec.config import ConfigError
from specdec.models.head_config import HeadConfig
from specdec.models.head_files import LoadedHead, load_head
from specdec.models.heads import make_head
from specdec.train.data import Answer
from specdec.train.narrow import narrowed

SHAPE = HeadConfig(kind="medusa", hidden_size=32, vocab_size=50, taps=(1,), vocabulary=10, depth=2, correction="markov", rank=8)
HAD = [40, 3, 7, 30, 11, 2, 25, 19, 5, 48]
SAID = Answer(index=0, task="", temperature=0.0, n_prompt=1, tokens=(1, 9, 9, 9, 9, 30, 30, 30, 7, 7, 19, 19, 19, 19))


def head(**more) -> LoadedHead:
    return LoadedHead("wide", make_head(dataclasses.replace(SHAPE, **more)), torch.tensor(HAD))


def test_the_most_frequent_of_its_tokens_stay_with_what_was_learned_of_them() -> None:
    wide = head()
    with torch.no_grad():
        wide.head.markov[0].second.weight.copy_(torch.arange(10.0)[:, None].expand(10, 8))
    new = narrowed(wide, [SAID], 4, frozenset({48, 33}))
    assert new.vocabulary_ids.tolist() == [7, 19, 30, 48], "9 and 33 are not its tokens, 48 stays however rare"
    assert new.config == dataclasses.replace(wide.config, vocabulary=4)
    assert new.head.markov[0].second.weight[:, 0].tolist() == [HAD.index(token) for token in (7, 19, 30, 48)]
    others = {name: value for name, value in new.head.state_dict().items() if "second" not in name}
    assert all(torch.equal(value, wide.head.state_dict()[name]) for name, value in others.items())


def test_what_cannot_be_narrowed_is_refused() -> None:
    with pytest.raises(ConfigError, match="drafts 10 tokens, so fewer are needed, got 10"):
        narrowed(head(), [SAID], 10, frozenset())
    with pytest.raises(ConfigError, match="brings its own output matrix"):
        narrowed(head(own_output=True), [SAID], 4, frozenset())


def test_a_trained_head_in_one_command(tmp_path: Path) -> None:
    """Trained, narrowed and read again; its figures are those of the narrow head."""
    model, prompts, wide, out = (tmp_path / name for name in ("model", "prompts.jsonl", "wide", "out"))
    model.mkdir()
    tiny(model)
    prompts.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(40)))

    def run(*words: object):
        return CliRunner().invoke(app, ["train", *map(str, words)])

    common = ("--model", model, "--precision", "fp32", "--held-out", 0.3)
    trained = run("eagle", *common, "--prompts", prompts, "--out", wide, "--max-tokens", 8, "--epochs", 1, "--taps", "0,1")
    assert trained.exit_code == 0, trained.output
    answers = wide / "answers.jsonl"
    result = run("narrow", wide, *common, "--answers", answers, "--vocabulary", 40, "--out", out)
    assert result.exit_code == 0, result.output
    assert "40 tokens" in result.stdout
    narrow, before = load_head(out), load_head(wide)
    assert len(narrow.vocabulary_ids) == narrow.config.vocabulary == 40
    assert narrow.provenance["narrowed"]["from"] == before.config.n_outputs
    assert 0 < narrow.provenance["narrowed"]["coverage"] < 1
    assert narrow.measured["anchors"] == before.measured["anchors"], "the same answers"
    assert run("narrow", wide, *common, "--answers", tmp_path / "gone", "--out", out).exit_code == 2
