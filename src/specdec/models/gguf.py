"""GGUF files: metadata and tensors, read one at a time.

The ``gguf`` library's own reader keeps one numpy array per string of the vocabulary, which takes seconds and 170 MB for a
vocabulary of 50,000; this one reads the header in a tenth of a second and each tensor straight into memory of its own, so
that no mapped page outlives its use. The library still supplies the types that are not named here, and dequantisation;
importing it takes a sixth of a second, which a file of the usual types need not spend.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specdec.models.errors import ModelError

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_DIMENSIONS: Final = 4
_MAX_NESTING: Final = 8
"""Arrays within arrays; no known file has any."""
_VERSIONS: Final = (2, 3)
_USUAL: Final = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}
"""Types by their number in the file: name, weights of a block, bytes of a block."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in its file."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in torch (GGUF itself writes the fastest dimension first)."""
    type: str
    """GGUF's name of it, such as Q4_1."""
    offset: int
    """Bytes from the start of the file."""
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed header, and the way to the tensors behind it."""

    path: Path
    metadata: dict[str, Any]
    """Numbers, strings, bools, and lists of them."""
    tensors: dict[str, TensorInfo]

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, [rows, bytes per row] (a vector is one row), copied out of the file."""
        info = self.info(name)
        with self.path.open("rb") as file:
            data = np.fromfile(file, dtype=np.uint8, count=info.n_bytes, offset=info.offset)
        if data.size != info.n_bytes:
            raise ModelError(f"{self.path}: tensor {name} ends {info.n_bytes - data.size} bytes after the end of the file")
        return data.reshape(prod(info.shape[:-1]), -1)

    def values(self, name: str) -> NDArray[np.float32]:
        """A tensor as float32, whatever its type."""
        info, raw = self.info(name), self.raw(name)
        if info.type == "F32":
            return raw.view("<f4").astype(np.float32, copy=False).reshape(info.shape)
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            values = dequantize(raw, GGMLQuantizationType[info.type])
        except NotImplementedError:
            raise ModelError(f"{self.path}: tensor {name} has type {info.type}, which cannot be dequantised here") from None
        return np.ascontiguousarray(values, dtype=np.float32).reshape(info.shape)

    def info(self, name: str) -> TensorInfo:
        """Where a tensor lies; an error that names it where there is none."""
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelError(f"{self.path}: tensor {name} is missing") from None


class _Cursor:
    """A position in a header that grows by what is read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        data, start = self.data, self.at + 8
        end: int = start + int.from_bytes(data[self.at : start], "little")
        if end > len(data):
            raise EOFError
        self.at = end
        return data[start:end].decode()

    def strings(self, count: int) -> list[str]:
        """Many of them: a vocabulary and its merges are a hundred thousand."""
        data, at, length_of, found = self.data, self.at, struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            start = at + 8
            at = start + length_of(data, at)[0]
            if at > len(data):
                raise EOFError
            found.append(data[start:at].decode())
        self.at = at
        return found

    def value(self, kind: int, depth: int) -> Any:
        """A value inside ``depth`` arrays."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(depth + 1)
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} is unknown")
        return self.scalar(_SCALARS[kind])

    def array(self, depth: int) -> list[Any]:
        if depth > _MAX_NESTING:
            raise ValueError(f"arrays are nested more than {_MAX_NESTING} deep")
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > len(self.data):
            raise EOFError
        if kind == _STRING:
            return self.strings(count)
        if kind not in _SCALARS:
            return [self.value(kind, depth) for _ in range(count)]
        values = np.frombuffer(self.data, dtype="<" + _SCALARS[kind], count=count, offset=self.at)
        self.at += values.nbytes
        return list(values.tolist())


def read(path: Path) -> GgufFile:
    """Parse the header of a GGUF file.

    Raises:
        ModelError: the file is not GGUF, is damaged or cut short, or holds a tensor of unknown type; the message says which.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        if size < 24 or file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            where = "the header"
            try:
                cursor.at = 4
                if (version := cursor.scalar("I")) not in _VERSIONS:
                    raise ModelError(
                        f"{path} is GGUF version {version}; versions {_VERSIONS} in little-endian order can be read"
                    )
                n_tensors, n_keys = cursor.scalar("Q"), cursor.scalar("Q")
                metadata: dict[str, Any] = {}
                for _ in range(n_keys):
                    where = f"the metadata after {next(reversed(metadata), 'the start')}"
                    key = cursor.string()
                    where = f"the metadata of {key}"
                    metadata[key] = cursor.value(cursor.scalar("I"), 0)
                infos = []
                for i in range(n_tensors):
                    where = f"the description of tensor {i} of {n_tensors}"
                    infos.append(_tensor_header(cursor))
            except (EOFError, struct.error):
                raise ModelError(f"{path} is cut short in {where}; fetch it again") from None
            except (ValueError, UnicodeDecodeError) as error:
                raise ModelError(f"{path} is damaged in {where}: {error}") from None
            start = cursor.at
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{path}: general.alignment must be a whole number above 0, got {alignment!r}")
    start += -start % alignment
    tensors = {name: _place(path, name, shape, kind, start + offset, size) for name, shape, kind, offset in infos}
    return GgufFile(path, metadata, tensors)


def _tensor_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    n_dimensions = cursor.scalar("I")
    if not 1 <= n_dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"{name} has {n_dimensions} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(n_dimensions))[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _place(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, size: int) -> TensorInfo:
    try:
        type_, per_block, block_bytes = _USUAL.get(kind) or _seldom(kind)
    except ValueError:
        raise ModelError(f"{path}: tensor {name} has the unknown type {kind}") from None
    if shape[-1] % per_block:
        raise ModelError(f"{path}: tensor {name} has rows of {shape[-1]}, not a multiple of the {per_block} of {type_}")
    n_bytes = prod(shape) // per_block * block_bytes
    if offset + n_bytes > size:
        raise ModelError(f"{path} is cut short: tensor {name} ends at byte {offset + n_bytes} of {size}; fetch it again")
    return TensorInfo(name, shape, type_, offset, n_bytes)


def _seldom(kind: int) -> tuple[str, int, int]:
    """A type that only the library knows; ValueError where it does not either."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    type_ = GGMLQuantizationType(kind)
    return (type_.name, *GGML_QUANT_SIZES[type_])
