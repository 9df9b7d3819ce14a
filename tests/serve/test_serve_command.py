"""The command ``specdec serve``: what it refuses before it listens."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec.cli import app


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "99999"], "--port must be in [0, 65535], got 99999"),
        (["--port", "-1"], "--port must be in [0, 65535], got -1"),
        (["--host", "203.0.113.1"], "cannot listen at 203.0.113.1, port 0: Cannot assign requested address"),
        (["--host", "no.such.host.invalid"], "cannot listen at no.such.host.invalid, port 0: "),
        (["--kv-tokens", "1000000000000"], "a pool of 1,000,000,000,000 tokens takes "),
        (["--max-len", "300"], "max_len must be at most the model's context of 256 tokens, got 300"),
        (["--threads", "100000"], "threads must be an integer in [1, 1024], got 100000"),
    ],
)
def test_a_server_that_cannot_be_is_told_in_one_line(tiny_folder: Path, options: list[str], said: str) -> None:
    """Nothing is put in the place of what was asked for: not another port, and not a shorter context."""
    command = ["serve", "--model", str(tiny_folder), "--precision", "fp32", "--port", "0", *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert said in line


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded() -> None:
    """Who has a large model should not wait for it first."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "--model", "/nowhere", "--port", str(port)])
    assert result.exit_code == 2
    assert f"cannot listen at 127.0.0.1, port {port}: Address already in use" in result.stderr
