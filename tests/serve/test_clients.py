"""Clients as people use them: OpenAI's own library unchanged, a WebSocket, and a tool that tries what OpenAPI allows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance
from serving import PATIENCE, ROUTES, Running, asking, held, joined, one_of, serving, strict
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from specdec.llm import LLM


def load(folder: Path, **how: object) -> LLM:
    return LLM(str(folder), precision="fp32", self_test=False, **how)


@pytest.fixture(scope="module")
def client(tiny_server: Running) -> Iterator[openai.OpenAI]:
    with tiny_server.openai() as client:
        yield client


def test_openai_chat(client: openai.OpenAI) -> None:
    """Whole and streamed, with log-probabilities and usage, into the library's own types."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "tick tock"}]
    how = {
        "model": "tiny",
        "messages": messages,
        "max_completion_tokens": 20,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**how)
    (choice,) = whole.choices
    assert choice.finish_reason in ("stop", "length")
    assert choice.message.role == "assistant"
    assert whole.usage.completion_tokens == len(choice.logprobs.content)
    chunks = list(client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == choice.message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    with client.chat.completions.stream(**how) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == choice.message.content


def test_openai_completions_and_models(client: openai.OpenAI) -> None:
    """The older route, further fields by extra_body, and the list of models."""
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == "tiny"
    answer = client.completions.create(
        model="tiny", prompt="tick tock", max_tokens=8, logprobs=1, seed=3, extra_body={"top_k": 5, "stats": True}
    )
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens
    assert answer.choices[0].stats["seed"] == 3
    pieces = client.completions.create(
        model="tiny", prompt="tick tock", max_tokens=8, seed=3, stream=True, extra_body={"top_k": 5}
    )
    assert "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text


def test_openai_errors(client: openai.OpenAI, tiny_folder: Path) -> None:
    """Each status becomes the library's own exception, with the message that says what is wrong."""
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "a"}])
    with serving(load(tiny_folder), api_keys=["k"]) as server:
        with server.openai() as known:
            assert known.models.list().data
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()


def test_openai_sees_a_stream_fail(tiny_folder: Path) -> None:
    """An error after the first chunk raises; it does not look like an end."""
    with serving(held(load(tiny_folder), 0.02), request_seconds=1.5) as server, server.openai() as client:
        stream = client.completions.create(
            model="", prompt="a", max_tokens=200, stream=True, extra_body={"ignore_eos": True, "model": None}
        )
        with pytest.raises(openai.APIError, match="longer than"):
            list(stream)


def frames(socket: ClientConnection) -> list[dict]:
    """The frames of one answer."""
    return [strict(message) for message in iter(lambda: socket.recv(timeout=PATIENCE), "[DONE]")]


def address(server: Running, route: str) -> str:
    return server.url.replace("http", "ws") + route


@pytest.mark.parametrize("route", ROUTES)
def test_a_websocket_says_the_same(tiny_server: Running, route: str) -> None:
    """One connection, several requests in order, the frames of the SSE stream; errors are frames, and the connection stays."""
    body = asking(route, "tick tock", max_tokens=12, temperature=0)
    whole = one_of(tiny_server.ask(route, **body))
    with connect(address(tiny_server, route)) as socket:
        for _ in range(2):
            socket.send(json.dumps(body))
            assert joined(frames(socket))[0] == whole
        socket.send("{")
        assert frames(socket)[0]["error"]["type"] == "invalid_request_error"
        socket.send(json.dumps({**body, "stream": False}))
        assert frames(socket)[0]["error"]["param"] == "stream"
        for seed in range(3):
            socket.send(json.dumps({**body, "seed": seed, "stream": True}))
        for _ in range(3):
            assert joined(frames(socket))[0] == whole


def send_all(socket: ClientConnection, messages: list[Any]) -> None:
    """Send, and read to the end; a server that closes may have done so before the last is sent."""
    for message in messages:
        socket.send(message)
    list(iter(socket.recv, None))


def test_a_websocket_that_closes(tiny_folder: Path) -> None:
    """Closing ends the answer at once; too many requests ahead, or bytes for text, close the connection."""
    with serving(held(load(tiny_folder), 0.03)) as server:
        body = json.dumps({"prompt": "a", "max_tokens": 200, "ignore_eos": True})
        with connect(address(server, ROUTES[0])) as socket:
            socket.send(body)
            socket.recv(timeout=PATIENCE)
        assert server.settled()["specdec:request_success_total{abort}"] == 1
        for messages, code in (([body] * 12, 1008), ([b"\0"], 1003)):
            with connect(address(server, ROUTES[0])) as socket:
                with pytest.raises(ConnectionClosed) as closed:
                    send_all(socket, messages)
                assert closed.value.rcvd.code == code
            server.settled()


def test_a_websocket_needs_the_key(tiny_folder: Path) -> None:
    """Refused before it is opened, with the error as a response."""
    with serving(load(tiny_folder), api_keys=["k"]) as server:
        with pytest.raises(InvalidStatus) as refused:
            connect(address(server, ROUTES[0]))
        assert refused.value.response.status_code == 401
        with connect(address(server, ROUTES[0]), additional_headers={"Authorization": "Bearer k"}) as socket:
            socket.send('{"prompt": "a", "max_tokens": 1}')
            assert len(frames(socket)) == 1


CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_what_the_document_allows(tiny_server: Running, mode: GenerationMode) -> None:
    """Generated requests, by the document and against it: no 5xx, and every answer and error in its documented shape."""
    document = tiny_server.http.get("/openapi.json").json()
    operations = [result.ok() for result in schemathesis.openapi.from_dict(document).get_all_operations()]
    assert len(operations) == 8
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and operation.method == "get" and "{" not in operation.path:
            continue  # nothing there can be wrong

        @settings(max_examples=8, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
        @given(case=operation.as_strategy(mode))
        def run(case: schemathesis.Case) -> None:
            case.call_and_validate(base_url=tiny_server.url, checks=CHECKS)

        run()
    assert tiny_server.http.get("/health").status_code == 200
    tiny_server.settled()
