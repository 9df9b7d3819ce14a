"""The Ray Serve application on a local cluster: one answer whoever gives it.

Skipped without Ray. Its processes take a while to start, so all of it is one test.
"""

from __future__ import annotations

import functools
import os
import signal
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


class Front(Asking):
    """A client of the application's front."""

    def engines(self) -> set[str]:
        """The engines that tell their figures."""
        return {name for name in self.metrics() if name.startswith("specdec:generation_tokens_total")}


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
            functools.partial(load, str(tiny_folder), PASS_SECONDS),
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
        until(lambda: len(running.engines()) == 2, 120)
        yield running
        running.http.close()
    finally:
        serve.shutdown()
        ray.shutdown()
        environment.undo()


def engine_processes() -> list[psutil.Process]:
    """The actors of engines among the processes that this one has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "ServeReplica" in (line := " ".join(process.cmdline())) and "Engine" in line:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def test_the_application(front: Front, tiny_server: Running) -> None:
    """Answers, streams and errors as those of one server; shared prefixes where they live; then under load a killed engine is
    replaced, and more clients get one engine more until they go."""
    body = {"prompt": "abcabc", "max_tokens": 24, "temperature": 0.9, "seed": 7, "return_token_ids": True}
    expected = tiny_server.ask(**body)["choices"][0]
    assert front.ask(**body)["choices"] == [expected]
    assert joined(front.stream(**body))[0]["token_ids"] == expected["token_ids"]
    assert front.refused(prompt="a", temperature=-1)["param"] == "temperature"
    assert front.http.get("/").status_code == 200

    two, one = (cached(to, turns=5) for to in (front, tiny_server))
    assert two / one >= 0.9, (two, one)

    with under_load(front, 4):
        before = front.engines()
        os.kill(engine_processes()[0].pid, signal.SIGKILL)
        killed = time.monotonic()
        until(lambda: len(now := front.engines()) == 2 and now != before, 100)
        print(f"two engines again after {time.monotonic() - killed:.1f} s")
    with under_load(front, 12) as clients:
        until(lambda: len(front.engines()) == 3, 100)
        for client in clients[2:]:
            client.over.set()
        until(lambda: len(front.engines()) == 2, 100)
