"""Builds the native kernels with the system's compiler; everything else about the package is in pyproject.toml.

Without a compiler the installation succeeds, says what is lost, and the kernels run in torch.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/specdec/kernels")


def builder() -> ModuleType:
    """specdec/kernels/build.py by its path: neither torch nor the package is there while it is being installed."""
    spec = importlib.util.spec_from_file_location("specdec_kernels_build", FOLDER / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildKernels(build_ext):
    """Hands the whole job to specdec/kernels/build.py; the result is a plain shared library, not a Python extension."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        build = builder()
        try:
            build.build(Path(self.get_ext_fullpath(ext.name)))
        except build.BuildError as error:
            sys.stderr.write(
                f"\n{error}\n\nspecdec is installed WITHOUT its native kernels: it works, but runs in plain torch, many times "
                "slower.\nInstall gcc or clang and install again, or run: python -m specdec.kernels.build\n\n"
            )


class PlatformWheel(bdist_wheel):
    """The library depends on the platform but not on Python's version or ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("specdec.kernels._native", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
