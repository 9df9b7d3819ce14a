"""The native kernels in every form that can run here: each instruction set, AVX-512 and AMX by emulation, and torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
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
    """AVX-512 or AMX with the intrinsics emulated, whatever this machine can run. Of the two only block products differ
    (tiles.h), so all else is compiled once, for AMX, and is AVX-512's too.

    Args:
        folder: where the libraries are, or are to be made.
    """

    def __init__(self, folder: Path, isa: str) -> None:
        self.isa = isa
        self._all_else = None if isa == "amx" else Emulated(folder, "amx")
        path = folder / f"{isa}_emulated.so"
        if not path.exists():
            flags, isa_flags = ["-Og", "-w", f'-DSPECDEC_INTRINSICS="{EMULATOR}"'], build.X86_FLAGS["avx2"]
            if isa == "amx":
                build.build(path, flags, {isa: isa_flags})
            else:
                sources = [str(build.SOURCES / name) for name in ("blocks.c", "threads.c")]
                command = [*build.compiler(), *build.FLAGS, *flags, *isa_flags, f"-DSPECDEC_ISA={isa}", "-shared"]
                build.run([*command, *sources, "-o", str(path), "-lm"])
        self.handle = ctypes.CDLL(str(path))

    def function(self, name: str, *arguments: type, returns: type | None = None) -> Callable[..., int]:
        if self._all_else and name != "block_linear":
            return self._all_else.function(name, *arguments, returns=returns)
        return super().function(name, *arguments, returns=returns)

    def counter(self, name: str) -> int:
        """Of the emulated tiles: ``holders``, threads that hold some now, or ``products`` so far."""
        return ctypes.c_int.in_dll(self.handle, f"emulated_{name}").value
