"""Draws what the Grafana dashboard shows of a server under load: each panel's own queries, answered by a real Prometheus.

    python bench/dashboard_image.py --seconds 90 --image docs/images/dashboard.png

Needs the package prometheus (apt-get install prometheus) and the extra ``bench``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter
from PIL import Image

from specdec.bench import prompts
from specdec.config import DEFAULT_MODEL, ServeConfig
from specdec.llm import LLM
from specdec.serve.server import Server

DASHBOARD = Path(__file__).parents[1] / "deploy/grafana/specdec.json"
ADDRESS = "127.0.0.1:9099"
WINDOW, STEP = 10, 1.0
UNITS = {"s": "s", "tps": "tokens/s", "reqps": "req/s", "x": "x"}
"""Short names of Grafana's units; counts have none."""


def load(server: Server, n: int, tokens: int, over: threading.Event) -> None:
    """So many clients with prompts of all tasks, every other one for streams; now and then they ask for what is refused."""
    texts = [prompt.request for prompt in prompts.load(prompts.DEFAULT)]

    def client(seed: int) -> None:
        rng = random.Random(seed)
        while not over.is_set():
            body = {"messages": [{"role": "user", "content": rng.choice(texts)}], "max_tokens": rng.randint(8, tokens)}
            body["stream"] = seed % 2 == 0
            if rng.random() < 0.1:
                body["max_tokens"] = 0
            request = urllib.request.Request(f"{server.address}/v1/chat/completions", json.dumps(body).encode())
            try:
                urllib.request.urlopen(request).read()
            except urllib.error.HTTPError as error:
                if error.code != 400 and not over.is_set():
                    raise
            over.wait(rng.expovariate(4.0))

    for seed in range(n):
        threading.Thread(target=client, args=(seed,)).start()
        over.wait(2.0)  # one after the other, so that the load is seen to grow


def ask(query: str, start: float, end: float) -> list[dict[str, Any]]:
    """The series of a query over a time."""
    given = urllib.parse.urlencode({"query": query, "start": start, "end": end, "step": STEP})
    with urllib.request.urlopen(f"http://{ADDRESS}/api/v1/query_range?{given}") as answer:
        series: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return series


def scale(axis: Axes, unit: str) -> None:
    """The axis of values from zero, with the unit as Grafana shows it."""
    least = 0.0 if axis.dataLim.ymax > 0 else 1.0
    axis.set_ylim(0, 1.05 * max(axis.get_ylim()[1], least))
    if unit == "percentunit":
        axis.yaxis.set_major_formatter(PercentFormatter(1))
    elif unit == "bytes":
        axis.yaxis.set_major_formatter(lambda value, _: f"{value / 2**20:.0f} MiB")
    elif unit in UNITS:
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g} {UNITS[unit]}")


def draw(start: float, end: float, image: Path, about: str) -> None:
    """One small graph per panel, in the dashboard's order."""
    panels = [panel for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"] if panel["type"] != "row"]
    figure, axes = plt.subplots(
        math.ceil(len(panels) / 3), 3, figsize=(13, 2.3 * math.ceil(len(panels) / 3)), layout="constrained"
    )
    for panel, axis in zip(panels, axes.flat, strict=False):
        for target in panel["targets"]:
            query = (
                target["expr"].replace("$__rate_interval", f"{WINDOW}s").replace("$model_name", ".*").replace("$instance", ".*")
            )
            for one in ask(query, start, end):
                label = target["legendFormat"]
                for name, value in one["metric"].items():
                    label = label.replace("{{" + name + "}}", value)
                points = [(float(at) - start, float(value)) for at, value in one["values"]]
                axis.plot(*zip(*points, strict=True), label=label, linewidth=1)
        axis.set_title(panel["title"], fontsize=9)
        scale(axis, panel["fieldConfig"]["defaults"]["unit"])
        axis.set_xlim(0, end - start)
        axis.tick_params(labelsize=7)
        if axis.lines:
            axis.legend(fontsize=6, loc="best", frameon=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    figure.suptitle(about, fontsize=10)
    figure.savefig(image, dpi=80)
    drawn = Image.open(image).convert("RGB")
    # Few colours make a small file; by coverage, since thin lines are rare.
    drawn.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(image, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--image", type=Path, required=True)
    options = parser.parse_args()

    up, over = threading.Event(), threading.Event()
    llm = LLM(options.model, max_sequences=3, self_test=False)
    server = Server(llm, ServeConfig(), "127.0.0.1", 0, lambda address: up.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    up.wait()
    with tempfile.TemporaryDirectory() as folder:
        target = server.address.removeprefix("http://")
        (Path(folder) / "prometheus.yml").write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
                    "scrape_configs": [{"job_name": "specdec", "static_configs": [{"targets": [target]}]}],
                }
            )
        )
        command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        with subprocess.Popen([*command, f"--web.listen-address={ADDRESS}", "--log.level=error"]) as process:
            try:
                time.sleep(5)
                start = time.time()
                load(server, options.clients, options.tokens, over)
                time.sleep(max(0.0, options.seconds - (time.time() - start)))
                over.set()
                time.sleep(WINDOW)
                about = f"{llm.name} ({llm.precision}) with {options.clients} clients, seconds since the first one"
                draw(start, time.time(), options.image, about)
            finally:
                over.set()
                process.terminate()
                server.should_exit = True
                thread.join()


if __name__ == "__main__":
    main()
