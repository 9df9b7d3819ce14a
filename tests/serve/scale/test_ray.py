"""The Ray Serve application on a local cluster: one answer whoever gives it, and soon again after a death.

Skipped without Ray. Its processes take a while to start, so all of it is one test.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from loading import load  # type: ignore[import-not-found]
from scaled import cached, under_load  # type: ignore[import-not-found]
from serving import Asking, Running, joined, until

import specdec
from specdec.config import ServeConfig

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'specdec[ray]'")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

PASS_SECONDS = 0.02
HEALED_SECONDS = 10
"""From a death to full service, on a machine however busy."""


class Front(Asking):
    """A client of the application's front."""

    def engines(self) -> dict[str, tuple[float, float]]:
        """Of each engine that tells its figures, whether it takes requests, and how often its replica was started again."""
        figures = self.metrics()
        up, again = "specdec:replica_up", "specdec:replica_restarts_total"
        names = [name.removeprefix(up) for name in figures if name.startswith(up)]
        return {name: (figures[up + name], figures[again + name]) for name in names}

    def whole(self, n: int = 2) -> bool:
        """Do n engines take requests, and no others exist?"""
        engines = self.engines()
        return len(engines) == n and all(up for up, _ in engines.values())


@pytest.fixture(scope="module")
def front(tiny_folder: Path) -> Iterator[Front]:
    from ray import serve
    from ray.serve.config import AutoscalingConfig

    from specdec.serve.scale.ray_app import build

    paths = [str(Path(specdec.__file__).parents[1]), str(Path(__file__).parent), str(Path(__file__).parents[2])]
    given = {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported
        "RAY_AUTH_MODE": "disabled",  # nothing is written into the home folder
    }
    environment = pytest.MonkeyPatch()
    for name, value in given.items():  # for Ray's processes
        environment.setenv(name, value)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        serve.start(http_options={"port": port, "host": "127.0.0.1"})
        application = build(
            lambda: load(str(tiny_folder), PASS_SECONDS),  # goes by value, as what users write in their scripts
            ServeConfig(model_name="tiny"),
            scaling=AutoscalingConfig(
                min_replicas=2,
                max_replicas=3,
                target_ongoing_requests=2,
                metrics_interval_s=0.5,
                look_back_period_s=2,
                upscale_delay_s=3,
                downscale_delay_s=1,
            ),
        )
        serve.run(application, route_prefix="/")
        running = Front(f"http://127.0.0.1:{port}", patience=120)
        until(running.whole, 120)
        yield running
        running.http.close()
    finally:
        serve.shutdown()
        ray.shutdown()
        environment.undo()


def of_this(what: str) -> list[psutil.Process]:
    """Processes that this one has started, with all of these words in their commands."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            line = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        if all(word in line for word in what.split()):
            found.append(process)
    return found


def model_of(keeper: psutil.Process) -> psutil.Process:
    """The process that answers."""
    return next(process for process in keeper.children(recursive=True) if process.net_connections(kind="inet"))


def test_the_application(front: Front, tiny_server: Running) -> None:
    """Answers, streams and errors as those of one server; shared prefixes where they live. Then, under load, processes with a
    model are killed, and an actor, and are there again in time; more clients get one engine more until they go. At the end
    nothing is left."""
    from ray import serve

    body = {"prompt": "abcabc", "max_tokens": 24, "temperature": 0.9, "seed": 7, "return_token_ids": True}
    expected = tiny_server.ask(**body)["choices"][0]
    assert front.ask(**body)["choices"] == [expected]
    assert joined(front.stream(**body))[0]["token_ids"] == expected["token_ids"]
    assert front.refused(prompt="a", temperature=-1)["param"] == "temperature"
    assert front.http.get("/").status_code == 200

    two, one = (cached(to, turns=5) for to in (front, tiny_server))
    assert two / one >= 0.9, (two, one)

    keepers = of_this("scale.keeper")
    assert len(keepers) == 2
    processes = [*keepers, *(process for keeper in keepers for process in keeper.children(recursive=True))]
    victims = {
        "a model": lambda: [model_of(keepers[0])],
        "both models": lambda: [model_of(keeper) for keeper in keepers],  # requests wait for one of them
        "an actor": lambda: of_this("ServeReplica Engine")[:1],
    }
    for kind, find in victims.items():
        with under_load(front, 4):
            before = front.engines()
            for process in find():
                process.kill()
            killed = time.monotonic()
            until(lambda before=before: front.engines() != before and front.whole(), 100)
            seconds = time.monotonic() - killed
            print(f"{kind} killed: two engines again after {seconds:.1f} s")
            assert seconds < HEALED_SECONDS
        if kind == "both models":
            assert sorted(again for _, again in front.engines().values()) == [1, 2]
    assert all(keeper.is_running() for keeper in keepers)  # one has lost its actor, and has another one now

    with under_load(front, 12) as clients:
        until(lambda: front.whole(3), 100)
        for client in clients[2:]:
            client.over.set()
        until(front.whole, 100)
    processes += of_this("scale.keeper")
    serve.shutdown()
    _, alive = psutil.wait_procs(processes, 20)
    assert not alive
