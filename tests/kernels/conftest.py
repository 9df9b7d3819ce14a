"""Emulated instruction sets: compiling one takes longer than all that is asked of it, so modules share them."""

from __future__ import annotations

import pytest
from native import NATIVE, SIMDE, Emulated


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory):
    """The library of an instruction set, ``avx512`` or ``amx``; of these only block products differ."""
    if not SIMDE.exists() or not NATIVE:
        pytest.skip("needs SIMDe (libsimde-dev) and the native kernels")
    built: dict[str, Emulated] = {}

    def library(isa: str) -> Emulated:
        if isa not in built:
            built[isa] = Emulated(tmp_path_factory.mktemp("emulated"), isa)
        return built[isa]

    return library
