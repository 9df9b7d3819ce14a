"""Result files: written and read back alike, and a bad one told what it lacks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from measurements import counters, report, timing

from specdec.bench.result import load, save
from specdec.config import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = report(
        timing("off", "chat-1", 11.0, stats=counters(11, 11, [], [])),
        timing("on", "chat-1", 6.0, stats=counters(5, 11, [4, 2], [3, 1])),
        turns=({"mode": "off", "temperature": 0.0, "turn": 0, "seconds": 11.0, "tokens": 11},),
    )
    save(made, tmp_path / "a.json")
    return tmp_path / "a.json"


def test_round_trip(path: Path) -> None:
    """What is read is what was written, and rows can be found in it."""
    again = load(path)
    save(again, path.with_name("b.json"))
    assert load(path.with_name("b.json")) == again
    row = again.row("on")
    assert row is not None
    assert (row.tau, row.acceptance_by_depth, row.speedup) == (2.2, (0.75, 0.5), pytest.approx(11 / 6))
    assert again.fact("max_tokens") == 11
    assert again.fact("cpu") == "Abacus 3000"
    assert again.tasks == ["chat", "all"]


def test_layout(path: Path) -> None:
    """Other programs read and write these keys."""
    data = json.loads(path.read_text())
    measured = ["provenance", "settings", "modes", "runs", "v", "summary", "peak_memory_bytes", "schema"]
    assert list(data) == [*measured, "turns", "one_row", "prompt_processing", "skipped"]
    assert data["modes"] == ["off", "on"]
    assert {"mode", "prompt", "task", "turn", "prompt_tokens", "tokens", "seconds", "first_token_seconds", "gaps"} < set(
        data["runs"][0]
    )


def test_a_file_of_another_program(path: Path) -> None:
    """No counters, no v(M), no memory, modes of its own."""
    data = json.loads(path.read_text())
    del data["turns"], data["one_row"]
    data["modes"], data["v"], data["peak_memory_bytes"] = ["plain"], {}, None
    data["runs"], data["summary"] = data["runs"][:1], data["summary"][:2]
    for row in (*data["runs"], *data["summary"]):
        row["mode"] = "plain"
        row.pop("stats", None), row.pop("temperature")
    path.write_text(json.dumps(data))
    row = load(path).row("plain")
    assert row is not None
    assert row.temperature == 0


def spoil(data: Any, *way: Any, to: Any = None) -> None:
    for step in way[:-1]:
        data = data[step]
    if to is None:
        del data[way[-1]]
    else:
        data[way[-1]] = to


@pytest.mark.parametrize(
    ("way", "to", "message"),
    [
        (("schema",), None, "is no result of specdec bench: it has no schema"),
        (("schema",), 9, "has the schema 9; this version reads 1"),
        (("provenance",), None, "lacks provenance"),
        (("v",), [1], "v must be dict, got [1]"),
        (("runs", 1, "seconds"), None, "runs[1] lacks seconds"),
        (("runs", 0, "tokens"), "many", "runs[0]: tokens must be int, got 'many'"),
        (("runs", 0, "tokens"), True, "runs[0]: tokens must be int, got True"),
        (("runs", 0, "gaps", "p99"), None, "runs[0].gaps lacks p99"),
        (("runs", 0, "colour"), "red", "runs[0] has the unknown key 'colour'"),
        (("summary", 2, "tau"), None, "summary[2] lacks tau"),
        (("summary", 0), 5, "summary[0] must be an object, got 5"),
        (("summary",), [], "summary is empty"),
        (("modes",), [], "modes is empty"),
        (("modes",), ["off", "on", "odd"], "the summary has no row of the mode 'odd'"),
    ],
)
def test_a_bad_file_is_told_what_is_wrong(path: Path, way: tuple, to: Any, message: str) -> None:
    """The message names the file, the place and the key."""
    data = json.loads(path.read_text())
    spoil(data, *way, to=to)
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=re.escape(str(path)) + ".*" + re.escape(message)):
        load(path)


@pytest.mark.parametrize("content", [b"{", b"\xff\xff"])
def test_a_file_that_is_no_json(path: Path, content: bytes) -> None:
    """Neither half an object nor bytes that are no text."""
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not JSON"):
        load(path)
