"""Emulated instruction sets: compiling one takes longer than all that is asked of it, so all tests of a run share them."""

from __future__ import annotations

import fcntl
import os

import pytest
from native import NATIVE, SIMDE, Emulated


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory):
    """The library of an instruction set, ``avx512`` or ``amx``."""
    if not SIMDE.exists() or not NATIVE:
        pytest.skip("needs SIMDe (libsimde-dev) and the native kernels")
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # of all processes of this run
    built: dict[str, Emulated] = {}

    def library(isa: str) -> Emulated:
        if isa not in built:
            with (folder / "emulated.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                built[isa] = Emulated(folder, isa)
        return built[isa]

    return library
