"""How much later the playground shows the first token than the API gives it: from the key press to the paint, in Chromium.

The page and a plain HTTP client ask the same server in turn, each time something new of the same length, so that neither
finds the other's prompt in the prefix cache. Exits with 1 where the difference of the medians is over the limit.

    python bench/page_latency.py --rounds 20 --json bench/results/page_latency.json
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Page, sync_playwright

from specdec.bench.provenance import provenance
from specdec.config import DEFAULT_MODEL

LIMIT_MS = 50
MAX_TOKENS = 8

WATCH = """() => {
  window.pressed = null;
  document.addEventListener("keydown", (event) => { if (event.key === "Enter") window.pressed = event.timeStamp; }, true);
  window.shown = () => new Promise((resolve) => {
    const answer = document.querySelector(".answer");
    const observer = new MutationObserver(() => {
      if (!answer.querySelector("span")) return;
      observer.disconnect();
      requestAnimationFrame(() => {  // what is posted in a frame runs once that frame is painted
        const { port1, port2 } = new MessageChannel();
        port1.onmessage = () => resolve(performance.now() - window.pressed);
        port2.postMessage(null);
      });
    });
    observer.observe(answer, { childList: true });
  });
}"""


def prompt(i: int) -> str:
    return f"{i:04d}: which river is the longest one?"


def by_api(address: str, i: int) -> float:
    """Milliseconds from the request to the first frame with a token."""
    body = {"messages": [{"role": "user", "content": prompt(i)}], "temperature": 0, "max_tokens": MAX_TOKENS}
    connection = http.client.HTTPConnection(urlsplit(address).netloc)
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True, "stats": True}))
    response = connection.getresponse()
    while b'"token_sources"' not in (line := response.readline()):
        if not line:
            raise RuntimeError(f"no token came: HTTP {response.status}")
    seconds = time.perf_counter() - began
    response.read()
    connection.close()
    return 1000 * seconds


def by_page(page: Page, i: int) -> float:
    """Milliseconds from the key press to the paint of the first token."""
    page.fill("#prompt", prompt(i))
    page.evaluate("() => { window.first = window.shown(); }")
    page.keyboard.press("Enter")
    milliseconds: float = page.evaluate("() => window.first")
    page.wait_for_function("() => document.getElementById('status').textContent === 'Done.'")
    return milliseconds


def measure(address: str, chromium: str, rounds: int) -> dict[str, Any]:
    api: list[float] = []
    page_times: list[float] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(address)
        page.wait_for_function("() => document.querySelector('[name=speculation]').options.length > 0")
        page.fill("[name=max_tokens]", str(MAX_TOKENS))
        page.evaluate(WATCH)
        page.focus("#prompt")
        for i in range(-2, rounds):  # two to warm up
            times = by_api(address, 2 * i + 1000), by_page(page, 2 * i + 1001)
            if i >= 0:
                api.append(times[0])
                page_times.append(times[1])
        browser.close()
    medians = {"api_ms": statistics.median(api), "page_ms": statistics.median(page_times)}
    fastest = {"api_ms": min(api), "page_ms": min(page_times)}
    return {**medians, "more_ms": medians["page_ms"] - medians["api_ms"], "fastest": fastest, "rounds": rounds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.chromium is None:
        parser.error("no Chromium found: name one with --chromium")
    command = [sys.executable, "-c", "from specdec.cli import main; main()", "serve", "--port", "0", "-m", arguments.model]
    if arguments.threads:
        command += ["--threads", str(arguments.threads)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split(" at ")[1].split("/v1")[0]
            result = measure(address, arguments.chromium, arguments.rounds)
        finally:
            server.terminate()
    result["within_limit"] = result["more_ms"] <= LIMIT_MS
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps({**provenance(), "limit_ms": LIMIT_MS, **result}, indent=2) + "\n")
    return 0 if result["within_limit"] else 1


if __name__ == "__main__":
    sys.exit(main())
