"""A model in a folder in Hugging Face's layout: config.json and one or more safetensors files, read tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.models.architecture import from_config
from specdec.models.errors import ModelError
from specdec.models.keys import Keys, token_ids
from specdec.models.tokenizer_files import read_settings, token_text
from specdec.models.weights import Blocks, Weights

INDEX: Final = "model.safetensors.index.json"
HEAD: Final = "lm_head.weight"
EMBEDDING: Final = "model.embed_tokens.weight"

_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class CheckpointWeights(Weights):
    """The weights of a folder. Nothing stays mapped: each tensor is read, converted and let go.

    A model with ``tie_word_embeddings`` may bring an output matrix of its own if that equals the embedding; one that
    differs is an error, because the two settings contradict each other. A model without it must bring one.
    """

    def __init__(self, folder: Path) -> None:
        config = folder / "config.json"
        architecture = from_config(read_json(config), config)
        self.files = tensor_files(folder)
        super().__init__(folder, architecture, {name for name in self.files if not name.endswith("rotary_emb.inv_freq")})
        if architecture.tied and HEAD in self.files:
            self.used.add(HEAD)
            if not torch.equal(self._read(HEAD), self._read(EMBEDDING)):
                raise ModelError(
                    f"{self.files[HEAD]}: {HEAD} differs from {EMBEDDING} although {config} says tie_word_embeddings; "
                    "set that to false if the model has an output matrix of its own"
                )

    def vector(self, name: str, size: int) -> Tensor:
        return self._checked(name, (size,))

    def matrix(self, name: str, rows: int, columns: int) -> Tensor | Blocks:
        return self._checked(name, (rows, columns))

    def _checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        value = self._read(name)
        self.use(name, tuple(value.shape), shape)
        return value

    def _read(self, name: str) -> Tensor:
        """A tensor as float32, in memory of its own."""
        if name not in self.files:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        with open_shard(self.files[name]) as file:
            value: Tensor = file.get_tensor(name)
            if value.dtype not in _FLOATS:
                raise ModelError(f"{self.files[name]}: tensor {name} has type {value.dtype}; float types are supported")
            return value.to(torch.float32, copy=True)


def end_tokens(folder: Path) -> frozenset[int]:
    """End tokens named by config.json, generation_config.json and the tokenizer's own files."""
    found: frozenset[int] = frozenset()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            found |= token_ids(Keys(read_json(folder / name), folder / name), "eos_token_id")
    return found | _tokenizer_end(folder)


def _tokenizer_end(folder: Path) -> frozenset[int]:
    """The id of tokenizer_config.json's eos_token, looked up among the tokenizer's added and ordinary tokens."""
    if not (folder / "tokenizer_config.json").exists() or not (folder / "tokenizer.json").exists():
        return frozenset()
    text = token_text(read_settings(folder / "tokenizer_config.json").get("eos_token"))
    if text is None:
        return frozenset()
    path = folder / "tokenizer.json"
    tokenizer = read_json(path)
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or ()}
    vocab = (tokenizer.get("model") or {}).get("vocab")
    ordinary = vocab if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab or ())}
    found = added.get(text, ordinary.get(text))
    if found is None:
        raise ModelError(f"{path} has no token {text!r}, which {folder / 'tokenizer_config.json'} calls the end token")
    return frozenset((found,))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; an error names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def open_shard(path: Path) -> Any:
    """Open a safetensors file; a damaged or shortened one is an error that names it."""
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; fetch the model again") from None
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged or cut short ({error}); fetch it again") from None


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it, by what the files themselves say."""
    index = folder / INDEX
    promised: dict[str, str] = {}
    if index.exists():
        promised = read_json(index).get("weight_map") or {}
        if not isinstance(promised, dict) or not promised or not all(isinstance(name, str) for name in promised.values()):
            raise ModelError(f"{index} lacks its weight_map, from tensors to file names")
        shards = [folder / name for name in sorted(set(promised.values()))]
    elif (folder / "model.safetensors").exists():
        shards = [folder / "model.safetensors"]
    else:
        shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ModelError(f"{folder} holds no .safetensors file; other formats of weights are not read")
    files: dict[str, Path] = {}
    for shard in shards:
        with open_shard(shard) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in files:
                    raise ModelError(f"tensor {name} is in both {files[name]} and {shard}")
                files[name] = shard
    for name, shard_name in promised.items():
        if name not in files:
            raise ModelError(f"{folder / shard_name} lacks tensor {name}, which {index} places there")
    return files
