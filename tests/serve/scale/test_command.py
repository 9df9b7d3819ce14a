"""``specdec serve --replicas``: what is wrong is told in one line, and nothing stays behind."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec.cli import app


def test_a_number_of_replicas_is_checked() -> None:
    result = CliRunner().invoke(app, ["serve", "--replicas", "0"])
    assert result.exit_code == 2
    assert "--replicas must be an integer >= 1, got 0" in result.stderr


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_stops_the_start(tmp_path: Path) -> None:
    """The replica's own message, and no process is left."""
    result = CliRunner().invoke(app, ["serve", "--replicas", "2", "--port", "0", "--model", str(tmp_path)])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: replica 0 does not start: ")
    assert str(tmp_path) in result.stderr
    assert not multiprocessing.active_children()
