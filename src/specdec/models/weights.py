"""A model's weights, whatever file holds them: one tensor at a time, under Hugging Face's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from specdec.models.architecture import Architecture
from specdec.models.errors import ModelError
from specdec.quant.blocks import GgufKind


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix [N, K] as GGUF encodes it, bit for bit."""

    kind: GgufKind
    raw: Tensor
    """uint8 [N, bytes of a row]"""


class Weights(ABC):
    """Named tensors of one model. A tensor that is missing, or of another shape, is an error that names it and its file."""

    def __init__(self, path: Path, architecture: Architecture, names: set[str]) -> None:
        self.path = path
        self.architecture = architecture
        self.names = names
        """Everything that the files hold, under the files' own names."""
        self.used: set[str] = set()

    @abstractmethod
    def vector(self, name: str, size: int) -> Tensor:
        """[size] float32"""

    @abstractmethod
    def matrix(self, name: str, rows: int, columns: int) -> Tensor | Blocks:
        """[rows, columns]: blocks where the file holds blocks that the kernels take, float32 otherwise."""

    def use(self, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        """Note that a tensor of the file was taken, and check its shape."""
        if found != expected:
            raise ModelError(f"{self.path}: tensor {name} has shape {list(found)}, the model needs {list(expected)}")
        self.used.add(name)

    def check_all_used(self) -> None:
        """Raise where the files hold a tensor that the model did not take: it would be something that is not computed."""
        if unused := sorted(self.names - self.used):
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise ModelError(
                f"{self.path} holds tensor {unused[0]}{more}, for which a {self.architecture.family} model has no place: "
                "the file is damaged, or a variant that is not supported"
            )
