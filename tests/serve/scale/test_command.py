"""``specdec serve --replicas``: replicas come and go on signals, and what is wrong is told in one line."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from scaled import under_load  # type: ignore[import-not-found]
from serving import Asking, until
from typer.testing import CliRunner

from specdec.cli import app
from specdec.config import ServeConfig
from specdec.serve.scale.supervisor import Supervisor


def test_a_number_of_replicas_is_checked() -> None:
    result = CliRunner().invoke(app, ["serve", "--replicas", "0"])
    assert result.exit_code == 2
    assert "--replicas must be an integer >= 1, got 0" in result.stderr


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica's own message, and no process is left."""
    monkeypatch.setattr("specdec.serve.logs.configure", lambda form: None)  # this process keeps its own
    result = CliRunner().invoke(app, ["serve", "--replicas", "2", "--port", "0", "--model", str(tmp_path)])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: replica 0 does not start: ")
    assert str(tmp_path) in result.stderr
    assert not multiprocessing.active_children()


def test_what_does_not_work_goes_first() -> None:
    """A replica that starts again is no loss; the last one stays, whatever it does."""

    async def leaving(n: int, *states: str) -> list[str]:
        supervisor = Supervisor(pytest.fail, ServeConfig(), len(states))
        for replica, state in zip(supervisor.replicas, states, strict=True):
            replica.state = state
        for _ in range(n):
            supervisor.remove()
        left = [replica.name for replica in supervisor.replicas if replica.leaving]
        await supervisor.stop(0)
        return left

    assert asyncio.run(leaving(1, "ready", "starting", "ready")) == ["1"]
    assert asyncio.run(leaving(2, "ready", "starting", "ready")) == ["1", "2"]
    assert asyncio.run(leaving(5, "starting", "ready")) == ["0"]


@contextmanager
def command(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Asking]]:
    """The command with two replicas of a tiny model, which must end well."""
    words = ["serve", "--replicas", "2", "--port", "0", "--model", str(folder), "--precision", "fp32", "--threads", "1"]
    program = [sys.executable, "-c", "from specdec.cli import main; main()", *words]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if " at http" in line)
            client = Asking(line.split(" at ")[1].split("/v1")[0], patience=60)
            yield process, client
            client.http.close()
        finally:
            process.terminate()
    assert process.returncode in (0, -signal.SIGTERM)


@pytest.mark.slow
def test_replicas_come_and_go_under_load(tiny_folder: Path) -> None:
    """SIGTTIN adds one and SIGTTOU takes one away, down to one; no answer is wrong, and none is lost, streams neither."""

    def ready(client: Asking) -> list[str]:
        found = client.http.get("/health").json()["replicas"]
        return [replica["name"] for replica in found if replica["state"] == "ready"]

    with command(tiny_folder) as (process, client), under_load(client, 6) as clients:
        assert ready(client) == ["0", "1"]
        process.send_signal(signal.SIGTTIN)
        until(lambda: ready(client) == ["0", "1", "2"], 60)
        asked = client.metrics()["specdec:replica_asked_total{0}"]
        until(lambda: client.metrics().get("specdec:replica_asked_total{2}", 0) > 5, 60)
        for left in (["0", "1"], ["0"]):
            process.send_signal(signal.SIGTTOU)
            until(lambda left=left: ready(client) == left, 60)
        process.send_signal(signal.SIGTTOU)
        until(lambda: len(client.http.get("/health").json()["replicas"]) == 1, 60)
        until(lambda: client.metrics()["specdec:replica_asked_total{0}"] > asked + 10, 60)
    assert sum(one.failed for one in clients) == 0
