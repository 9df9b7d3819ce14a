"""What is told of a request when it has ended: its id, one line in the log, a trace."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import tiny
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import StatusCode
from serving import ROUTES, Running, along, call, copy, held, poisoned, serving, until, words_llm
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from specdec.config import ConfigError, ServeConfig
from specdec.llm import LLM
from specdec.serve.logs import JsonFormatter, TextFormatter, is_news
from specdec.serve.service import Service
from specdec.serve.tracing import EVENTS, Tracing

POISON = 7
BODY = {"prompt": "tick tock", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), precision="fp32", self_test=False, **settings)


class Spans:
    """An exporter in memory, and what it has."""

    def __init__(self, ratio: float = 1.0) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(ratio)))
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider)

    def roots(self, n: int) -> list[ReadableSpan]:
        """The spans of requests, once there are so many."""
        return until(lambda: len(found := [s for s in self.all if s.name.startswith("/v1")]) >= n and found)

    def below(self, root: ReadableSpan) -> dict[str, ReadableSpan]:
        """The children of a request with one sequence, by name."""
        children = [s for s in self.all if s.parent and s.parent.span_id == root.context.span_id]
        assert len({s.name for s in children}) == len(children)
        return {s.name: s for s in children}

    @property
    def all(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())


@pytest.fixture(scope="module")
def spans() -> Spans:
    return Spans()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, spans: Spans) -> Iterator[Running]:
    """TINY at 3 ms a pass, all of whose requests are traced; a prompt with POISON ends with an error, and an answer of 200
    tokens goes on until its client leaves."""
    folder = poisoned(tiny(tmp_path_factory.mktemp("tiny")), POISON)
    with serving(held(load(folder, max_sequences=3), 0.003), model_name="tiny", tracing=spans.tracing) as running:
        yield running


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """The facts of requests that were logged."""
    caplog.set_level(logging.INFO, "specdec")

    def read(n: int) -> list[dict[str, Any]]:
        return until(lambda: len(found := [r.facts for r in caplog.records if hasattr(r, "facts")]) >= n and found)

    return read


def test_a_request_has_one_id(traced: Running, lines: Any) -> None:
    """The client's own, or a new one; the response carries it, refusals too, and so does the line in the log."""
    own = traced.http.post(ROUTES[0], json=BODY, headers={"X-Request-Id": "mine-1"})
    made = [traced.http.post(ROUTES[0], json=BODY).headers["x-request-id"] for _ in range(2)]
    bad = traced.http.post(ROUTES[0], json={"prompt": 5}, headers={"X-Request-Id": "mine-2"})
    assert own.headers["x-request-id"] == "mine-1"
    assert len(set(made)) == 2
    assert (bad.status_code, bad.headers["x-request-id"]) == (400, "mine-2")
    assert [line["request_id"] for line in lines(4)] == ["mine-1", *made, "mine-2"]
    assert traced.http.get("/health").headers["x-request-id"]
    for given in ("a b", "x" * 129, "é"):
        refused = traced.http.post(ROUTES[0], json=BODY, headers={"X-Request-Id": given.encode()})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_request_id")
    lines(7)  # the last may come after its response


def test_the_line_of_a_request(tmp_path: Path, lines: Any) -> None:
    """Tokens, end, times, τ and drafters, as the answer itself says."""
    llm = copy(words_llm(tmp_path, [f" {i}" for i in range(12)]), 4, along(12))
    with serving(llm, model_name="words") as server:
        answer = server.ask(prompt=" 0", max_tokens=11, temperature=0, stats=True)
    (line,) = lines(1)
    stats = answer["choices"][0]["stats"]
    assert (line["status"], line["finish_reason"], line["route"]) == (200, "length", ROUTES[0])
    assert (line["prompt_tokens"], line["completion_tokens"]) == (1, 11)
    assert (line["drafted"], line["accepted"]) == (stats["drafted"], stats["accepted"])
    assert line["accepted_by_drafter"] == {"oracle": stats["accepted"]}
    assert line["tokens_per_pass"] == pytest.approx(stats["tokens_per_pass"])
    assert line["speedup"] == pytest.approx(stats["speedup"])
    assert 0 <= line["queue_seconds"] < line["first_token_seconds"] < line["seconds"]
    assert "text" not in line
    assert "prompt" not in line


def test_every_end_has_its_line(traced: Running, lines: Any) -> None:
    """Refused, failed, left by its client, several answers, a WebSocket's messages: one line each, with what is known."""
    traced.refused(**{**BODY, "max_tokens": 0})
    traced.refused(status=500, **{**BODY, "prompt": [97, POISON]})
    connection = call(traced, ROUTES[0], {**BODY, "max_tokens": 200, "stream": True})
    connection.recv(10)
    connection.close()
    traced.settled()
    traced.ask(**BODY, n=3)
    with connect(traced.url.replace("http", "ws") + ROUTES[0], additional_headers={"X-Request-Id": "socket"}) as socket:
        assert socket.response.headers["x-request-id"] == "socket"
        for body in (BODY, {"prompt": []}):
            socket.send(json.dumps(body))
            while socket.recv() != "[DONE]":
                pass
    refused, failed, left, several, first, second = lines(6)
    assert (refused["status"], "finish_reason" in refused) == (400, False)
    assert (failed["status"], failed["finish_reason"], failed["code"]) == (500, "error", "generation_failed")
    assert (left["status"], left["finish_reason"]) == (200, "abort")
    assert 0 < left["completion_tokens"] < 200
    assert (several["completion_tokens"], several["finish_reason"]) == (36, "length")
    assert (first["request_id"], first["completion_tokens"]) == ("socket-1", 12)
    assert second["request_id"] == "socket-2"
    assert "error" in second


def test_a_refused_websocket_has_a_line(
    tiny_folder: Path, lines: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a refused request, also in the figures; and the HTTP library's complaint about it is kept out."""
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "filters", [is_news])
    with serving(load(tiny_folder), api_keys=["k"]) as server:
        with pytest.raises(InvalidStatus):
            connect(server.url.replace("http", "ws") + ROUTES[0], additional_headers={"X-Request-Id": "socket"})
        (told,) = lines(1)
        assert (told["request_id"], told["route"], told["status"], told["code"]) == (
            "socket",
            ROUTES[0],
            401,
            "missing_api_key",
        )
        assert server.metrics()["specdec:requests_refused_total{401}"] == 1
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_log_formats(capsys: pytest.CaptureFixture) -> None:
    """JSON: one object per line whatever a message holds. Text: one line, on which a value cannot pretend to be another."""
    record = logging.LogRecord("specdec.x", logging.INFO, "", 0, 'a "b"\nc', None, None)
    record.facts = {"request_id": "x status=200", "seconds": 0.12345, "accepted_by_drafter": {"suffix": 3, "eagle": 1}}
    line = JsonFormatter().format(record)
    assert "\n" not in line
    values = json.loads(line)
    assert (values["message"], values["request_id"], values["seconds"]) == ('a "b"\nc', "x status=200", 0.12345)
    record.msg = "request ended"
    text = TextFormatter().format(record)
    assert text.endswith('info request ended request_id="x status=200" seconds=0.1235 accepted_by_drafter=suffix:3,eagle:1')
    try:
        raise ValueError("why")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "ValueError: why" in json.loads(JsonFormatter().format(record))["exception"]


def test_traces_under_concurrency(traced: Running, spans: Spans) -> None:
    """Eight clients at once over three places: each trace has its own queue, prefill and decode, one after the other, within
    the request; what it says is what its answer said; a client's traceparent is its parent."""
    spans.exporter.clear()
    answers: dict[str, dict] = {}

    def ask(i: int) -> None:
        parent = {"traceparent": f"00-{i + 1:032x}-{i + 1:016x}-01", "X-Request-Id": f"r{i}"}
        body = {**BODY, "prompt": "tick " * (1 + i), "max_tokens": 10 + 9 * i, "stats": True}
        answers[f"r{i}"] = httpx.post(traced.url + ROUTES[0], json=body, headers=parent, timeout=60).json()

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    roots = spans.roots(8)
    assert len(roots) == 8
    assert len(spans.all) == 4 * 8
    for root in roots:
        name = root.attributes["specdec.request_id"]
        i = int(name[1:])
        assert root.context.trace_id == root.parent.trace_id == i + 1
        assert root.parent.span_id == i + 1
        below = spans.below(root)
        queue, prefill, decode = (below[part] for part in ("queue", "prefill", "decode"))
        assert root.start_time <= queue.start_time <= queue.end_time == prefill.start_time
        assert prefill.end_time == decode.start_time <= decode.end_time <= root.end_time
        stats = answers[name]["choices"][0]["stats"]
        assert decode.attributes["specdec.tokens"] == root.attributes["gen_ai.usage.output_tokens"] == 10 + 9 * i
        assert decode.attributes["specdec.passes"] == stats["target_passes"]
        assert root.attributes["specdec.accepted"] == stats["accepted"]
        assert root.attributes["specdec.tokens_per_pass"] == pytest.approx(stats["tokens_per_pass"])
        assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
        assert sum(event.attributes["tokens"] for event in decode.events) == 10 + 9 * i
        assert sum(event.attributes["passes"] for event in decode.events) == stats["target_passes"]
        assert 0 < len(decode.events) <= EVENTS
        assert all(decode.start_time <= event.timestamp <= decode.end_time for event in decode.events)
        assert root.status.status_code == StatusCode.UNSET


def test_traces_of_what_went_wrong(traced: Running, spans: Spans) -> None:
    """Every span ends: of a request that was refused, that failed, and whose client went while it decoded or waited."""
    spans.exporter.clear()
    traced.refused(**{**BODY, "max_tokens": 0})
    traced.refused(status=500, **{**BODY, "prompt": [97, POISON]})
    connections = []
    for running, waiting in ((1, 0), (2, 0), (3, 0), (3, 1)):  # there are three places
        connections.append(call(traced, ROUTES[0], {**BODY, "max_tokens": 240, "stream": True}))
        until(lambda n=running: traced.metrics()["specdec:num_requests_running"] == n)
        until(lambda n=waiting: traced.metrics()["specdec:num_requests_waiting"] == n)
    connections.pop().close()
    until(lambda: traced.metrics()["specdec:num_requests_waiting"] == 0)
    for connection in connections:
        connection.recv(10)
        connection.close()
    traced.settled()
    refused, failed, *left = spans.roots(6)
    assert (refused.attributes["http.response.status_code"], refused.status.status_code) == (400, StatusCode.UNSET)
    assert spans.below(refused) == {}
    assert failed.status.status_code == StatusCode.ERROR
    assert failed.attributes["error.type"] == "generation_failed"
    below = spans.below(failed)
    assert set(below) == {"queue", "prefill"}
    assert below["prefill"].status.status_code == StatusCode.ERROR
    assert all(root.attributes["gen_ai.response.finish_reasons"] == ("abort",) for root in left)
    parts = [sorted(spans.below(root)) for root in left]
    assert parts == [["queue"]] + [["decode", "prefill", "queue"]] * 3
    assert all(span.end_time is not None and span.end_time >= span.start_time for span in spans.all)


def test_a_trace_of_an_answer_that_breaks_off(tmp_path: Path) -> None:
    """The decode span of a sequence that failed after some tokens has them, ends, and says that it failed."""
    words_llm(tmp_path, [" one", " two", " three", " four", " five", " six", " seven", " eight"])
    spans = Spans()
    with serving(load(poisoned(tmp_path, 5)), tracing=spans.tracing) as server:
        server.refused(status=500, prompt=" one", temperature=0, max_tokens=9)
    (root,) = spans.roots(1)
    decode = spans.below(root)["decode"]
    assert decode.attributes["specdec.tokens"] == 5
    assert (decode.status.status_code, root.status.status_code) == (StatusCode.ERROR, StatusCode.ERROR)
    assert decode.end_time <= root.end_time


def test_sampling(tmp_path: Path) -> None:
    """The ratio decides for traces that begin here, the client's own decision for those that it began."""
    spans = Spans(ratio=0.0)
    with serving(load(tiny(tmp_path)), tracing=spans.tracing) as server:
        server.ask(**BODY)
        for flag in ("00", "01"):
            header = {"traceparent": f"00-{5:032x}-{6:016x}-{flag}"}
            assert server.http.post(ROUTES[0], json=BODY, headers=header).status_code == 200
        assert server.http.post(ROUTES[0], json=BODY, headers={"traceparent": "nonsense"}).status_code == 200
        assert [root.context.trace_id for root in spans.roots(1)] == [5]


def test_nothing_is_imported_unless_asked_for() -> None:
    """A server without traces runs where OpenTelemetry is not installed, and where it is does not load what keeps traces."""
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = sys.modules['opentelemetry.exporter'] = None;"
        "import specdec.serve.server; print('specdec.serve.tracing' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_what_cannot_be_traced_is_said(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio without a collector, a missing library and a protocol that is not spoken are errors, not silence; variables that
    turn OpenTelemetry off do."""
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    with pytest.raises(ConfigError, match="needs a collector"):
        Service(tiny_llm, ServeConfig(trace_sample=0.1))
    with pytest.raises(ConfigError, match="URL of http"):
        ServeConfig(otlp_endpoint="localhost:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="http/protobuf"):
        Service(tiny_llm, ServeConfig())
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "specdec.serve.tracing", None)
        with pytest.raises(ConfigError, match=r"specdec\[otel\]"):
            Service(tiny_llm, ServeConfig())
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert Service(tiny_llm, ServeConfig()).tracing is None


def test_traces_reach_a_collector(tiny_folder: Path) -> None:
    """Over HTTP as OTLP, to the endpoint that was named, at the latest when the server stops."""
    import http.server

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[tuple[str, ExportTraceServiceRequest]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            import gzip

            data = self.rfile.read(int(self.headers["content-length"]))
            data = gzip.decompress(data) if self.headers.get("content-encoding") == "gzip" else data
            got.append((self.path, ExportTraceServiceRequest.FromString(data)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_port}"
    try:
        with serving(load(tiny_folder), otlp_endpoint=endpoint, trace_sample=1.0) as server:
            server.ask(**BODY)
    finally:
        collector.shutdown()
        collector.server_close()
    resources = [resource for path, request in got for resource in request.resource_spans if path == "/v1/traces"]
    names = [span.name for resource in resources for scope in resource.scope_spans for span in scope.spans]
    assert sorted(names) == sorted([ROUTES[0], "queue", "prefill", "decode"])
    (service,) = {a.value.string_value for r in resources for a in r.resource.attributes if a.key == "service.name"}
    assert service == "specdec"


def test_the_servers_own_log_is_of_one_form() -> None:
    """What the HTTP library logs comes in the same form, but for its complaint about WebSockets that are refused; a second
    configuration leaves no second handler."""
    code = (
        "import logging; from specdec.serve.logs import configure; configure('text'); configure('json');"
        "logging.getLogger('uvicorn.error').error('ASGI callable returned without completing handshake.');"
        "logging.getLogger('uvicorn.error').warning('a'); logging.getLogger('specdec.x').info('b');"
        "logging.getLogger('other').info('c')"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert [json.loads(line)["message"] for line in io.StringIO(told)] == ["a", "b"]
