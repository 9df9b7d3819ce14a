"""/metrics under load against the engine's own counts: everything that can be checked of every sample."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from checkpoints import tiny
from prometheus_client.parser import text_string_to_metric_families
from serving import PATIENCE, ROUTES, Running, call, held, poisoned, serving, slowed, until

from specdec.llm import LLM
from specdec.serve import worker

POISON = 7
"""A prompt with this token ends with an error."""


def load(folder: Path, **settings: object) -> LLM:
    return LLM(str(folder), precision="fp32", self_test=False, **settings)


class Client(threading.Thread):
    """Asks in turn for answers of all kinds and counts what came of it, by what the metrics should call it."""

    def __init__(self, server: Running, seed: int, n: int) -> None:
        super().__init__()
        self.server, self.n, self.rng = server, n, random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.refused: Counter[int] = Counter()
        self.left = 0
        """Streams that it left: they end by abort, unless the server was faster."""

    def run(self) -> None:
        for _ in range(self.n):
            kind = self.rng.choice(("whole", "stream", "several", "leave", "fail", "refuse"))
            prompt = "tick tock " * self.rng.randint(1, 8)
            body = {"prompt": prompt, "max_tokens": self.rng.randint(1, 30), "temperature": 0, "ignore_eos": True}
            getattr(self, f"_{kind}")(body)

    def _whole(self, body: dict) -> None:
        self._take(self._post(**body).json())

    def _several(self, body: dict) -> None:
        self._take(self._post(**{**body, "n": 3, "seed": 1, "temperature": 1.0, "logit_bias": {POISON: -100}}).json())

    def _stream(self, body: dict) -> None:
        response = self._post(**body, stream=True, stream_options={"include_usage": True})
        assert response.text.endswith("data: [DONE]\n\n")
        self.ends["length"] += 1

    def _leave(self, body: dict) -> None:
        connection = call(self.server, ROUTES[0], {**body, "max_tokens": 220, "stream": True})
        connection.recv(100)
        connection.close()
        self.left += 1

    def _fail(self, body: dict) -> None:
        assert self._post(**{**body, "prompt": [97, POISON]}).status_code == 500
        self.ends["error"] += 1
        self.refused[500] += 1

    def _refuse(self, body: dict) -> None:
        assert self._post(**{**body, "max_tokens": 0}).status_code == 400
        self.refused[400] += 1

    def _post(self, **body: object) -> httpx.Response:
        return httpx.post(self.server.url + ROUTES[0], json=body, timeout=60)

    def _take(self, answer: dict) -> None:
        self.ends.update(choice["finish_reason"] for choice in answer["choices"])


def samples(server: Running) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of a scrape, buckets too; each must have the model's name."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text):
        for name, labels, value, *_ in family.samples:
            if name.startswith("specdec:"):
                assert labels.pop("model_name") == "tiny", name
            found[name, tuple(sorted(labels.items()))] = value
    return found


def check(now: dict, before: dict) -> None:
    """What holds in every scrape, whatever is going on."""
    for (name, labels), value in now.items():
        assert math.isfinite(value), (name, labels)
        assert value >= 0, (name, labels)
        if name.startswith("specdec:") and name.endswith(("_total", "_bucket", "_count", "_sum")):
            assert value >= before.get((name, labels), 0.0), f"{name} {labels} fell"

    def of(name: str, **labels: str) -> float:
        return now[f"specdec:{name}", tuple(sorted(labels.items()))]

    def total(name: str) -> float:
        return sum(value for (found, _), value in now.items() if found == f"specdec:{name}")

    blocks = {state: of("kv_cache_blocks", state=state) for state in ("used", "cached", "free")}
    assert of("kv_cache_usage_perc") == pytest.approx(blocks["used"] / sum(blocks.values()))
    assert 0 <= of("kv_cache_usage_perc") <= 1
    proposed, drafted, accepted = (of(f"spec_decode_num_{what}_tokens_total") for what in ("proposed", "draft", "accepted"))
    assert accepted <= drafted <= proposed
    for by in ("pos", "drafter"):
        assert total(f"spec_decode_num_draft_tokens_per_{by}_total") == drafted
        assert total(f"spec_decode_num_accepted_tokens_per_{by}_total") == accepted
    passes = of("target_passes_total")  # the last token of a sequence may be a drafted one
    assert passes <= of("generation_tokens_total") <= passes + accepted
    assert of("spec_decode_num_drafts_total") <= of("target_passes_total") - of("quiet_passes_total")
    assert of("prefix_cache_hits_total") <= of("prefix_cache_queries_total") == of("prompt_tokens_total")
    assert of("speedup") > 0
    assert of("tokens_per_pass") == 0 or of("tokens_per_pass") >= 0.5
    assert total("request_success_total") <= of("requests_started_total")


def test_every_figure_under_load(tmp_path: Path) -> None:
    """C19, C44, C52, C91: six clients that ask, stream, leave, fail and are refused, at once, while /metrics is read. Nothing
    is ever negative, NaN, or falls; parts add up; at the end counters are the engine's and the clients', and gauges rest."""
    llm = slowed(load(poisoned(tiny(tmp_path), POISON), max_sequences=4), 0.002)
    with serving(llm, model_name="tiny") as server:
        rest = samples(server)
        check(rest, {})
        assert rest["specdec:speedup", ()] == 1
        clients = [Client(server, seed, 10) for seed in range(6)]
        for client in clients:
            client.start()
        before, scrapes = rest, 0
        while any(client.is_alive() for client in clients):
            now = samples(server)
            check(now, before)
            before, scrapes = now, scrapes + 1
            time.sleep(0.005)
        server.settled()
        now = samples(server)
        check(now, before)
        ends, refused = Counter[str](), Counter[int]()
        for client in clients:
            ends += client.ends
            refused += client.refused
        left = sum(client.left for client in clients)
        ends["abort"] = int(now["specdec:request_success_total", (("finished_reason", "abort"),)])
        assert 0 < ends["abort"] <= left
        ends["length"] += left - ends["abort"]
        assert scrapes > 5
        assert min(ends["length"], ends["error"]) > 0, "the load has not all it should"
        _agree(now, server, ends, refused)


def _agree(now: dict, server: Running, ends: Counter[str], refused: Counter[int]) -> None:
    """The figures after the load are those of the engine and of the clients."""

    def of(name: str, **labels: str) -> float:
        return now[f"specdec:{name}", tuple(sorted(labels.items()))]

    stats = server.llm.engine.stats
    for reason in ("stop", "length", "abort", "error"):
        assert of("request_success_total", finished_reason=reason) == ends[reason], reason
    assert of("requests_started_total") == sum(ends.values())
    assert {status: of("requests_refused_total", status=str(status)) for status in refused} == refused
    for name, value in {
        "generation_tokens": stats.emitted,
        "prompt_tokens": stats.prompt_tokens,
        "prefix_cache_hits": stats.cached_tokens,
        "target_passes": stats.target_passes,
        "num_preemptions": stats.preemptions,
        "spec_decode_num_drafts": stats.drafts,
        "spec_decode_num_draft_tokens": stats.drafted,
        "spec_decode_num_accepted_tokens": stats.accepted,
        "plain_seconds": stats.plain_seconds,
    }.items():
        assert of(f"{name}_total") == pytest.approx(value), name
    for phase, seconds in stats.seconds.items():
        assert of("engine_seconds_total", phase=phase) == pytest.approx(seconds)
    for depth, accepted in stats.accepted_by_depth.items():
        assert of("spec_decode_num_accepted_tokens_per_pos_total", position=str(depth - 1)) == accepted
    finished = ends["stop"] + ends["length"]
    for name in (
        "e2e_request_latency_seconds",
        "request_decode_time_seconds",
        "request_generation_tokens",
        "request_prompt_tokens",
    ):
        assert of(f"{name}_count") == finished, name
    first = of("time_to_first_token_seconds_count")
    assert finished <= first <= sum(ends.values())
    assert of("request_queue_time_seconds_count") == of("request_prefill_time_seconds_count") == first
    # Each token but those of a sequence's first pass comes some time after another. What the engine emitted for clients that
    # had gone, nobody has measured.
    assert of("inter_token_latency_seconds_count") <= stats.emitted - first
    assert of("num_requests_running") == of("num_requests_waiting") == of("kv_cache_usage_perc") == 0
    assert of("kv_cache_blocks", state="used") == 0
    assert of("engine_up") == 1


def test_latencies_add_up(tmp_path: Path) -> None:
    """Queue, prefill and decode are the whole, but for the encoding of the prompt; the tokens' gaps are the decoding."""
    llm = slowed(load(tiny(tmp_path), max_sequences=1, speculation="off"), 0.01)
    step = llm.engine.step

    def together() -> object:
        if len(llm.engine.scheduler.sequences) < 2:
            time.sleep(0.001)
            return []
        llm.engine.step = step  # type: ignore[method-assign]
        return step()

    llm.engine.step = together  # type: ignore[method-assign]
    with serving(llm, model_name="tiny") as server:
        threads = [
            threading.Thread(target=server.ask, kwargs={"prompt": prompt, "max_tokens": 40, "ignore_eos": True})
            for prompt in ("ab", "cd")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        now = server.metrics()
        queue, prefill, decode, whole = (
            now[f"specdec:{name}_sum"]
            for name in (
                "request_queue_time_seconds",
                "request_prefill_time_seconds",
                "request_decode_time_seconds",
                "e2e_request_latency_seconds",
            )
        )
        assert queue > 40 * 0.01, "the second had to wait for the first"
        assert queue + prefill + decode <= whole < queue + prefill + decode + 1.0
        assert now["specdec:inter_token_latency_seconds_sum"] == pytest.approx(decode)
        assert now["specdec:generation_tokens_total"] == 80
        assert now["specdec:delivery_seconds_count"] == 2
        assert now["specdec:delivery_seconds_sum"] < decode / 2, "what is sent whole is delivered from its last pass on"


def test_a_dead_engine_is_seen(tmp_path: Path) -> None:
    """C67: engine_up falls to 0, what ran is counted as errors, and the gauges say that nothing runs."""
    llm = held(load(tiny(tmp_path)), 0.01)
    with serving(llm, model_name="tiny") as server:
        connections = [
            call(server, ROUTES[0], {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}) for _ in range(3)
        ]
        server.busy(3)

        def die() -> None:
            raise MemoryError("a test's")

        llm.engine.step = die  # type: ignore[method-assign]
        until(lambda: server.metrics()["specdec:engine_up"] == 0)
        now = server.settled()
        assert now["specdec:request_success_total{error}"] == now["specdec:requests_started_total"] == 3
        assert now["specdec:kv_cache_usage_perc"] == 0
        for connection in connections:
            connection.close()


def test_a_scrape_sees_what_runs(tmp_path: Path) -> None:
    """Times of an answer that is still coming are in the histograms, each once, although they are put there when somebody asks;
    and the engine's numbers are those of now."""
    llm = held(load(tiny(tmp_path), max_sequences=2), 0.005)
    with serving(llm, model_name="tiny") as server:
        body = {"prompt": "ab", "max_tokens": 200, "ignore_eos": True, "stream": True}
        connection = call(server, ROUTES[0], body)
        until(lambda: server.metrics()["specdec:inter_token_latency_seconds_count"] > 5)
        now = server.metrics()
        assert now["specdec:time_to_first_token_seconds_count"] == now["specdec:num_requests_running"] == 1
        assert now["specdec:delivery_seconds_count"] > 2
        emitted = llm.engine.stats.emitted
        assert emitted <= server.metrics()["specdec:generation_tokens_total"]
        connection.close()
        now = server.settled()
        assert now["specdec:inter_token_latency_seconds_count"] < now["specdec:generation_tokens_total"]
        assert now["specdec:request_success_total{abort}"] == 1


def test_a_long_pass_keeps_no_scrape_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the numbers of an earlier one."""
    monkeypatch.setattr(worker, "LOOK_SECONDS", 0.05)
    llm = load(tiny(tmp_path))
    with serving(llm, model_name="tiny") as server:
        going, step = threading.Event(), llm.engine.step

        def long() -> object:
            assert going.wait(PATIENCE)
            return step()

        llm.engine.step = long  # type: ignore[method-assign]
        connection = call(server, ROUTES[0], {"prompt": "ab", "max_tokens": 2, "ignore_eos": True})
        until(lambda: server.server.service.worker.n_open == 1)
        assert server.metrics()["specdec:num_requests_running"] == 0
        going.set()
        assert b"200 OK" in connection.recv(1000)
        assert server.metrics()["specdec:generation_tokens_total"] == 2
        connection.close()
