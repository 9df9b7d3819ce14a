"""Beginnings and ends: clients that go, answers that fail in the middle, engines that die, servers that stop, slow readers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import tiny
from serving import (
    PATIENCE,
    ROUTES,
    Running,
    along,
    asking,
    call,
    copy,
    error_of,
    frames_of,
    held,
    joined,
    one_of,
    poisoned,
    serving,
    until,
    words_llm,
)

from specdec.llm import LLM

LONG = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), precision="fp32", self_test=False, **settings)


@pytest.fixture
def slow(tiny_folder: Path) -> Iterator[Running]:
    """TINY at 20 ms a pass: an answer of 200 tokens goes on until its client leaves."""
    with serving(held(load(tiny_folder, prefill_rows=8), 0.02)) as running:
        yield running


def finished(metrics: dict[str, float]) -> dict[str, float]:
    """Ended sequences by reason."""
    return {reason: metrics[f"specdec:request_success_total{{{reason}}}"] for reason in ("stop", "length", "abort", "error")}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_hanging_up_frees_everything_at_once(slow: Running, route: str, streamed: bool) -> None:
    """C25: while it reads a long prompt, while it generates, streamed or not; nothing runs on and no block is held."""
    before = finished(slow.settled())
    for delay, text in ((0.05, "a" * 150), (0.2, "a"), (0.0, "a")):
        connection = call(slow, route, {**asking(route, text, **LONG), "stream": streamed})
        slow.busy(1)
        time.sleep(delay)
        connection.close()
        slow.settled()
    after = finished(slow.metrics())
    assert {reason: after[reason] - before[reason] for reason in after} == {"stop": 0, "length": 0, "abort": 3, "error": 0}
    assert slow.ask(prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_gauges_return_when_all_go(slow: Running) -> None:
    """C44: eight streams dropped together, nothing sent afterwards: gauges are right without another pass."""
    connections = [call(slow, ROUTES[0], {"prompt": "a", **LONG, "stream": True}) for _ in range(8)]
    slow.busy(8)
    before = finished(slow.metrics())
    for connection in connections:
        connection.close()
    now = slow.settled()
    assert finished(now)["abort"] - before["abort"] == 8
    assert now["specdec:kv_cache_usage_perc"] == 0
    assert min(now.values()) >= 0


def test_ends_are_counted_by_reason(tmp_path: Path) -> None:
    """C91: what is refused is counted apart, and the ends add up to the beginnings."""
    llm = held(words_llm(tmp_path, [" a", " b", " c", "<end>"], eos=True), 0.02)
    with serving(llm) as server:
        before = server.metrics()
        for _ in range(3):
            server.ask(prompt=" a", temperature=0)
        for _ in range(2):
            server.ask(prompt=" a", temperature=0, max_tokens=1)
        for streamed in (True, False):
            connection = call(server, ROUTES[0], {"prompt": " a", **LONG, "stream": streamed})
            server.busy(1)
            connection.close()
            server.settled()
        server.refused(prompt=" a", n=0)
        after = server.settled()
        ends = {reason: n - finished(before)[reason] for reason, n in finished(after).items()}
        assert ends == {"stop": 3, "length": 2, "abort": 2, "error": 0}
        assert after["specdec:requests_started_total"] - before["specdec:requests_started_total"] == 7
        assert after["specdec:requests_refused_total{400}"] == 1


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("k", [0, 4])
def test_an_answer_that_fails(tmp_path: Path, route: str, k: int) -> None:
    """C50: before the first token a real 5xx; after it a frame with the error and the end mark; never a clean short success."""
    pieces = [" one", " two", " three", " four", " five", " six", " seven", " eight"]
    llm = words_llm(tmp_path, pieces)
    poisoned(tmp_path, 5)
    llm = load(tmp_path)
    llm = copy(llm, k, along(8)) if k else llm
    with serving(llm) as server:
        for streamed in (False, True):
            response = server.post(route, **asking(route, " six", temperature=0, max_tokens=6), stream=streamed)
            assert response.status_code == 500
            assert error_of(response)["code"] == "generation_failed"
        body = asking(route, " one", temperature=0, max_tokens=9)
        assert server.refused(route, status=500, **body)["code"] == "generation_failed"
        frames = frames_of(server.http.post(route, json={**body, "stream": True}).content)
        assert frames[-1]["error"]["code"] == "generation_failed"
        assert joined(frames[:-1])[0]["text"] == " two three four five six"
        assert finished(server.settled())["error"] == 4
        assert one_of(server.ask(route, **asking(route, " seven", temperature=0, max_tokens=1)))["text"] == " eight"


def test_one_failing_choice_does_not_harm_the_neighbours(tmp_path: Path) -> None:
    """C64: NaN reaches one request; those beside it and those that reuse its blocks have the tokens of their solo runs."""
    llm = load(poisoned(tiny(tmp_path), 7))
    body = {
        "prompt": "tick tock tick tock",
        "max_tokens": 40,
        "temperature": 0,
        "return_token_ids": True,
        "logit_bias": {"7": -100},
    }
    with serving(llm) as server:
        alone = one_of(server.ask(**body))
        answers: list[dict] = []
        threads = [
            threading.Thread(target=lambda: answers.append(httpx.post(server.url + ROUTES[0], json=body).json()))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for _ in range(3):
            error = server.refused(status=500, prompt=[97] * 40 + [7], max_tokens=4)
            assert "nan" in error["message"]
        for thread in threads:
            thread.join()
        assert [one_of(answer) for answer in answers] == [alone] * 3
        assert one_of(server.ask(**{**body, "prompt": "tick tock tick tock"})) == alone
        server.settled()


def test_drafting_goes_on_for_ever(tmp_path: Path) -> None:
    """C52: what a drafter keeps per request is given back: the last request drafts as well as the first."""
    llm = copy(words_llm(tmp_path, [" a", " b", " c", " d"]), 4, along(4))
    with serving(llm) as server:

        def drafted() -> tuple[int, int]:
            stats = server.ask(prompt=" a", max_tokens=20, temperature=0, stats=True)["choices"][0]["stats"]
            return stats["drafted"], stats["accepted"]

        first = drafted()
        assert first[0] == first[1] > 0
        assert [drafted() for _ in range(30)] == [first] * 30
        for _ in range(4):
            call(server, ROUTES[0], {"prompt": " a", **LONG, "stream": True}).close()
        assert [drafted() for _ in range(5)] == [first] * 5
        server.settled()


def test_a_dead_engine_is_told(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """C67: open streams end with an error, health says 503, and new requests are refused at once."""
    llm = held(load(tiny_folder), 0.03)
    with serving(llm) as server:
        connections = [call(server, ROUTES[0], {"prompt": "a", **LONG, "stream": streamed}) for streamed in (True, True, False)]
        server.busy(3)
        for connection in connections:
            connection.settimeout(PATIENCE)
        begun = [connection.recv(65536) for connection in connections[:2]]

        def die() -> None:
            raise MemoryError("a test's")

        llm.engine.step = die  # type: ignore[method-assign]
        for connection, streamed, data in zip(connections, (True, True, False), (*begun, b""), strict=True):
            while not (b"[DONE]" in data if streamed else b"}}" in data):
                part = connection.recv(65536)
                assert part, data
                data += part
            assert b'"code":"engine_failed"' in data
            assert streamed or data.startswith(b"HTTP/1.1 503")
            connection.close()
        for response in (
            server.http.get("/health"),
            server.post(ROUTES[0], prompt="a"),
            server.post(ROUTES[1], **asking(ROUTES[1], "a")),
        ):
            assert response.status_code == 503
            assert error_of(response)["code"] == "engine_failed"
        assert server.http.get("/v1/models").status_code == 200
    assert "the engine has failed" in caplog.text


def test_a_slow_reader_slows_nobody(slow: Running) -> None:
    """A client that reads nothing: others stream on, its own deltas wait and come in full when it reads."""
    body = {"prompt": "a", **LONG, "max_tokens": 100, "logprobs": 5, "stream": True}
    whole = one_of(slow.ask(**{**body, "stream": False}))
    connection = call(slow, ROUTES[0], body)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    assert joined(slow.stream(**{**body, "max_tokens": 20}))[0]["finish_reason"] == "length"
    slow.settled()
    connection.settimeout(PATIENCE)
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += connection.recv(65536)
    connection.close()
    text = data.partition(b"\r\n\r\n")[2]
    content = b""
    while text:
        size, _, text = text.partition(b"\r\n")
        content, text = content + text[: int(size, 16)], text[int(size, 16) + 2 :]
    assert joined(frames_of(content))[0] == whole


def test_a_stream_can_be_slowed(tiny_folder: Path) -> None:
    """A rate of tokens per second holds for a stream, merges nothing wrongly, and leaves whole answers alone."""
    with serving(load(tiny_folder), stream_rate=50) as server:
        body = {
            "prompt": "tick tock",
            "max_tokens": 60,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
        }
        whole = server.ask(**body)
        began = time.monotonic()
        frames = server.stream(**body)
        assert time.monotonic() - began > 1.0
        assert joined(frames)[0] == one_of(whole)
        assert all(len(choice["token_ids"]) <= 5 for frame in frames for choice in frame["choices"])


@pytest.mark.parametrize("grace", [0.0, 20.0])
def test_stopping_in_good_order(tiny_folder: Path, grace: float) -> None:
    """Told to stop, a server refuses new requests and says so, lets streams end where there is time, and ends them properly."""
    refused = threading.Event()
    llm = held(load(tiny_folder), 0.03, tokens=40, let_go=refused)
    with serving(llm, shutdown_seconds=grace) as server:
        connection = call(server, ROUTES[0], {"prompt": "a", **LONG, "max_tokens": 100, "stream": True})
        connection.settimeout(PATIENCE)
        data = connection.recv(65536)
        server.server.should_exit = True
        if grace:
            until(lambda: server.http.get("/health").status_code == 503)
            assert server.refused(status=503, prompt="a")["code"] == "shutting_down"
            refused.set()
        while part := connection.recv(65536):
            data += part
        connection.close()
        assert b"data: [DONE]" in data
        assert (b'"code":"shutting_down"' in data) == (grace == 0)
        assert (b'"finish_reason":"length"' in data) == (grace > 0)


@pytest.mark.slow
def test_the_command_stops_on_a_signal(tiny_folder: Path) -> None:
    """The program itself: it prints where it listens, answers, and ends with the signal's code after finishing its stream."""
    command = [
        sys.executable,
        "-c",
        "from specdec.cli import main; main()",
        "serve",
        "--model",
        str(tiny_folder),
        "--precision",
        "fp32",
        "--port",
        "0",
    ]
    environment = {**os.environ, "SPECDEC_API_KEY": "secret"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = next(word for word in line.split() if word.startswith("http")).removesuffix("/v1")
        key = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{address}/v1/models").status_code == 401
        with httpx.stream("POST", address + ROUTES[0], json={"prompt": "a", **LONG, "stream": True}, headers=key) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        process.wait(3 * PATIENCE)
        assert process.returncode in (0, -signal.SIGTERM)
        assert "Traceback" not in process.stderr.read()
