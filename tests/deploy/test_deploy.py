"""The dashboard and the alerts that come with the server, against a real server and a real Prometheus."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from checkpoints import tiny
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from serving import ROUTES, Running, serving, until

from specdec.llm import LLM

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/specdec.json").read_text(encoding="utf-8"))
ALERTS = DEPLOY / "prometheus/alerts.yml"
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
NAME = re.compile(r"\b(?:specdec:|process_)[a-z0-9_]+")

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is not installed: apt-get install prometheus",
)


def queries() -> list[tuple[str, str]]:
    """Every query of the dashboard as Grafana would send it, with the title of its panel."""
    found = []
    for panel in PANELS:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "30s").replace("$model_name", ".*").replace("$instance", ".*")
            assert "$" not in query, query
            found.append((panel["title"], query))
    return found


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return group["rules"]


def test_the_dashboard_is_what_its_source_writes() -> None:
    """Nobody edits the JSON by hand and has it overwritten."""
    spec = importlib.util.spec_from_file_location("dashboard", DEPLOY / "grafana/dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.dashboard() == DASHBOARD


def lost(given: Any, known: Any, at: str = "") -> list[str]:
    """Where something of ``given`` is not in ``known``."""
    if isinstance(given, dict):
        if not isinstance(known, dict):
            return [at]
        return [path for key, value in given.items() for path in lost(value, known.get(key), f"{at}.{key}")]
    if isinstance(given, list):
        if not isinstance(known, list) or len(given) != len(known):
            return [at]
        return [path for i, pair in enumerate(zip(given, known, strict=True)) for path in lost(*pair, f"{at}[{i}]")]
    return [] if given == known else [f"{at}: {given!r} became {known!r}"]


def test_the_dashboard_has_grafanas_schema() -> None:
    """Grafana's own model of a dashboard knows every field and gives back every value; ids are unique; no panels overlap."""
    plugins.register_default_plugins()
    known = json.loads(json.dumps(Dashboard.from_json(DASHBOARD), cls=JSONEncoder))
    assert lost(DASHBOARD, known) == []
    assert lost({**DASHBOARD, "tittle": "x"}, known) == [".tittle: 'x' became None"], "an unknown field would be noticed"
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


class Load:
    """Keeps a server busy with streams, and now and then a request that is refused."""

    def __init__(self, server: Running, n: int) -> None:
        self._server, self._over = server, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(n)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int) -> None:
        with httpx.Client(base_url=self._server.url, timeout=60) as client:
            while not self._over.is_set():
                prompt = f"tick tock {seed % 2} tick tock " * 3
                body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "temperature": 0, "stream": True}
                assert client.post(ROUTES[0], json=body).status_code == 200
                assert client.post(ROUTES[0], json={**body, "max_tokens": 0}).status_code == 400


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    llm = LLM(str(tiny(tmp_path_factory.mktemp("tiny"))), precision="fp32", self_test=False, max_sequences=2)
    with serving(llm, model_name="tiny") as running, Load(running, 3):
        yield running


def test_every_metric_exists(server: Running) -> None:
    """What the dashboard and the alerts ask for is what the server has."""
    until(lambda: server.metrics().get("specdec:requests_refused_total{400}"), 10)
    text = httpx.get(f"{server.url}/metrics").text
    have = set(NAME.findall("\n".join(line for line in text.splitlines() if not line.startswith("#"))))
    asked = set(NAME.findall(json.dumps([query for _, query in queries()] + [rule["expr"] for rule in rules()])))
    assert asked <= have, asked - have


@needs_prometheus
def test_promtool_accepts_the_files() -> None:
    for what, name in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        done = subprocess.run(["promtool", "check", what, str(DEPLOY / "prometheus" / name)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inside = ",".join(f'{key}="{value}"' for key, value in {"instance": "a", "model_name": "m", **labels}.items())
    return {"series": f"{name}{{{inside}}}", "values": values}


FIRES = {
    "SpecdecDown": [series("up", "1 0x30", job="specdec")],
    "SpecdecEngineFailed": [series("specdec:engine_up", "1 0x30")],
    "SpecdecAcceptanceCollapsed": [series("specdec:acceptance_collapsed", "0 1x30", drafter="eagle")],
    "SpecdecSlowerThanPlain": [
        series("specdec:plain_seconds_total", "0+9x30"),
        series("specdec:engine_seconds_total", "0+10x30"),
    ],
    "SpecdecQueueFull": [series("specdec:requests_refused_total", "0+1x30", status="429")],
    "SpecdecErrors": [
        series("specdec:request_success_total", "0+1x30", finished_reason="error"),
        series("specdec:request_success_total", "0+9x30", finished_reason="stop"),
    ],
    "SpecdecFirstTokenSlow": [
        series("specdec:time_to_first_token_seconds_bucket", "0+5x30", le="5"),
        series("specdec:time_to_first_token_seconds_bucket", "0+10x30", le="10"),
        series("specdec:time_to_first_token_seconds_bucket", "0+10x30", le="+Inf"),
    ],
    "SpecdecPreempting": [series("specdec:num_preemptions_total", "0+10x30")],
}
"""What each alert is for, minute by minute."""

QUIET = [
    series("up", "1x30", job="specdec"),
    series("specdec:engine_up", "1x30"),
    series("specdec:acceptance_collapsed", "0x30", drafter="eagle"),
    series("specdec:plain_seconds_total", "0+15x30"),
    series("specdec:engine_seconds_total", "0+10x30"),
    series("specdec:requests_refused_total", "0+1x30", status="400"),
    series("specdec:request_success_total", "0x30", finished_reason="error"),
    series("specdec:request_success_total", "0+9x30", finished_reason="stop"),
    series("specdec:time_to_first_token_seconds_bucket", "0+10x30", le="5"),
    series("specdec:time_to_first_token_seconds_bucket", "0+10x30", le="+Inf"),
    series("specdec:num_preemptions_total", "3x30"),
]
"""A server that does well."""


@needs_prometheus
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """Each on what it is for, none on a server that does well; judged by promtool after 25 minutes."""
    assert set(FIRES) == {rule["alert"] for rule in rules()}

    def fires(name: str, inputs: list[dict[str, str]]) -> bool:
        query = f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)'
        expected = {"expr": query, "eval_time": "25m", "exp_samples": [{"labels": "{}", "value": 1}]}
        tests = {
            "rule_files": [str(ALERTS)],
            "evaluation_interval": "1m",
            "tests": [{"interval": "1m", "input_series": inputs, "promql_expr_test": [expected]}],
        }
        file = tmp_path / f"{name}.yml"
        file.write_text(yaml.safe_dump(tests), encoding="utf-8")
        return subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True).returncode == 0

    for name, inputs in FIRES.items():
        assert fires(name, inputs), f"{name} does not fire"
        assert not fires(name, QUIET), f"{name} fires on a server that does well"


@pytest.fixture(scope="module")
def prometheus(server: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Prometheus with the shipped configuration, but for the address and a shorter interval."""
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copy(ALERTS, folder)
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.removeprefix("http://")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
        "--log.level=error",
    ]
    with subprocess.Popen(command) as process, httpx.Client(base_url=f"http://{address}", timeout=20) as client:
        try:

            def scraped() -> bool:
                try:
                    answer = client.get("/api/v1/query", params={"query": "count_over_time(specdec:engine_up[1m])"})
                except httpx.TransportError:
                    return False
                found = answer.json()["data"]["result"] if answer.status_code == 200 else []
                return bool(found) and float(found[0]["value"][1]) >= 5

            until(scraped, 60)
            yield client
        finally:
            process.terminate()
            process.wait(20)


@needs_prometheus
@pytest.mark.slow
def test_every_panel_shows_something(prometheus: httpx.Client) -> None:
    """Each query of the dashboard, run by a real Prometheus over a server under load, now and as a graph: it is understood, and
    has at least one series with finite values that are not negative."""
    for title, query in queries():
        answer = prometheus.get("/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", (title, answer)
        values = [float(series["value"][1]) for series in answer["data"]["result"]]
        assert any(math.isfinite(value) for value in values), f"{title}: {query} shows nothing"
        assert min(value for value in values if math.isfinite(value)) >= 0, title
        now = time.time()
        graph = prometheus.get("/api/v1/query_range", params={"query": query, "start": now - 10, "end": now, "step": 2}).json()
        assert graph["status"] == "success", (title, graph)


@needs_prometheus
@pytest.mark.slow
def test_every_alert_is_evaluated(prometheus: httpx.Client) -> None:
    """No rule fails, and none fires on a server that does well."""
    (group,) = until(lambda: _evaluated(prometheus), 20)
    assert {rule["name"] for rule in group["rules"]} == set(FIRES)
    for rule in group["rules"]:
        assert rule["health"] == "ok", rule
        assert rule["state"] in ("inactive", "pending"), rule


def _evaluated(prometheus: httpx.Client) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    return groups if all(rule["health"] != "unknown" for group in groups for rule in group["rules"]) else []
