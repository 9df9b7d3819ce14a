"""The program from its first moment on: Ctrl-C while its libraries are imported, and afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import tiny


@pytest.mark.parametrize("library", ["typer", "torch"])
def test_interrupting_an_import_ends_at_once(tmp_path: Path, library: str) -> None:
    """No traceback of modules that are half there, and nobody who swallows it."""
    (tmp_path / f"{library}.py").write_text(
        "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: pass"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "specdec", "info", "/nowhere"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_the_program_catches_interrupts_once_its_libraries_are_there(tmp_path: Path) -> None:
    """From then on it is one's own exit code, after things have been put in order."""
    code = (
        "import signal, sys, specdec.__main__; from specdec.llm import LLM\n"
        "def press(*_, **__): signal.raise_signal(signal.SIGINT)\n"
        "LLM._join = press\n"
        f"sys.argv = ['specdec', 'info', {str(tiny(tmp_path))!r}, '--precision', 'fp32']; specdec.__main__.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\n")
