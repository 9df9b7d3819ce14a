"""`specdec train`: a drafter from a prompts file in one command, taken up where it stopped; what is wrong is told in a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import tiny
from typer.testing import CliRunner

from specdec.cli import app
from specdec.models.head_files import is_head


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(40)))
    return path


def run(*words: object):
    return CliRunner().invoke(app, ["train", *map(str, words)])


def test_prompts_to_a_drafter_and_again(folder: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("medusa", "--model", folder, "--precision", "fp32", "--prompts", prompts, "--out", out, "--max-tokens", 8)
    words += ("--held-out", 0.3, "--vocabulary", 64, "--epochs", 1, "--steps", 2, "--correction", "markov")
    first = run(*words)
    assert first.exit_code == 0, first.output
    assert "predicted" in first.stdout
    assert "right by step" in first.stderr
    assert is_head(out)
    assert (out / "report.md").is_file()
    again = run(*words)
    assert again.exit_code == 0, again.output
    assert "right by step" not in again.stderr
    other = run(*words, "--seed", 3)
    assert other.exit_code == 2
    assert "seed was 0 and is now 3" in other.stderr
    # Other kinds learn from the same answers; settings of one kind mean nothing to another.
    alone = ("--model", folder, "--precision", "fp32", "--answers", out / "answers.jsonl", "--held-out", 0.3)
    second = run("eagle", *alone, "--out", tmp_path / "eagle", "--vocabulary", 64, "--epochs", 1, "--taps", "0,1")
    assert second.exit_code == 0, second.output
    assert json.loads((tmp_path / "eagle" / "config.json").read_text())["head"]["taps"] == [0, 1]
    # A head that was trained before gives its vocabulary, unless another is asked for, which cannot be.
    words = ("medusa", *alone, "--from", out, "--out", tmp_path / "on", "--epochs", 1, "--steps", 2, "--correction", "markov")
    third = run(*words)
    assert third.exit_code == 0, third.output
    settings = json.loads((tmp_path / "on" / "settings.json").read_text())
    assert (settings["vocabulary"], settings["rate"]) == (64, 5e-4)
    other = run(*words, "--vocabulary", 32)
    assert other.exit_code == 2
    assert "vocabulary is 64 there and 32 here" in other.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "give --prompts"),
        (("--prompts", "{prompts}", "--answers", "{prompts}"), "and not both"),
        (("--answers", "{prompts}.gone"), "there is no file"),
        (("--prompts", "{prompts}.gone"), "No such file"),
        (("--prompts", "{prompts}", "--taps", "a,b"), "--taps needs layers"),
        (("--prompts", "{prompts}", "--cache-gb", "11"), "cache_gb must be a number in [0, 10]"),
        (("--prompts", "{prompts}", "--style", "eagle4"), "style must be eagle or eagle3"),
        (("--answers", "{prompts}"), "line 1: not an answer"),
        (("--prompts", "{prompts}", "--from", "nobody"), "there is no model 'nobody'"),
        (("--prompts", "{prompts}", "--from", "smollm2-135m-instruct-eagle3"), "was trained for smollm2-135m-instruct"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(words, reason: str, folder: Path, prompts: Path, tmp_path: Path) -> None:
    given = [word.replace("{prompts}", str(prompts)) for word in words]
    result = run("eagle", "--model", folder, "--precision", "fp32", "--out", tmp_path / "out", *given)
    assert result.exit_code == 2
    assert reason in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_too_few_prompts_are_told_before_any_is_answered(prompts: Path, tmp_path: Path) -> None:
    """The model that is to answer them is not even looked for."""
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:20]))
    result = run("eagle", "--model", "/nowhere", "--prompts", prompts, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "20 prompts are too few: more than 20 are needed" in result.stderr


def test_a_folder_that_cannot_be_made_is_told(folder: Path, prompts: Path) -> None:
    result = run("eagle", "--model", folder, "--prompts", prompts, "--out", prompts / "inside")
    assert result.exit_code == 2
    assert "error: " in result.stderr
