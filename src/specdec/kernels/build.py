"""Compile the native library: every kernel file once per instruction set, all of them in one shared object.

Run by ``pip install`` (through setup.py, which loads this file by its path) and by hand after a change of the C sources::

    python -m specdec.kernels.build

Only the standard library is imported here, because neither torch nor the package exists yet while it is being installed.
Nothing compiles at run time by itself.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = Path(__file__).parent / "_native.so"

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"]
X86_FLAGS = {"avx2": AVX2, "avx512": AVX512, "amx": [*AVX512, "-mamx-tile", "-mamx-int8"]}
BITS = {"c": 1, "avx2": 2, "avx512": 4, "amx": 8}
"""Instruction sets as dispatch.c numbers them."""

# -ffp-contract=off: only the fma's that the sources write may fuse, or the instruction sets would differ in last bits.
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-pthread",
    "-Wall",
    "-Wextra",
]


ONCE = ("dispatch.c", "threads.c")
"""Sources without arithmetic, compiled once for all instruction sets."""


class BuildError(RuntimeError):
    """There is no compiler, or it refused the sources; the message holds its words."""


def fingerprint() -> str:
    """A hash of the C sources and flags, so that a library that was built from others is recognised."""
    digest = hashlib.sha256(repr((FLAGS, X86_FLAGS)).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> list[str]:
    """The C compiler's command: ``CC`` if that is set, else the first that is there of Python's own, cc, gcc and clang."""
    named = os.environ.get("CC")
    commands = [named] if named else [sysconfig.get_config_var("CC"), "cc", "gcc", "clang"]
    for command in commands:
        if command and shutil.which(shlex.split(command)[0]):
            return shlex.split(command)
    raise BuildError(f"no C compiler found (tried {', '.join(filter(None, commands))}): install gcc or clang, or set CC")


def instruction_sets(cc: list[str]) -> dict[str, list[str]]:
    """Instruction set -> its flags, for this machine's kind and for what the compiler knows of it."""
    x86 = X86_FLAGS if platform.machine().lower() in ("x86_64", "amd64") else {}
    known = {isa: flags for isa, flags in x86.items() if _accepts(cc, flags)}
    return {"c": []} | known


def _accepts(cc: list[str], flags: list[str]) -> bool:
    command = [*cc, *flags, "-fsyntax-only", "-x", "c", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def build(target: Path, extra: list[str] | None = None, only: dict[str, list[str]] | None = None) -> Path:
    """Compile and link the library.

    Args:
        target: the shared object to write; replaced in one step, so that a running process keeps the one it has.
        extra: further compiler flags.
        only: instruction sets and their flags, instead of all of this machine's.

    Raises:
        BuildError: no compiler, or an error in it.
    """
    cc = compiler()
    sets = only or instruction_sets(cc)
    flags = FLAGS + (extra or [])
    built = sum(BITS[isa] for isa in sets)
    with tempfile.TemporaryDirectory() as folder:
        jobs: list[tuple[Path, list[str], Path]] = []
        for source in sorted(SOURCES.glob("*.c")):
            if source.name in ONCE:
                defines = [f"-DSPECDEC_BUILT={built}", f'-DSPECDEC_SOURCES="{fingerprint()}"']
                jobs.append((source, defines, Path(folder, f"{source.stem}.o")))
                continue
            jobs += [
                (source, [f"-DSPECDEC_ISA={isa}", *own], Path(folder, f"{source.stem}_{isa}.o")) for isa, own in sets.items()
            ]

        def compile_one(job: tuple[Path, list[str], Path]) -> None:
            source, own, object_file = job
            run([*cc, *flags, *own, "-c", str(source), "-o", str(object_file)])

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, jobs))
        target.parent.mkdir(parents=True, exist_ok=True)
        linked = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            run([*cc, *flags, "-shared", *(str(job[2]) for job in jobs), "-o", str(linked), "-lm"])
            linked.replace(target)
        finally:
            linked.unlink(missing_ok=True)
    return target


def run(command: list[str]) -> None:
    """Run the compiler; its complaint becomes the error's message."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\n{done.stderr.strip()}")


if __name__ == "__main__":
    sys.stdout.write(f"built {build(LIBRARY)}\n")
