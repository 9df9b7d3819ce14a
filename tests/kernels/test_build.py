"""Building, finding and choosing the native library, and what is said where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from native import FAST, NATIVE

from specdec import kernels
from specdec.kernels import build, library
from specdec.kernels.library import FULL_NAMES, ISAS, LIBRARY, KernelError, Library

built = pytest.mark.skipif(not NATIVE, reason="the native kernels are not built")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No choice is made by the environment, and a library that an earlier test loaded is forgotten."""
    monkeypatch.delenv("SPECDEC_KERNELS", raising=False)
    monkeypatch.delenv("SPECDEC_ISA", raising=False)
    library.load.cache_clear()


@built
def test_native_kernels_are_chosen_on_the_cpu() -> None:
    assert kernels.select("cpu").name == FAST.name
    assert FAST.name in kernels.describe("cpu")


@built
@pytest.mark.parametrize("isa", ISAS)
def test_an_instruction_set_can_be_forced(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that the machine lacks is an error, not another one in silence."""
    monkeypatch.setenv("SPECDEC_ISA", isa)
    if FULL_NAMES[isa] in [n.name for n in NATIVE]:
        assert kernels.select("cpu").name == FULL_NAMES[isa]
    else:
        with pytest.raises(KernelError, match=f"SPECDEC_ISA={isa} cannot run here"):
            kernels.select("cpu")


def test_torch_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_KERNELS", "torch")
    assert kernels.select("cpu").name == "torch"
    assert "SPECDEC_KERNELS=torch" in kernels.describe("cpu")


def test_an_unknown_choice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_KERNELS", "fast")
    with pytest.raises(KernelError, match="auto, native, torch"):
        kernels.select("cpu")


def test_a_missing_library_is_said_and_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Portable kernels run, and the log says why and what to do."""
    monkeypatch.setattr(kernels, "LIBRARY", tmp_path / "absent.so")
    assert kernels.select("cpu").name == "torch"
    assert "specdec.kernels.build" in caplog.text
    assert "not built" in kernels.describe("cpu")


def test_a_missing_library_is_an_error_where_native_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "LIBRARY", tmp_path / "absent.so")
    monkeypatch.setenv("SPECDEC_KERNELS", "native")
    with pytest.raises(KernelError, match=r"python -m specdec\.kernels\.build"):
        kernels.select("cpu")


def test_other_devices_get_portable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.select("meta").name == "torch"
    monkeypatch.setenv("SPECDEC_KERNELS", "native")
    with pytest.raises(KernelError, match="meta"):
        kernels.select("meta")


@built
def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An edited kernel that was not rebuilt would compute something else than the sources say."""
    monkeypatch.setattr(build, "fingerprint", lambda: "another")
    with pytest.raises(KernelError, match="other sources"):
        kernels.select("cpu")


def test_no_compiler_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(build.BuildError, match="install gcc or clang"):
        build.build(tmp_path / "native.so")
    assert not list(tmp_path.iterdir())


def test_a_refused_source_shows_the_compilers_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "broken.c").write_text("int f(void) { return missing; }\n")
    monkeypatch.setattr(build, "SOURCES", folder)
    try:
        build.compiler()
    except build.BuildError:
        pytest.skip("no C compiler here")
    with pytest.raises(build.BuildError, match="missing"):
        build.build(tmp_path / "native.so", [], {"c": []})
    assert not (tmp_path / "native.so").exists()


def test_installation_without_a_compiler_succeeds_and_says_what_is_lost(tmp_path: Path) -> None:
    """setup.py's build step: no library, no failure, a message."""
    root = Path(__file__).parents[2]
    if not (root / "setup.py").exists():
        pytest.skip("only in a checkout")
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        str(tmp_path / "lib"),
        "--build-temp",
        str(tmp_path),
    ]
    environment = {**os.environ, "CC": "no-such-compiler"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WITHOUT its native kernels" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


@built
def test_a_library_that_is_not_there_names_its_path(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"nowhere\.so"):
        Library(tmp_path / "nowhere.so", None)
    assert LIBRARY.exists()
