"""Finding, loading and typing the native library; which instruction set runs is decided here, once per process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("_native.so")
REBUILD = "run `python -m specdec.kernels.build` (it needs gcc or clang), or choose SPECDEC_KERNELS=torch"
ISAS = ("c", "avx2", "avx512", "amx")
"""Instruction sets, plainest first; the position is the bit in dispatch.c's masks."""
FULL_NAMES = {"c": "c", "avx2": "avx2", "avx512": "avx512-vnni", "amx": "amx-int8"}

POINTER, INT, LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
FLOAT, DOUBLE = ctypes.c_float, ctypes.c_double


class KernelError(RuntimeError):
    """The native library is missing, does not fit its sources, or cannot run here; the message says what to do."""


class Library:
    """The functions of one instruction set of a loaded library."""

    def __init__(self, path: Path, isa: str | None) -> None:
        """Load ``path``; ``isa`` forces an instruction set, None takes the best that this machine has.

        Raises:
            KernelError: no such library, or an instruction set that it was built without or the machine lacks.
        """
        if not path.exists():
            raise KernelError(f"the native kernels are not built ({path} is missing): {REBUILD}")
        self.handle = ctypes.CDLL(str(path))
        self.handle.specdec_sources.restype = ctypes.c_char_p
        self.handle.specdec_compiler.restype = ctypes.c_char_p
        usable = self.handle.specdec_built() & self.handle.specdec_supported()
        names = [name for bit, name in enumerate(ISAS) if usable >> bit & 1]
        if isa is not None and isa not in names:
            raise KernelError(f"SPECDEC_ISA={isa} cannot run here; this machine and this library share: {', '.join(names)}")
        self.isa = isa or names[-1]
        self.set_threads(torch.get_num_threads())
        self.compiler = str(self.handle.specdec_compiler().decode())
        self.sources = str(self.handle.specdec_sources().decode())

    @property
    def threads(self) -> int:
        """The most threads that a call may use; one setting for the whole process."""
        return int(self.handle.specdec_threads())

    def set_threads(self, n: int) -> None:
        self.handle.specdec_set_threads(n)

    def function(self, name: str, *arguments: type, returns: type | None = None) -> Callable[..., int]:
        """The kernel ``name`` of this instruction set, with its argument types set once (a call then costs about 1 us)."""
        function = self.handle[f"{name}_{self.isa}"]  # indexing gives a fresh object, so argument types are not shared
        function.argtypes, function.restype = arguments, returns
        return function


@cache
def load() -> Library:
    """The library of this installation, with the instruction set that ``SPECDEC_ISA`` names or the best one.

    Raises:
        KernelError: it is missing, was built from other sources, or lacks the instruction set.
    """
    from specdec.kernels.build import SOURCES, fingerprint  # not above: `python -m` would load the module twice

    library = Library(LIBRARY, os.environ.get("SPECDEC_ISA") or None)
    if SOURCES.is_dir() and library.sources != fingerprint():
        raise KernelError(f"the native kernels were built from other sources than those in {SOURCES}: {REBUILD}")
    return library
