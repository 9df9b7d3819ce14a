"""The native kernels in every form that can run here: each instruction set, AVX-512 and AMX by emulation, and torch."""

from __future__ import annotations

import ctypes
from pathlib import Path

from specdec.kernels import build
from specdec.kernels.cpu import NativeKernels
from specdec.kernels.library import ISAS, LIBRARY, KernelError, Library
from specdec.kernels.portable import PortableKernels

EMULATOR = Path(__file__).with_name("avx512_emulated.h")
SIMDE = Path("/usr/include/simde/x86/avx512.h")


def native() -> list[NativeKernels]:
    """One per instruction set that this machine can run, plainest first; none where the library is not built."""
    found = []
    for isa in ISAS:
        try:
            found.append(NativeKernels(Library(LIBRARY, isa)))
        except KernelError:
            continue
    return found


NATIVE = native()
ALL = [*NATIVE, PortableKernels()]
FAST = ALL[len(NATIVE) - 1]
"""The best that this machine has."""


class Emulated(Library):
    """The AVX-512 or AMX objects with the intrinsics emulated, whatever this machine can run."""

    def __init__(self, folder: Path, isa: str) -> None:
        flags = ["-Og", "-w", f'-DSPECDEC_INTRINSICS="{EMULATOR}"']
        path = build.build(folder / f"{isa}_emulated.so", flags, {isa: build.X86_FLAGS["avx2"]})
        self.handle = ctypes.CDLL(str(path))
        self.isa = isa

    def counter(self, name: str) -> int:
        """Of the emulated tiles: ``holders``, threads that hold some now, or ``products`` so far."""
        return ctypes.c_int.in_dll(self.handle, f"emulated_{name}").value
