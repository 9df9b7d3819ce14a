"""The router before replicas that answer, refuse and die as told: no process, no port."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Collection
from typing import Any

import httpx
import pytest
from serving import error_of, frames_of
from starlette.testclient import TestClient, WebSocketDenialResponse

from specdec.config import ServeConfig
from specdec.serve.errors import ApiError
from specdec.serve.scale.replicas import Asked, BrokenOff, NoReplica
from specdec.serve.scale.router import TRIES, Router

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json"), (b"content-length", b"999"), (b"x-kept", b"yes")]
FRAMES = [b'data: {"a": 1}\n\n', b'data: {"a": 2}\n\n', b"data: [DONE]\n\n"]


class Scripted:
    """An answer: its parts, and whether it breaks off behind them."""

    def __init__(self, replica: str, status: int, headers: Any, parts: list[bytes], *, dies: bool = False) -> None:
        self.replica: str | None = replica
        self.status, self.headers, self.parts, self.dies = status, headers, parts, dies
        self.closed = 0

    async def chunks(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            yield part
        if self.dies:
            raise BrokenOff(self.replica)

    async def close(self) -> None:
        self.closed += 1


class Script:
    """Gives its answers one after the other; None is a replica that is gone at once."""

    def __init__(self, *answers: Scripted | None) -> None:
        self.answers = list(answers)
        self.given = list(answers)
        self.asked: list[Asked] = []
        self.avoided: list[set[str]] = []

    async def ask(self, asked: Asked, avoid: Collection[str]) -> Scripted:
        self.asked.append(asked)
        self.avoided.append(set(avoid))
        if not self.answers:
            raise NoReplica
        answer = self.answers.pop(0)
        if answer is None:
            raise BrokenOff(f"gone {len(self.asked)}")
        return answer

    def health(self) -> tuple[bool, dict[str, Any]]:
        return bool(self.answers), {"replicas": []}

    async def metrics(self) -> bytes:
        return b"specdec:x 1\n"


def through(script: Script, method: str = "POST", path: str = "/v1/completions", **request: Any) -> httpx.Response:
    """What a client gets; every answer that was opened must have been closed once."""
    router = Router(script, ServeConfig(max_body_bytes=2000))

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(router), base_url="http://test") as client:
            return await client.request(method, path, **request)

    response = asyncio.run(run())
    opened = script.given[: len(script.given) - len(script.answers)]
    assert all(answer.closed == 1 for answer in opened if answer)
    return response


def test_an_answer_goes_through() -> None:
    """Status, body and headers; those of the connection are its own."""
    script = Script(Scripted("a", 200, JSON, [b'{"x":', b"1}"]))
    response = through(script, json={"prompt": "p", "seed": 3}, headers={"authorization": "Bearer k"})
    assert (response.status_code, response.json(), response.headers["content-length"]) == (200, {"x": 1}, "7")
    assert response.headers["x-kept"] == "yes"
    assert json.loads(script.asked[0].body) == {"prompt": "p", "seed": 3}
    assert (b"authorization", b"Bearer k") in script.asked[0].headers
    assert script.asked[0].keys


def test_a_whole_answer_is_asked_again_wherever_it_breaks() -> None:
    """Before it, and in the middle of it, with the same seed each time, and never of the same replica."""
    script = Script(None, Scripted("b", 200, JSON, [b'{"x"'], dies=True), Scripted("c", 200, JSON, [b"{}"]))
    response = through(script, json={"prompt": "p"})
    assert (response.status_code, response.json()) == (200, {})
    assert len({asked.body for asked in script.asked}) == 1
    assert isinstance(json.loads(script.asked[0].body)["seed"], int)
    assert script.avoided == [set(), {"gone 1"}, {"gone 1", "b"}]


@pytest.mark.parametrize("cut", [b"", b'data: {"a"'])
def test_a_stream_that_nothing_was_sent_of_is_asked_again(cut: bytes) -> None:
    """Half a frame counts for nothing."""
    script = Script(Scripted("a", 200, EVENTS, [cut], dies=True), Scripted("b", 200, EVENTS, FRAMES))
    assert through(script, json={"prompt": "p"}).content == b"".join(FRAMES)


@pytest.mark.parametrize("at", range(len(FRAMES[0]) + 1))
def test_a_stream_that_breaks_off_ends_with_an_error_after_whole_frames(at: int) -> None:
    parts = [FRAMES[0], FRAMES[1][:at]]
    script = Script(Scripted("a", 200, EVENTS, parts, dies=True), Scripted("b", 200, EVENTS, FRAMES))
    response = through(script, json={"prompt": "p"})
    *frames, last = frames_of(response.content)
    assert frames == [{"a": 1}, {"a": 2}][: 1 + (at == len(FRAMES[1]))]
    assert last["error"]["code"] == "replica_gone"
    assert len(script.answers) == 1, "half a stream must not be followed by another's"


def test_frames_go_on_as_they_come_whole() -> None:
    """However the bytes arrive."""
    data = b"".join(FRAMES)
    script = Script(Scripted("a", 200, EVENTS, [data[i : i + 1] for i in range(len(data))]))
    assert through(script, json={"prompt": "p"}).content == data


def test_who_is_full_or_stops_is_passed_over() -> None:
    busy = [Scripted(name, status, JSON, [b'{"error":1}']) for name, status in (("a", 429), ("b", 503))]
    script = Script(*busy, Scripted("c", 200, JSON, [b"{}"]))
    assert through(script, json={"prompt": "p"}).status_code == 200
    last = Scripted("b", 429, JSON, [b'{"error":2}'])
    response = through(Script(Scripted("a", 503, JSON, [b"{}"]), last), json={"prompt": "p"})
    assert (response.status_code, response.json()) == (429, {"error": 2})


def test_without_anybody_there_is_a_proper_error() -> None:
    for script in (Script(), Script(None, None), Script(*[None] * 20)):
        response = through(script, json={"prompt": "p"})
        assert (response.status_code, error_of(response)["code"]) == (503, "no_replica")
        assert len(script.asked) <= TRIES
    assert through(Script(), "GET", "/health").status_code == 503
    assert through(Script(None), "GET", "/health").json()["status"] == "ok"


@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff", b"", b"[" * 1500, b'{"prompt": "p", "seed": "x"}'])
def test_what_is_no_body_goes_to_a_replica_as_it_is(body: bytes) -> None:
    """The replica says what is wrong with it."""
    script = Script(Scripted("a", 400, JSON, [b"{}"]))
    assert through(script, content=body).status_code == 400
    assert script.asked[0].body == body


def test_a_body_that_is_too_large_goes_nowhere() -> None:
    script = Script(Scripted("a", 200, JSON, [b"{}"]))
    assert error_of(through(script, content=b"x" * 2001))["code"] == "body_too_large"
    assert script.asked == []


def test_a_client_that_goes_ends_what_was_asked() -> None:
    """Also while nothing has come yet."""

    class Slow(Scripted):
        async def chunks(self) -> AsyncIterator[bytes]:
            await asyncio.sleep(60)
            yield b""

    answer = Slow("a", 200, JSON, [])
    router = Router(Script(answer), ServeConfig())
    messages = [{"type": "http.request", "body": b'{"prompt": "p"}', "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError(f"nobody is there for {message}")

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [],
        "server": ("t", 1),
    }
    asyncio.run(asyncio.wait_for(router({**scope, "scheme": "http", "root_path": ""}, receive, send), 5))
    assert answer.closed == 1


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Facts of the requests whose accounts ended."""
    return [record.facts for record in caplog.records if record.getMessage() == "request ended"]  # type: ignore[attr-defined]


def test_what_the_router_refuses_is_told_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """As what replicas refuse is; what they refuse themselves only they tell of."""
    caplog.set_level(logging.INFO, "specdec")
    router = Router(Script(Scripted("a", 400, JSON, [b"{}"])), ServeConfig(max_body_bytes=2000))
    client = TestClient(router)
    assert client.post("/v1/completions", content=b"{").status_code == 400
    assert told(caplog) == []
    large = client.post("/v1/completions", content=b"x" * 2001, headers={"x-request-id": "mine"})
    unanswered = client.post("/v1/chat/completions", content=b"{}", headers={"x-request-id": "not one"})
    assert (large.status_code, unanswered.status_code) == (413, 503)
    router.closing = True
    assert client.get("/health").status_code == 503
    first, second = told(caplog)
    assert first.pop("seconds") >= 0
    assert first == {
        "request_id": "mine",
        "route": "/v1/completions",
        "status": 413,
        "error": error_of(large)["message"],
        "code": "body_too_large",
    }
    assert large.headers["x-request-id"] == "mine"
    assert unanswered.headers["x-request-id"] == second["request_id"] != "not one"
    assert (second["route"], second["code"]) == ("/v1/chat/completions", "no_replica")
    text = client.get("/metrics").text
    assert "specdec:x 1\n" in text
    assert 'specdec:router_requests_refused_total{status="413"} 1.0' in text
    assert 'specdec:router_requests_refused_total{status="503"} 2.0' in text


def test_refusals_through_a_websocket_are_told_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Of the connection, and of each message on one."""
    caplog.set_level(logging.INFO, "specdec")
    models = Scripted("a", 200, JSON, [b"{}"])
    router = Router(Script(models), ServeConfig())
    client = TestClient(router)
    with client.websocket_connect("/v1/completions", headers={"x-request-id": "mine"}) as socket:
        for _ in range(2):
            socket.send_text('{"prompt": "p"}')
            assert json.loads(socket.receive_text())["error"]["code"] == "no_replica"
            assert socket.receive_text() == "[DONE]"
    with pytest.raises(WebSocketDenialResponse), client.websocket_connect("/v1/nothing"):
        pass
    facts = told(caplog)
    assert [one["request_id"] for one in facts[:2]] == ["mine-1", "mine-2"]
    assert [(one["route"], one["status"]) for one in facts[2:]] == [("/v1/nothing", 404)]
    assert router.refused == {503: 2, 404: 1}


def test_a_stream_whose_replica_dies_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The replica cannot; so the router says what its client was told, under the name by which the replica had it. One that is
    asked again in time is told by who answers it."""
    caplog.set_level(logging.INFO, "specdec")
    script = Script(Scripted("a", 200, EVENTS, [], dies=True), Scripted("b", 200, EVENTS, FRAMES[:1], dies=True))
    assert frames_of(through(script, json={"prompt": "p"}).content)[-1]["error"]["code"] == "replica_gone"
    (facts,) = told(caplog)
    assert (facts["status"], facts["code"], facts["route"]) == (200, "replica_gone", "/v1/completions")
    assert [name_of(asked) for asked in script.asked] == [facts["request_id"]] * 2


def test_a_message_whose_replica_dies_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """As a stream is; the next one on its connection is answered, and told by its replica."""
    caplog.set_level(logging.INFO, "specdec")
    answers = (Scripted("b", 200, EVENTS, FRAMES[:1], dies=True), Scripted("c", 200, EVENTS, FRAMES))
    script = Script(Scripted("a", 200, JSON, [b"{}"]), *answers)
    router = Router(script, ServeConfig())
    with TestClient(router).websocket_connect("/v1/completions", headers={"x-request-id": "i" * 128}) as socket:
        socket.send_text('{"prompt": "p"}')
        frames = [socket.receive_text() for _ in range(3)]
        assert (json.loads(frames[1])["error"]["code"], frames[2]) == ("replica_gone", "[DONE]")
        socket.send_text('{"prompt": "p"}')
        assert [socket.receive_text() for _ in FRAMES][-1] == "[DONE]"
    (facts,) = told(caplog)
    assert (facts["request_id"], facts["code"]) == ("i" * 126 + "-1", "replica_gone")
    assert "status" not in facts, "a message has no response of its own"
    assert [name_of(asked) for asked in script.asked] == ["i" * 128, "i" * 126 + "-1", "i" * 126 + "-2"]
    assert router.refused == {}


def test_a_websocket_that_a_replica_denies_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """By the router, since its replica was only asked for a list of models; the denial is the replica's, and counted there."""
    caplog.set_level(logging.INFO, "specdec")
    script = Script(Scripted("a", 401, JSON, [json.dumps(ApiError(401, "no key", code="missing_api_key").body).encode()]))
    router = Router(script, ServeConfig())
    with pytest.raises(WebSocketDenialResponse) as denied, TestClient(router).websocket_connect("/v1/completions"):
        pass
    assert (denied.value.status_code, error_of(denied.value)["code"]) == (401, "missing_api_key")
    (facts,) = told(caplog)
    assert facts.pop("seconds") >= 0
    assert facts == {
        "request_id": name_of(script.asked[0]),
        "route": "/v1/completions",
        "status": 401,
        "error": "no key",
        "code": "missing_api_key",
    }
    assert router.refused == {}


def name_of(asked: Asked) -> str:
    """By which a replica tells of it."""
    (name,) = (value.decode() for header, value in asked.headers if header == b"x-request-id")
    return name
