"""Where a result comes from: written into every result file."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import specdec
from specdec.runner.measure import cpu_name


def provenance(**more: Any) -> dict[str, Any]:
    """Commit, command, versions and machine, and ``more``; file names only, no paths of this machine."""
    inside = _ours()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD") if inside else None,
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")) if inside else None,
        "command": command(sys.argv),
        "specdec": specdec.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        **more,
    }


def command(argv: list[str]) -> str:
    """A command line as one would type it, without the folders of absolute paths."""
    program, *words = argv
    start = ["python", _without_folder(program)] if program.endswith(".py") else [Path(program).name]
    return shlex.join([*start, *map(_without_folder, words)])


def model_name(name: str) -> str:
    """What a model was asked for as, without the folders of an absolute path."""
    return Path(name).name if Path(name).is_absolute() else name


def _without_folder(word: str) -> str:
    """``/a/b.json`` and ``--json=/a/b.json`` lose their folder."""
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    return option + equals + (Path(value).name if Path(value).is_absolute() else value)


def _ours() -> bool:
    """Is this file part of a git checkout, and not installed into a folder that happens to lie in somebody's?"""
    return bool(_git("ls-files", Path(__file__).name))


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    except OSError:  # there is no git
        return ""
    return done.stdout.strip()
