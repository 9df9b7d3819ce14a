"""The tensors of a folder whichever of the usual files hold them: safetensors, or what torch.save wrote."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from specdec.models.checkpoint import open_shard, tensor_files
from specdec.models.errors import ModelError

PICKLES: Final = ("pytorch_model.bin", "medusa_lm_head.pt")
"""What trained drafters that are not published as safetensors are called."""

_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8)


class TensorFolder:
    """Named tensors, read one at a time.

    Raises:
        ModelError: there is no file of weights, one is damaged, or one holds more than tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._files: dict[str, Path] = {}
        self._values: dict[str, Tensor] = {}
        pickles = [folder / name for name in PICKLES if (folder / name).is_file()]
        if pickles and not any(folder.glob("*.safetensors")):
            self._values = _unpickle(pickles[0])
        else:
            self._files = tensor_files(folder)
        self.names = frozenset(self._files or self._values)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor as the file holds it, on the CPU.

        Raises:
            ModelError: it is not there, or of a type that no drafter has.
        """
        if name not in self.names:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        value = self._values.get(name)
        if value is None:
            with open_shard(self._files[name]) as file:
                value = file.get_tensor(name).clone()
        if value.dtype not in _TYPES:
            raise ModelError(f"{self.path}: tensor {name} has type {value.dtype}, which is not supported")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.names))


def _unpickle(path: Path) -> dict[str, Tensor]:
    try:
        values: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ModelError(f"{path} holds more than tensors, and reading that could run code: it was not read") from error
    except (OSError, RuntimeError, EOFError) as error:
        raise ModelError(f"{path} cannot be read ({str(error).splitlines()[0]}); fetch it again") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) and isinstance(x, Tensor) for name, x in values.items()):
        raise ModelError(f"{path} is not a table of named tensors")
    return values
