"""What is refused, with which status and words; that it is refused before anything runs; and that the next request is fine."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from serving import PATIENCE, ROUTES, Running, asking, error_of, held, one_of, serving, until

from specdec.llm import LLM
from specdec.serve.schema import NOT_SERVED

pytestmark = pytest.mark.usefixtures("still_alive")

CONTEXT = 64


@pytest.fixture(scope="module")
def small(tiny_folder) -> Iterator[Running]:
    """A context of 64 tokens, drafts of 8."""
    with serving(LLM(str(tiny_folder), precision="fp32", self_test=False, max_len=CONTEXT)) as running:
        yield running


@pytest.mark.parametrize("limit", [None, 100])
def test_prompts_around_the_context(small: Running, limit: int | None) -> None:
    """C22: 63 tokens are answered, with the one that there is room for; 64 are refused, naming both numbers."""
    for length in range(55, 67):
        body = {"prompt": [97] * length, "max_tokens": limit, "temperature": 0, "ignore_eos": True}
        if length < CONTEXT:
            answer = small.ask(**body)
            assert answer["usage"]["total_tokens"] == CONTEXT
            assert answer["choices"][0]["finish_reason"] == "length"
        else:
            error = small.refused(**body)
            assert str(length) in error["message"]
            assert str(CONTEXT) in error["message"]
            assert error["code"] == "context_length_exceeded"


def test_huge_limits(small: Running) -> None:
    """C100: a limit beyond the context ends at the context; an over-long prompt is told with both numbers."""
    for limit in (10_000, 1_000_000_000, 2**63):
        answer = small.ask(prompt=[97] * 10, max_tokens=limit, temperature=0, ignore_eos=True)
        assert answer["usage"]["total_tokens"] == CONTEXT
    for limit in (None, 5):
        error = small.refused(prompt=[97] * 300, max_tokens=limit)
        assert "300" in error["message"]
        assert str(CONTEXT) in error["message"]


def test_more_than_the_pool_holds(tiny_folder: Path) -> None:
    """C28: a pool that could not hold the context does not start; within one, the large request ends and the next is served."""
    with pytest.raises(ValueError, match="cannot hold a sequence of 256"):
        LLM(str(tiny_folder), precision="fp32", self_test=False, kv_tokens=128)
    llm = LLM(str(tiny_folder), precision="fp32", self_test=False, kv_tokens=128, max_len=128)
    with serving(llm) as server:
        assert server.refused(prompt=[97] * 130)["code"] == "context_length_exceeded"
        answer = server.ask(prompt=[97] * 120, max_tokens=100, temperature=0, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 8
        assert server.ask(prompt=[97] * 5, max_tokens=2)["usage"]["prompt_tokens"] == 5
        server.settled()


LIMITS = [
    (None, 200), (0, 400), (-1, 400), (10**9, 200), (2**63, 200), ("5", 400), (5.0, 400), (2.5, 400), (5, 200), (True, 400),
]  # fmt: skip


@pytest.mark.parametrize(("value", "status"), LIMITS, ids=lambda value: repr(value))
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_spellings_of_the_limit(tiny_server: Running, name: str, value: object, status: int) -> None:
    """C89: integers from 1, or null for none; nothing is converted or ignored."""
    for route in ROUTES[1:] if name == "max_completion_tokens" else ROUTES:
        response = tiny_server.post(route, **asking(route, "ab", temperature=0, **{name: value}))
        assert response.status_code == status, response.text
        if status == 400:
            assert error_of(response)["param"] == name
            assert error_of(response)["message"].startswith(name)
        elif value == 5:
            assert response.json()["usage"]["completion_tokens"] == 5


def test_both_limits(tiny_server: Running) -> None:
    """C89: equal ones are one, different ones an error."""
    body = asking(ROUTES[1], "ab", max_tokens=4)
    assert tiny_server.ask(ROUTES[1], **body, max_completion_tokens=4)["usage"]["completion_tokens"] == 4
    error = tiny_server.refused(ROUTES[1], **body, max_completion_tokens=5)
    assert "differ" in error["message"]
    assert error["param"] == "max_completion_tokens"


@pytest.mark.parametrize("ids", [[320], [10**6], [-1]])
def test_stop_ids_outside_the_vocabulary(tiny_server: Running, ids: list[int]) -> None:
    """C86: refused by name; the neighbour that streams meanwhile is not touched."""
    body = {"prompt": "tick tock", "max_tokens": 40, "temperature": 0}
    alone = one_of(tiny_server.ask(**body))
    with tiny_server.http.stream("POST", ROUTES[0], json={**body, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        assert tiny_server.refused(prompt="a", stop_token_ids=ids, min_tokens=3)["param"] == "stop_token_ids"
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert alone["text"].endswith("".join(frame["choices"][0]["text"] for frame in rest))


SETTINGS = [
    ("repetition_penalty", 0, 400), ("repetition_penalty", -1, 400), ("repetition_penalty", 1e-9, 400),
    ("repetition_penalty", 1e9, 400), ("repetition_penalty", 1, 200), ("repetition_penalty", 1.5, 200),
    ("presence_penalty", 2, 200), ("presence_penalty", -2, 200), ("presence_penalty", 3, 400), ("presence_penalty", -3, 400),
    ("frequency_penalty", 2, 200), ("frequency_penalty", -2.5, 400), ("temperature", -1, 400), ("temperature", "hot", 400),
    ("temperature", 2, 200), ("top_p", 0, 400), ("top_p", 1, 200), ("top_k", -2, 400), ("top_k", -1, 200), ("min_p", 1.5, 400),
    ("top_k", 2**63 - 1, 200), ("top_k", 2**63, 400),
    ("n", 0, 400), ("n", 129, 400), ("seed", -1, 400), ("seed", 2**63, 400), ("logit_bias", {"x": 1}, 400),
    ("logit_bias", {"999": 1}, 400), ("logit_bias", {"5": 101}, 400), ("logit_bias", {"5": 100}, 200), ("logprobs", 21, 400),
    ("bad_words", "no list", 400), ("stop", [1], 400), ("min_tokens", 5, 200),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "status"), SETTINGS, ids=lambda value: repr(value))
def test_ranges_of_settings(tiny_server: Running, name: str, value: object, status: int) -> None:
    """C94: what is out of range or of another type is refused by name, everything else served."""
    response = tiny_server.post(ROUTES[0], prompt="ab", max_tokens=6, **{name: value})
    assert response.status_code == status, response.text
    if status == 400:
        error = error_of(response)
        assert error["param"] == name
        assert error["message"].startswith(name)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_numbers_that_are_none(tiny_server: Running, value: str) -> None:
    """C94: no setting takes them, though many JSON readers would."""
    response = tiny_server.http.post(ROUTES[0], content=f'{{"prompt": "ab", "temperature": {value}}}')
    assert error_of(response)["type"] == "invalid_request_error"
    assert response.status_code == 400


BODIES = [
    ("", None), ("{", None), ("[]", None), ("null", None), ('{"prompt": "a\\ud800"}', None), ("[" * 5000, None),
    ('{"prompt": []}', "prompt"), ('{"prompt": [[]]}', "prompt"), ('{"prompt": [1, "a"]}', "prompt"), ("{}", "prompt"),
    ('{"prompt": ""}', "prompt"), ('{"prompt": ["a", ""]}', "prompt"), ('{"prompt": [-1]}', "prompt"),
    ('{"prompt": [999]}', "prompt"), ('{"prompt": [true]}', "prompt"), ('{"prompt": ["a", "a", "a"], "n": 128}', "n"),
    ('{"prompt": "a", "max_token": 3}', "max_token"), ('{"prompt": "a", "stream": "yes"}', "stream"),
    ('{"prompt": "a", "stream": true, "stream_options": {"usage": true}}', "stream_options"),
    ('{"prompt": "a", "stream_options": {"include_usage": true}}', "stream_options"),
    ('{"prompt": "a", "tools": [{}]}', "tools"),
    ('{"prompt": "a", "response_format": {"type": "json_object"}}', "response_format"),
    ('{"prompt": "a", "suffix": "b"}', "suffix"),
    ('{"prompt": "a", "speculation": "eagle"}', "speculation"),
    ('{"prompt": "a", "speculation": {"drafter": "x"}}', "speculation"),
    ('{"prompt": "a", "speculation": {"max_tokens": -1}}', "speculation"), ('{"prompt": "a", "model": "gpt"}', "model"),
    ('{"prompt": "a", "speculation": "off", "prediction": {"content": "b"}}', "prediction"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "param"), BODIES, ids=lambda value: repr(value)[:60])
def test_bodies_that_cannot_be_served(tiny_server: Running, data: str, param: str | None) -> None:
    """A 400 in OpenAI's shape (404 for another model) that names the field where there is one; never a 500."""
    response = tiny_server.http.post(ROUTES[0], content=data)
    error = error_of(response)
    assert response.status_code == (404 if param == "model" else 400)
    assert param is None or error["param"] == param


def test_a_compressed_body_is_told_so(tiny_server: Running) -> None:
    """Not that its JSON were wrong."""
    body = gzip.compress(b'{"prompt": "a"}')
    response = tiny_server.http.post(ROUTES[0], content=body, headers={"Content-Encoding": "gzip"})
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_encoding"
    assert tiny_server.http.post(ROUTES[0], json={"prompt": "a"}, headers={"Content-Encoding": "identity"}).status_code == 200


@pytest.mark.parametrize("name", sorted(NOT_SERVED))
def test_fields_of_other_servers_are_refused_unless_they_ask_for_nothing(tiny_server: Running, name: str) -> None:
    """Neither dropped, nor in the way of a client that sends its defaults; on both routes."""
    neutral, reason = NOT_SERVED[name]
    for route in ROUTES:
        for value in neutral:
            assert tiny_server.post(route, **asking(route, "ab", max_tokens=1, **{name: value})).status_code == 200
        for value in ("something", {"type": "json_schema", "json_schema": {}}, ["x"], 7):
            error = tiny_server.refused(route, **asking(route, "ab", **{name: value}))
            assert error["param"] == name
            assert error["message"] == f"{name} is not supported: {reason}"


def test_fields_that_ask_for_nothing_are_fine(tiny_server: Running) -> None:
    """Clients send neutral values of fields that are not served, and fields that cannot change an answer."""
    neutral = {"tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "parallel_tool_calls": True}
    without_effect = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    body = asking(ROUTES[1], "ab", max_tokens=2, temperature=0)
    assert one_of(tiny_server.ask(ROUTES[1], **body, **neutral, **without_effect)) == one_of(tiny_server.ask(ROUTES[1], **body))


def test_defaults_of_clients_that_send_whole_bodies(tiny_server: Running) -> None:
    """What such a client does not mean to set stands in its bodies all the same."""
    body = asking(ROUTES[1], "ab", max_tokens=2, temperature=0)
    whole = {**body, "top_logprobs": 0, "logprobs": False}
    assert one_of(tiny_server.ask(ROUTES[1], **whole)) == one_of(tiny_server.ask(ROUTES[1], **body))
    options = {"include_usage": True, "continuous_usage_stats": False}
    assert tiny_server.post(ROUTES[1], **whole, stream=True, stream_options=options).status_code == 200
    options["continuous_usage_stats"] = True
    assert "usage_stats" in tiny_server.refused(ROUTES[1], **whole, stream=True, stream_options=options)["message"]
    chat = {"messages": [{"role": "user", "content": "ab"}]}
    plain = tiny_server.post("/tokenize", **chat).json()
    neutral = {"add_special_tokens": False, "continue_final_message": False}
    assert tiny_server.post("/tokenize", **chat, **neutral).json() == plain
    assert tiny_server.post("/tokenize", **chat, add_special_tokens=True).status_code == 400


def test_an_unknown_field_is_named_with_its_neighbour(tiny_server: Running) -> None:
    """A misspelt setting must not pass as its default."""
    error = tiny_server.refused(prompt="a", temprature=0.5)
    assert (error["param"], error["code"]) == ("temprature", "unknown_field")
    assert "did you mean 'temperature'" in error["message"]


def test_other_paths_and_methods(tiny_server: Running) -> None:
    """In OpenAI's shape too. Watchers may ask for health without a body."""
    assert tiny_server.http.head("/health").status_code == 200
    for response, status in (
        (tiny_server.http.get("/v1/nothing"), 404),
        (tiny_server.http.get("/v1/completions"), 405),
        (tiny_server.http.get("/v1/models/other"), 404),
    ):
        assert response.status_code == status
        assert response.request.url.path.rpartition("/")[2] in error_of(response)["message"]


def test_tokens_there_and_back(tiny_server: Running) -> None:
    """/tokenize gives what would be run, /detokenize gives the text back; both check what they are given."""
    answer = tiny_server.post("/tokenize", prompt="häß", return_token_strs=True).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 5
    assert answer["max_model_len"] == 256
    assert answer["token_strs"][1] == "bytes:\\xc3"
    assert tiny_server.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": "häß"}
    messages = [{"role": "user", "content": "hi"}]
    ids = tiny_server.post("/tokenize", messages=messages).json()["tokens"]
    whole = tiny_server.ask(ROUTES[1], messages=messages, max_tokens=1, return_token_ids=True)
    assert whole["prompt_token_ids"] == ids
    for route, body in (
        ("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": messages}), ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**9]}), ("/detokenize", {"tokens": ["a"]}), ("/tokenize", {"prompt": "a", "model": "x"}),
    ):  # fmt: skip
        assert tiny_server.post(route, **body).status_code in (400, 404)


def test_keys(tiny_folder: Path) -> None:
    """Without a known key nothing of the model is shown; health and metrics are for whoever watches."""
    llm = LLM(str(tiny_folder), precision="fp32", self_test=False)
    with serving(llm, api_keys=["right", "other"]) as server, httpx.Client(base_url=server.url) as bare:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic right"}, {"Authorization": "Bearer"}):
            for response in (
                bare.get("/v1/models", headers=headers),
                bare.post(ROUTES[0], json={"prompt": "a"}, headers=headers),
                bare.post("/tokenize", json={"prompt": "a"}, headers=headers),
            ):
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
                error_of(response)
        for path in ("/health", "/metrics", "/openapi.json"):
            assert bare.get(path).status_code == 200
        for key in ("right", "other"):
            assert bare.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_bodies_have_a_limit(tiny_folder: Path) -> None:
    """Announced or not, a larger body is refused with 413, before it has all been read."""
    with serving(LLM(str(tiny_folder), precision="fp32", self_test=False), max_body_bytes=2000) as server:
        large = json.dumps({"prompt": "a" * 3000}).encode()
        assert server.http.post(ROUTES[0], content=large).status_code == 413
        assert server.http.post(ROUTES[0], content=iter([large[:1500], large[1500:]])).status_code == 413
        assert server.ask(prompt="a" * 200, max_tokens=1)["usage"]["prompt_tokens"] == 200


def test_a_body_that_never_comes_is_given_up(tiny_folder: Path) -> None:
    """408, long before the client would give up."""
    with serving(LLM(str(tiny_folder), precision="fp32", self_test=False), body_seconds=0.3) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            slow.settimeout(PATIENCE)
            assert b" 408 " in slow.recv(4096)


def test_the_queue_has_a_limit(tiny_folder: Path) -> None:
    """Beyond it 429 and when to come again; a request that could never fit is told so; places come free again."""
    let_go = threading.Event()
    llm = held(LLM(str(tiny_folder), precision="fp32", self_test=False, max_sequences=1), 0.02, let_go=let_go)
    body = {"prompt": "a", "max_tokens": 120, "ignore_eos": True, "stream": True}
    with serving(llm, max_queue=1) as server, ThreadPoolExecutor(2) as pool:
        assert server.refused(**{**body, "n": 3})["message"].startswith("the request asks for 3 answers")
        for n_waiting in (0, 1):  # the first may itself be seen waiting before its first pass
            pool.submit(httpx.post, server.url + ROUTES[0], json=body, timeout=PATIENCE)
            until(
                lambda n=n_waiting: (
                    (m := server.metrics())["specdec:num_requests_running"] == 1 and m["specdec:num_requests_waiting"] == n
                )
            )
        response = server.post(ROUTES[0], **body)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert error_of(response)["code"] == "queue_full"
        let_go.set()
        until(lambda: server.post(ROUTES[0], prompt="a", max_tokens=1).status_code == 200, 3 * PATIENCE)


def test_an_answer_has_a_time_limit(tiny_folder: Path) -> None:
    """504 before anything was sent, an error in the stream afterwards; its blocks are free."""
    llm = held(LLM(str(tiny_folder), precision="fp32", self_test=False), 0.03)
    with serving(llm, request_seconds=1.5) as server:
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}
        assert server.refused(status=504, **body)["code"] == "timeout"
        data = server.http.post(ROUTES[0], json={**body, "stream": True}).text
        assert '"code":"timeout"' in data
        assert data.endswith("data: [DONE]\n\n")
        server.settled()
