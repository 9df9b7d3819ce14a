"""``specdec audit``: what it prints, which files it writes, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_server import faking
from typer.testing import CliRunner

from specdec.audit import session
from specdec.audit.report import Check, Report
from specdec.cli import app


@pytest.fixture
def run(folder: Path) -> Callable[..., Any]:
    return lambda *arguments: CliRunner().invoke(app, ["audit", *arguments])


def of_model(folder: Path) -> tuple[str, ...]:
    return "--model", str(folder), "--precision", "q8", "--minutes", "0.000001", "--max-tokens", "14"


def test_the_verdict_is_printed_and_is_the_exit_code(
    run: Callable[..., Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each of the three verdicts; both files are written whatever it is."""
    for status, code, word in (("passed", 0, "EXACT"), ("failed", 1, "DIFFERENT"), ("left out", 2, "INCONCLUSIVE")):
        found = Report({"model": "m"}, {}, {}, ("rows",), [Check("rows", "a check", status, "of something")])  # type: ignore[arg-type]
        monkeypatch.setattr(session, "audit", lambda *_, found=found: found)
        js, page = tmp_path / f"{code}.json", tmp_path / f"{code}.html"
        result = run(*of_model(folder), "--json", str(js), "--html", str(page))
        assert result.exit_code == code, result.output
        assert word in result.stdout
        assert "of something" in result.stdout
        assert json.loads(js.read_text())["exit_code"] == code
        assert page.read_text().startswith("<!doctype html>")


def test_an_audit_without_time_has_no_verdict(run: Callable[..., Any], folder: Path) -> None:
    result = run(*of_model(folder))
    assert result.exit_code == 2
    assert "INCONCLUSIVE" in result.stdout
    assert "left out" in result.stdout


def test_a_server_is_audited(run: Callable[..., Any], tmp_path: Path) -> None:
    with faking("load") as url:
        result = run("--url", url, "--minutes", "5", "--json", str(tmp_path / "a.json"))
    assert result.exit_code == 1
    assert "crowded" in result.stdout
    assert json.loads((tmp_path / "a.json").read_text())["subject"]["server"] == url


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "http://127.0.0.1:9/v1"), "no models are told"),
        (("--url", "http://127.0.0.1:9/v1", "--precision", "q8"), "--precision has no effect"),
        (("--against", "http://127.0.0.1:9/v1"), "--against needs --url"),
        (("--minutes", "0"), "minutes must be"),
        (("--json", "/nowhere/a.json"), "cannot be written"),
        (("--speculation", "off"), "speculation is off"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    run: Callable[..., Any], folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    model = () if "--url" in arguments else ("--model", str(folder))
    result = run(*model, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.strip().count("\n") == 0
