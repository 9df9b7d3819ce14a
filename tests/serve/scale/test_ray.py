"""The Ray Serve application on a local cluster: one answer whoever gives it, prefixes kept together, a killed engine replaced.

Skipped without Ray. Its processes take a while to start, so all of it is one test.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from loading import load  # type: ignore[import-not-found]
from prometheus_client.parser import text_string_to_metric_families
from scaled import Client  # type: ignore[import-not-found]
from serving import Running, error_of, frames_of, joined, until

from specdec.config import ServeConfig

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'specdec[ray]'")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

PORT = 8127
PASS_SECONDS = 0.02


class Front:
    """The application's front, with the face that test clients know."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=120)

    def ask(self, **body: Any) -> dict[str, Any]:
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def engines(self) -> set[str]:
        """The names of the engines that tell their figures."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return {
            s.labels["replica"] for family in families if family.name == "specdec:generation_tokens" for s in family.samples
        }


@pytest.fixture(scope="module")
def front(tiny_folder: Path) -> Iterator[Front]:
    from ray import serve
    from ray.serve.config import AutoscalingConfig

    from specdec.serve.scale.ray_app import build

    paths = os.pathsep.join(str(Path(file).parent) for file in (__file__, Path(__file__).parents[1] / "serving.py"))
    source = str(Path(__import__("specdec").__file__).parents[1])
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([source, paths]), "OMP_NUM_THREADS": "1"}}
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_AUTH_MODE", "disabled")):
        os.environ[name] = value  # nothing is reported, and nothing is written into the home folder
    ray.init(num_cpus=4, include_dashboard=False, runtime_env=environment, log_to_driver=False)
    try:
        serve.start(http_options={"port": PORT, "host": "127.0.0.1"})
        application = build(
            functools.partial(load, str(tiny_folder), PASS_SECONDS),
            ServeConfig(model_name="tiny"),
            scaling=AutoscalingConfig(min_replicas=2, max_replicas=2),
        )
        serve.run(application, route_prefix="/")
        running = Front(f"http://127.0.0.1:{PORT}")
        until(lambda: len(running.engines()) == 2, 120)
        yield running
        running.http.close()
    finally:
        serve.shutdown()
        ray.shutdown()


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


def test_the_application_on_two_engines(front: Front, tiny_server: Running) -> None:
    body = {"prompt": "abcabc", "max_tokens": 24, "temperature": 0.9, "seed": 7, "return_token_ids": True}
    expected = tiny_server.ask(**body)["choices"][0]
    assert front.ask(**body)["choices"] == [expected]
    with front.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert joined(frames_of(b"".join(response.iter_raw())))[0]["token_ids"] == expected["token_ids"]
    refused = front.http.post("/v1/completions", json={"prompt": "a", "temperature": -1})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "temperature")
    assert front.http.get("/").status_code == 200

    hits = []
    for to in (front, tiny_server):
        cached = 0
        for turn in range(5):
            for family in "PQRST":
                prompt = f"{family}: " + f"{family.lower()} shared beginning " * 8 + f"and turn {turn}"
                answer = to.ask(prompt=prompt, max_tokens=2, temperature=0, cache_salt="hits")
                cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        hits.append(cached)
    assert hits[0] / hits[1] >= 0.9, hits

    bodies = [{"prompt": f"{i} abcabc", "max_tokens": 30, "temperature": 0.8, "seed": i, "ignore_eos": True} for i in range(12)]
    for one in bodies:
        one["expected"] = front.ask(**one)["choices"][0]["text"]
    before = front.engines()
    stop = threading.Event()
    clients = [Client(front.url, bodies[i:] + bodies[:i], stop, stream=i % 2 == 0) for i in range(6)]
    for client in clients:
        client.start()
    time.sleep(2)
    victim = engine_processes()[0]
    os.kill(victim.pid, signal.SIGKILL)
    killed = time.monotonic()
    until(lambda: len(now := front.engines()) == 2 and now != before, 200)
    healed = time.monotonic() - killed
    stop.set()
    for client in clients:
        client.join(100)
        assert not client.is_alive(), "a client hangs"
    broken, right = sum(client.failed for client in clients), sum(client.right for client in clients)
    print(f"two engines again after {healed:.1f} s; {broken} streams broken off, {right} right answers")
    assert [client.wrong for client in clients if client.wrong] == []
    assert all(client.right for client in clients)
    assert sum(client.failed for client in clients if not client.stream) == 0
