"""The engines that are compared: what each one is called, needs and reads, and where its environment lies."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
UNAVAILABLE = "unavailable.txt"
"""Beside an environment that could not be made: why."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    name: str
    title: str
    """As it is called in results."""
    reads_gguf: bool
    """Otherwise it reads the exported folder."""
    own_environment: bool = True
    layout: str | None = None
    """Of the GGUF file's 4-bit blocks, where its products over several rows are fast in another one than the file's."""

    @property
    def script(self) -> Path:
        return HERE / f"{self.name}_peer.py"

    @property
    def requirements(self) -> Path:
        return HERE / "requirements" / f"{self.name}.txt"

    @property
    def environment(self) -> Path:
        return peers_folder() / self.name

    @property
    def python(self) -> Path:
        """Its interpreter; specdec's own is the one that runs the comparison."""
        return self.environment / "bin" / "python" if self.own_environment else Path(sys.executable)


ENGINES = {
    kind.name: kind
    for kind in (
        EngineKind("specdec", "specdec", reads_gguf=True, own_environment=False),
        EngineKind("llama_cpp", "llama.cpp", reads_gguf=True, layout="Q4_0"),
        EngineKind("openvino", "OpenVINO GenAI", reads_gguf=True),
        EngineKind("transformers", "transformers", reads_gguf=False),
        EngineKind("vllm", "vLLM", reads_gguf=False),
    )
}


def peers_folder() -> Path:
    """Where environments, exported models and logs lie: ``SPECDEC_PEERS`` if set, else ``.peers`` in the repository."""
    folder = os.environ.get("SPECDEC_PEERS")
    return Path(folder).expanduser() if folder else ROOT / ".peers"


def missing(kind: EngineKind) -> str | None:
    """Why an engine cannot be started, or None where it is installed."""
    reason = kind.environment / UNAVAILABLE
    if kind.own_environment and reason.is_file():
        return reason.read_text(encoding="utf-8").strip()
    if not kind.python.exists():
        return f'not installed: run make peers ENGINES="{kind.name}"'
    return None
