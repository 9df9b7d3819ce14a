"""Replicas behind the router: the same answers as one server, prefixes kept together, and a death that costs no answer."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from loading import HELD  # type: ignore[import-not-found]
from prometheus_client.parser import text_string_to_metric_families
from scaled import Scaled, cached, scaled, under_load  # type: ignore[import-not-found]
from serving import PATIENCE, Running, error_of, frames_of, joined, until
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PASS_SECONDS = 0.01
"""Slow enough that answers are under way when a replica dies."""


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, for these replicas alone."""
    return shutil.copytree(tiny_folder, tmp_path_factory.mktemp("replicas") / "tiny")


@pytest.fixture(scope="module")
def router(folder: Path) -> Iterator[Scaled]:
    with scaled(folder, 2, PASS_SECONDS, model_name="tiny") as running:
        yield running


def test_answers_are_those_of_one_server(router: Scaled, tiny_server: Running) -> None:
    """Whole, streamed and over a WebSocket; errors too; the playground and the documents come through."""
    body = {"prompt": "abcabc", "max_tokens": 24, "temperature": 0.9, "seed": 7, "return_token_ids": True}
    expected = tiny_server.ask(**body)["choices"][0]
    assert router.ask(**body)["choices"] == [expected]
    assert joined(router.stream(**body))[0]["token_ids"] == expected["token_ids"]
    with connect(router.url.replace("http", "ws") + "/v1/completions", proxy=None) as socket:
        for message in (body, {**body, "seed": 8}):
            socket.send(json.dumps(message))
        first = list(iter(socket.recv, "[DONE]"))
        second = list(iter(socket.recv, "[DONE]"))
    assert joined([json.loads(frame) for frame in first])[0]["token_ids"] == expected["token_ids"]
    assert joined([json.loads(frame) for frame in second])[0]["token_ids"] != expected["token_ids"]
    for wrong in ({"prompt": "a", "temperature": -1}, {"prompt": "a", "nonsense": 1}, {}):
        ours, theirs = (to.http.post("/v1/completions", json=wrong) for to in (router, tiny_server))
        assert ours.status_code == theirs.status_code == 400
        assert error_of(ours) == error_of(theirs)
    assert router.http.post("/v1/completions", content=b"{").status_code == 400
    for path in ("/", "/static/page.js", "/openapi.json", "/v1/models"):
        assert router.http.get(path).status_code == 200
    assert router.http.get("/nowhere").status_code == 404


def test_a_request_without_a_seed_gets_one(router: Scaled) -> None:
    """So a second try elsewhere gives the same text; it is reported as ever."""
    body = {"prompt": "abc", "max_tokens": 8, "temperature": 1.0, "stats": True}
    for more in ({}, {"seed": None}):
        choice = router.ask(**body, **more)["choices"][0]
        assert router.ask(**body, seed=choice["stats"]["seed"])["choices"][0]["text"] == choice["text"]


def test_shared_prefixes_hit_as_with_one_server(router: Scaled, tiny_server: Running) -> None:
    """Families of prompts in turns: two replicas find nearly as many cached tokens as one server, and both have work."""
    two, one = (cached(to, turns=8) for to in (router, tiny_server))
    assert one > 0
    assert two / one >= 0.9, (two, one)
    asked = router.server.replicas.asked
    assert min(asked.values()) > 0.2 * max(asked.values()), f"one replica does all the work: {asked}"


def test_a_client_that_goes_ends_its_request(router: Scaled) -> None:
    """Streamed or not, the replica frees what it held."""
    for stream in (True, False):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{router.url}/v1/completions",
                json={"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": stream},
                timeout=0.2 if not stream else httpx.Timeout(5, read=0.005),
            )
    running = [f"specdec:num_requests_running{{{replica}}}" for replica in (0, 1)]
    until(lambda: not any(router.metrics()[name] for name in running) and not any(r["running"] for r in router.replicas()))


def test_figures_carry_the_name_of_the_replica(router: Scaled) -> None:
    """One metric of each name, samples of every replica in it, and what the router knows itself."""
    text = router.http.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    by_name = {family.name: family for family in families}
    assert {sample.labels["replica"] for sample in by_name["specdec:generation_tokens"].samples} == {"0", "1"}
    assert [sample.value for sample in by_name["specdec:replica_up"].samples] == [1, 1]
    asked = {sample.labels["replica"]: sample.value for sample in by_name["specdec:replica_asked"].samples}
    assert sum(asked.values()) > 0


def test_a_replica_that_is_killed_costs_no_client_its_answer(router: Scaled, caplog: pytest.LogCaptureFixture) -> None:
    """Whole answers are asked again elsewhere, and both replicas work again as soon as a process can have started."""
    caplog.set_level(logging.INFO, "specdec")
    with under_load(router, 8) as clients:
        until(lambda: all(replica["running"] for replica in router.replicas()))
        restarts = router.replicas()[0]["restarts"]
        os.kill(router.process(0).pid, signal.SIGKILL)
        killed = time.monotonic()
        until(lambda: router.replicas()[0]["restarts"] > restarts and router.whole(), 60)
        healed = time.monotonic() - killed
        right = sum(client.right for client in clients)
        until(lambda: sum(client.right for client in clients) > right)
    (took,) = (record.args[1] for record in caplog.records if "is ready after" in record.msg)  # type: ignore[index]
    print(f"whole again after {healed:.1f} s, of which its process took {took:.1f} s to start")
    assert router.server.router.retries > 0
    assert healed - took <= 5


def test_without_any_replica_clients_are_told(router: Scaled, folder: Path) -> None:
    """503 in the API's own shape while nobody can answer; afterwards all is well again."""
    (folder / HELD).touch()  # a new process takes less than a second otherwise
    for at in (0, 1):
        os.kill(router.process(at).pid, signal.SIGKILL)
    until(lambda: router.http.get("/health").status_code == 503)
    response = router.http.post("/v1/completions", json={"prompt": "a"})
    assert (response.status_code, error_of(response)["code"]) == (503, "no_replica")
    (folder / HELD).unlink()
    until(lambda: router.http.get("/health").status_code == 200 and router.whole(), 90)
    router.ask(prompt="abc", max_tokens=2)


def test_a_silent_replica_is_replaced(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is alive but answers nothing any more; what it was working on is asked elsewhere. Keys hold at the router, and
    so do the origins of web pages."""
    monkeypatch.setattr("specdec.serve.scale.supervisor.SILENCE", 2)
    told: dict[str, Any] = {"api_keys": ("sesame",), "allowed_origins": ("*",), "shutdown_seconds": PATIENCE}
    with scaled(tiny_folder, 2, PASS_SECONDS, **told) as router:
        refused = router.http.get("/v1/models", headers={"Origin": "https://page.example"})
        assert refused.status_code == 401
        assert refused.headers.get_list("access-control-allow-origin") == ["*"]
        with pytest.raises(InvalidStatus), connect(router.url.replace("http", "ws") + "/v1/completions", proxy=None):
            pass
        router.http.headers["Authorization"] = "Bearer sesame"
        os.kill(router.process(0).pid, signal.SIGSTOP)
        answers = [router.ask(prompt=f"{i}", max_tokens=2)["choices"] for i in range(4)]
        assert len(answers) == 4
        until(lambda: router.replicas()[0]["restarts"] > 0 and router.whole(), 90)
        # The end of the server: what runs goes on for the time that it has, and new requests are refused.
        body = {"prompt": "abc", "max_tokens": 30, "ignore_eos": True, "seed": 1}
        with router.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            router.server.should_exit = True
            assert "error" not in frames_of(b"".join(response.iter_raw()))[-1]
