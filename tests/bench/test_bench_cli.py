"""``specdec bench`` and ``specdec bench compare`` as a user meets them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny
from measurements import gullible, report, timing
from typer.testing import CliRunner

from specdec import acceptance
from specdec.bench.result import load, save
from specdec.cli import app

LINES = '{"prompt": "tick tock tick tock", "task": "chat", "id": "clock"}\n{"task_id": "H/1", "prompt": "def f(x):"}\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("tiny"))


def bench(folder: Path, tmp_path: Path, *options: str) -> Any:
    """Measure two prompts of eight tokens on the tiny model, on a terminal of eighty columns."""
    (tmp_path / "prompts.jsonl").write_text(LINES)
    fixed = ["--model", str(folder), "--precision", "fp32", "--prompts", str(tmp_path / "prompts.jsonl")]
    wanted = [*fixed, "--max-tokens", "8", "--ignore-eos", "--repeats", "1", *options]
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["bench", *wanted])


def test_end_to_end(folder: Path, tmp_path: Path) -> None:
    """Tables that fit, and a file with everything that can be read back."""
    result = bench(folder, tmp_path, "--json", str(tmp_path / "out.json"), "-t", "0,0.7")
    assert result.exit_code == 0, result.output
    assert "identical: all 8 runs gave the tokens of plain decoding" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    for word in ("temperature 0.7", "chat", "code", "all", "accepted by depth", "worst task", "v(M)", "peak memory"):
        assert word in result.stdout
    made = load(tmp_path / "out.json")
    assert (len(made.runs), made.tasks) == (8, ["chat", "code", "all"])
    assert made.settings["temperature"] == [0.0, 0.7]
    assert str(tmp_path) not in (tmp_path / "out.json").read_text()


def test_a_rule_that_decides_by_chance_is_named_and_promises_no_tokens(folder: Path, tmp_path: Path) -> None:
    """Its runs above temperature 0 are held against nothing; the plain ones among them still are."""
    place = tmp_path / "out.json"
    options = ("--speculation", "ngram", "--acceptance", "rejection", "-t", "1", "--limit", "1", "--json", str(place))
    result = bench(folder, tmp_path, *options)
    assert result.exit_code == 0, result.output
    assert "accepted by rejection: sampled tokens are not plain decoding's" in result.stdout
    assert "identical" not in result.stdout
    settings = json.loads(place.read_text())["settings"]
    assert (settings["acceptance"], settings["lossy"]) == ("rejection", False)


def test_several_in_flight(folder: Path, tmp_path: Path) -> None:
    """The rate of all requests together is what people ask for then."""
    result = bench(folder, tmp_path, "--concurrency", "2", "--tasks", "chat,code", "--limit", "2")
    assert result.exit_code == 0, result.output
    assert re.search(r"all together +[\d.]+ tokens/s off, [\d.]+ on", result.stdout)


def test_a_changed_token_is_exit_code_1(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No figures of a run whose tokens differ: the prompt is named and no file is written."""
    monkeypatch.setattr(acceptance, "follow", gullible)
    result = bench(folder, tmp_path, "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 1
    assert "FAILED: the runs of clock gave different tokens" in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speculation", "off"], "speculation is off"),
        (["--tasks", "maths"], "no prompt has the task 'maths'"),
        (["-t", "warm"], "--temperature needs numbers"),
        (["-t", "-1"], "temperature must be"),
        (["--repeats", "0"], "repeats must be"),
        (["--json", "no/such/folder/out.json"], "the folder no/such/folder does not exist"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
        (["compare", "a.json", "b.json"], "has no effect on specdec bench compare"),
    ],
)
def test_bad_input_is_one_line(folder: Path, tmp_path: Path, options: list[str], message: str) -> None:
    """Told before anything is measured."""
    result = bench(folder, tmp_path, *options)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert message in line


def test_compare(tmp_path: Path) -> None:
    """Ratios by mode and task on stdout, what was measured differently on stderr."""
    a = report(timing("off", "chat-1", 22.0), timing("on", "chat-1", 11.0))
    b = report(timing("off", "chat-1", 11.0), timing("on", "chat-1", 11.0), provenance={**a.provenance, "cpu": "other"})
    save(a, tmp_path / "a.json")
    save(b, tmp_path / "b.json")
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["bench", "compare", *(str(tmp_path / f"{x}.json") for x in "ab")])
    assert result.exit_code == 0, result.output
    assert "warning: not measured alike: cpu: Abacus 3000 against other" in result.stderr
    assert "a: a.json\nb: b.json; ratios are b over a\n" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["off", "chat", "0.5", "1.0", "2.00", "2.10", "1.00"] in rows
    assert ["all", "1.0", "1.0", "1.00", "1.00", "1.00"] in rows
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_compare_with_another_program(tmp_path: Path) -> None:
    """Its modes stand against this engine's fastest, which is named."""
    save(report(timing("off", "chat-1", 22.0), timing("on", "chat-1", 11.0)), tmp_path / "a.json")
    save(report(timing("llama.cpp lookup", "chat-1", 22.0)), tmp_path / "b.json")
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["bench", "compare", *(str(tmp_path / f"{x}.json") for x in "ab")])
    assert "a: a.json, its fastest mode: on\n" in result.stdout
    assert ["llama.cpp", "lookup", "chat", "1.0", "0.5", "0.50", "0.48", "1.00"] in [
        line.split() for line in result.stdout.splitlines()
    ]


def test_compare_with_a_bad_file(tmp_path: Path) -> None:
    """It is named, with what it lacks."""
    (tmp_path / "a.json").write_text("{}")
    result = CliRunner().invoke(app, ["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")])
    assert result.exit_code == 2
    assert "a.json is no result of specdec bench" in result.stderr
