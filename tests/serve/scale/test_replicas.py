"""Replicas behind the router: the same answers as one server, prefixes kept together, and a death that costs no answer."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from scaled import Client, Scaled, scaled  # type: ignore[import-not-found]
from serving import Running, error_of, frames_of, joined, until
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PASS_SECONDS = 0.01
"""Slow enough that answers are under way when a replica dies."""


@pytest.fixture(scope="module")
def router(tiny_folder: Path) -> Iterator[Scaled]:
    with scaled(tiny_folder, 2, PASS_SECONDS, model_name="tiny") as running:
        yield running


def test_answers_are_those_of_one_server(router: Scaled, tiny_server: Running) -> None:
    """Whole, streamed and over a WebSocket; errors too; the playground and the documents come through."""
    body = {"prompt": "abcabc", "max_tokens": 24, "temperature": 0.9, "seed": 7, "return_token_ids": True}
    expected = tiny_server.ask(**body)["choices"][0]
    assert router.ask(**body)["choices"] == [expected]
    with router.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        data = b"".join(response.iter_raw())
    assert joined(frames_of(data))[0]["token_ids"] == expected["token_ids"]
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
    """At least 0.9 of the cached tokens that one server has, over five families of prompts in mixed order."""
    hits = []
    for to in (router, tiny_server):
        cached = 0
        for turn in range(8):
            for family in "PQRST":
                prompt = f"{family}: " + f"{family.lower()} shared beginning " * 8 + f"and turn {turn}"
                answer = to.ask(prompt=prompt, max_tokens=2, temperature=0, cache_salt="hits")
                cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        hits.append(cached)
    assert hits[1] > 0
    assert hits[0] / hits[1] >= 0.9, hits
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
    until(lambda: total(router, "specdec:num_requests_running") == 0 and not any(r["running"] for r in router.replicas()), 10)


def total(router: Scaled, name: str) -> float:
    found = text_string_to_metric_families(router.http.get("/metrics").text)
    values = [sample.value for family in found for sample in family.samples if sample.name == name]
    assert values, f"there is no {name}"
    return sum(values)


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


def test_a_replica_that_is_killed_costs_no_client_its_answer(router: Scaled) -> None:
    """Under load: every answer that ends well is the right one, every other a proper error, nobody hangs; and at the end
    both replicas work again. Whole answers are asked again elsewhere, so none of them fails."""
    bodies = [{"prompt": f"{i} abcabc", "max_tokens": 30, "temperature": 0.8, "seed": i, "ignore_eos": True} for i in range(12)]
    for body in bodies:
        body["expected"] = router.ask(**body)["choices"][0]["text"]
    stop = threading.Event()
    clients = [Client(router.url, bodies[i:] + bodies[:i], stop, stream=i % 2 == 0) for i in range(8)]
    for client in clients:
        client.start()
    until(lambda: all(replica["running"] for replica in router.replicas()), 20)
    restarts = router.replicas()[0]["restarts"]
    os.kill(router.process(0).pid, signal.SIGKILL)
    killed = time.monotonic()
    until(lambda: router.replicas()[0]["restarts"] > restarts and router.whole(), 60)
    healed = time.monotonic() - killed
    time.sleep(1)
    stop.set()
    for client in clients:
        client.join(60)
        assert not client.is_alive(), "a client hangs"
    assert [client.wrong for client in clients if client.wrong] == []
    assert all(client.right for client in clients)
    assert sum(client.failed for client in clients if not client.stream) == 0
    assert router.server.router.retries > 0
    broken, right = sum(client.failed for client in clients), sum(client.right for client in clients)
    print(f"whole again after {healed:.1f} s; {broken} streams broken off, {right} right answers")
    assert healed <= 10


def test_without_any_replica_clients_are_told(router: Scaled) -> None:
    """503 in the API's own shape while nobody can answer; afterwards all is well again."""
    for at in (0, 1):
        os.kill(router.process(at).pid, signal.SIGKILL)
    until(lambda: router.http.get("/health").status_code == 503, 5)
    response = router.http.post("/v1/completions", json={"prompt": "a"})
    assert (response.status_code, error_of(response)["code"]) == (503, "no_replica")
    until(lambda: router.http.get("/health").status_code == 200 and router.whole(), 90)
    router.ask(prompt="abc", max_tokens=2)


def test_a_silent_replica_is_replaced(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is alive but answers nothing any more; what it was working on is asked elsewhere. Keys hold at the router."""
    monkeypatch.setattr("specdec.serve.scale.supervisor.SILENCE", 2)
    with scaled(tiny_folder, 2, PASS_SECONDS, api_keys=("sesame",)) as router:
        assert router.http.get("/v1/models").status_code == 401
        with pytest.raises(InvalidStatus), connect(router.url.replace("http", "ws") + "/v1/completions", proxy=None):
            pass
        router.http.headers["Authorization"] = "Bearer sesame"
        os.kill(router.process(0).pid, signal.SIGSTOP)
        answers = [router.ask(prompt=f"{i}", max_tokens=2)["choices"] for i in range(4)]
        assert len(answers) == 4
        until(lambda: router.replicas()[0]["restarts"] == 1 and router.whole(), 90)
        # The end of the server: what runs goes on for the time that it has, and new requests are refused.
        body = {"prompt": "abc", "max_tokens": 30, "ignore_eos": True, "seed": 1}
        with router.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            router.server.should_exit = True
            assert "error" not in frames_of(b"".join(response.iter_raw()))[-1]
