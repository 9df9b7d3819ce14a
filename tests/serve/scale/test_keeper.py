"""Keepers and their owners: whichever of their processes dies, the replica is there again soon, and nothing is left behind."""

from __future__ import annotations

import asyncio
import functools
import os
import pickle
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from loading import HELD, load, load_once  # type: ignore[import-not-found]
from serving import until

from specdec.config import ConfigError, ServeConfig
from specdec.serve.scale.keeper import Errand, Sealed
from specdec.serve.scale.owner import Owner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENCE = 60.0
"""Several processes of Python start and end within it, on a machine however busy."""

ASKED = {"prompt": "abcabc", "max_tokens": 8, "temperature": 0.9, "seed": 7}


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the keepers' sockets; a path of a socket must be short. No process may be left that was told of one."""
    short = tempfile.mkdtemp(prefix="k")
    monkeypatch.setattr(tempfile, "tempdir", short)
    monkeypatch.setattr("specdec.serve.scale.owner.ANSWER_SECONDS", PATIENCE)  # a keeper that lives answers, however late
    yield Path(short) / f"specdec-{os.getuid()}"
    until(lambda: not keepers(short), PATIENCE)
    shutil.rmtree(short)


def keepers(folder: str | Path) -> list[psutil.Process]:
    """Processes that keep a replica whose owners connect in this folder."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if any(str(folder) in word for word in process.info["cmdline"] or ())]


def whole(owner: Owner) -> list[psutil.Process]:
    """The keeper that this one has started, and all that the keeper has."""
    assert owner.process
    keeper = psutil.Process(owner.process.pid)
    return [keeper, *keeper.children(recursive=True)]


def model(owner: Owner) -> psutil.Process:
    """The process that answers."""
    found = [process for process in whole(owner)[1:] if process.net_connections(kind="inet")]
    assert len(found) == 1
    return found[0]


def errand(loads: Callable[[], Any], linger: float = 30.0) -> Errand:
    return Errand(Sealed(pickle.dumps(loads)), ServeConfig(shutdown_seconds=1.0), uuid.uuid4().hex, linger)


@asynccontextmanager
async def owned(given: Errand, name: str = "a", place: str = "") -> AsyncIterator[Owner]:
    owner = Owner(given, name, place)
    await owner.start()
    try:
        yield owner
    finally:
        await owner.stop()


def die(owner: Owner) -> subprocess.Popen[bytes]:
    """End the connection without a word, as the end of its process does; returns the keeper that it has started."""
    assert owner._writer
    assert owner.process
    owner._writer.transport.abort()
    return owner.process


async def answer(owner: Owner) -> str:
    async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as client:
        response = await client.post(f"{owner.replica.url}/v1/completions", json=ASKED)
    text: str = response.json()["choices"][0]["text"]
    return text


async def gone(processes: list[psutil.Process]) -> None:
    """Wait until they have ended."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, PATIENCE)
    assert not alive


def test_a_replica_that_dies_is_there_again(tiny_folder: Path, tmp_path: Path) -> None:
    """In another process of the same keeper, with the same answers; its owner tells whoever waits. At the end all has ended."""
    folder = shutil.copytree(tiny_folder, tmp_path / "tiny")

    async def run() -> None:
        async with owned(errand(functools.partial(load, str(folder)))) as owner:
            expected, processes, died = await answer(owner), whole(owner), model(owner)
            (folder / HELD).touch()  # a new process takes less than a second otherwise
            died.kill()
            while owner.ready:
                await asyncio.sleep(0.01)
            await owner.until_ready(0.001)
            assert not owner.ready
            (folder / HELD).unlink()
            await owner.until_ready(PATIENCE)
            assert owner.replica.restarts == 1
            assert await answer(owner) == expected
            assert model(owner) != died
            owner.check()
        await gone([*processes, died])

    asyncio.run(run())


def test_the_next_owner_takes_over_what_one_leaves(tiny_folder: Path, sockets: Path) -> None:
    """The same process answers. Whoever has another errand or place, or comes while it is owned, gets a keeper of his own."""

    async def run() -> None:
        given = errand(functools.partial(load, str(tiny_folder)))
        first = Owner(given, "a")
        await first.start()
        processes, expected = whole(first), await answer(first)
        async with owned(given, "b") as second:
            assert second.process
            assert second.replica.url != first.replica.url
            left = die(first)
            async with owned(given, "c", place="another GPU") as stranger:
                assert stranger.process
        async with owned(given, "d") as next_one:
            assert next_one.process is None
            assert next_one.replica.url == first.replica.url
            assert (next_one.replica.name, next_one.replica.restarts) == ("d", 0)
            assert await answer(next_one) == expected
        assert await asyncio.to_thread(left.wait, PATIENCE) == 0
        await gone(processes)
        assert not list(sockets.iterdir())

    asyncio.run(run())


def test_a_keeper_that_nobody_owns_ends(tiny_folder: Path, sockets: Path) -> None:
    async def run() -> None:
        owner = Owner(errand(functools.partial(load, str(tiny_folder)), linger=0.2), "a")
        await owner.start()
        processes = whole(owner)
        assert await asyncio.to_thread(die(owner).wait, PATIENCE) == 0
        await gone(processes)
        assert not list(sockets.iterdir())

    asyncio.run(run())


def test_a_keeper_that_is_killed_takes_its_replica_along(tiny_folder: Path, sockets: Path) -> None:
    """Its owner then says that it is gone, and what it leaves of its socket stops nobody."""

    async def run() -> None:
        given = errand(functools.partial(load, str(tiny_folder)))
        async with owned(given) as owner:
            processes = whole(owner)
            processes[0].send_signal(signal.SIGKILL)
            await gone(processes[1:])
            with pytest.raises(RuntimeError, match="keeper is gone"):
                owner.check()
            assert not owner.ready
            await owner.until_ready(PATIENCE)  # returns at once: it will not come back
        (left,) = sockets.iterdir()
        async with owned(given):
            assert not left.exists()

    asyncio.run(run())


def test_a_replica_that_does_not_come_back_is_given_up(tiny_folder: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with owned(errand(functools.partial(load_once, str(tiny_folder), str(tmp_path / "loaded")))) as owner:
            model(owner).kill()
            for _ in range(3):
                owner.check()
                await asyncio.wait_for(owner._news.wait(), PATIENCE)
            while owner.replica.failures < 3:
                await asyncio.sleep(0.05)
            with pytest.raises(RuntimeError, match="could not be started 3 times in a row"):
                owner.check()

    asyncio.run(run())


def test_what_cannot_start_says_why(tiny_folder: Path, tmp_path: Path, sockets: Path) -> None:
    (tmp_path / "loaded").touch()

    async def run() -> None:
        with pytest.raises(ConfigError, match="the model is gone"):
            async with owned(errand(functools.partial(load_once, str(tiny_folder), str(tmp_path / "loaded")))):
                pass

    asyncio.run(run())
    until(lambda: not list(sockets.iterdir()), PATIENCE)


def test_a_folder_that_others_can_enter_is_refused(sockets: Path) -> None:
    """Whoever connects to a keeper owns it."""
    sockets.mkdir()
    sockets.chmod(0o755)
    with pytest.raises(ConfigError, match="only this user can enter"):
        asyncio.run(Owner(errand(dict), "a").start())


def test_a_socket_without_a_process_is_removed(sockets: Path) -> None:
    """As of a keeper that was killed while its owner died."""

    async def run() -> None:
        owner = Owner(errand(dict), "a")
        sockets.mkdir(mode=0o700)
        left = sockets / f"{owner._kind}-1"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(left))
        assert not await owner._take(left, 1.0)
        assert not left.exists()

    asyncio.run(run())
