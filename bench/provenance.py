"""Where a result comes from: written into every result file."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import specdec


def provenance() -> dict[str, Any]:
    """Commit, command, versions and machine."""
    cpu = next(
        (line.split(":")[1].strip() for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "command": " ".join(["python", *(Path(word).name if word.startswith("/") else word for word in sys.argv)]),
        "specdec": specdec.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu,
        "threads": torch.get_num_threads(),
    }


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return done.stdout.strip()
