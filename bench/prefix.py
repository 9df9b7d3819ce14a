"""What a request gains from a prefix that an earlier one has had: its time to the first token, against that of the first.

Each round has a cache salt of its own, so the first request of a round finds nothing, and the ones after it find the prefix.
Times are a streaming client's, from the request to the first frame. Exits with 1 where the ratio of the medians is over the
limit.

    python bench/prefix.py --tokens 1000 --rounds 10 --json bench/results/prefix.json
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serve_here import serving

from specdec.bench.prompts import DEFAULT, load
from specdec.bench.provenance import provenance
from specdec.config import DEFAULT_MODEL
from specdec.llm import LLM

LIMIT = 0.15
QUESTIONS = ("What is the first thing said above?", "Who is spoken of above?", "Which numbers occur above?")
"""What follows the prefix; the first one is asked of a cold cache."""


def prefix(llm: LLM, n: int) -> list[int]:
    """Exactly so many tokens of text, taken from the prompts that measurements ask."""
    texts = [prompt.request for prompt in load(DEFAULT) if isinstance(prompt.request, str)]
    ids = itertools.chain.from_iterable(llm.tokenizer.encode(text, add_special=False) for text in itertools.cycle(texts))
    return list(itertools.islice(ids, n))


def first_token(address: str, prompt: list[int], salt: str) -> tuple[float, int]:
    """Seconds to the first frame, and the tokens found in the prefix cache."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True, "cache_salt": salt}
    connection = http.client.HTTPConnection(urlsplit(address).netloc)
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps({**body, "stream_options": {"include_usage": True}}))
    response = connection.getresponse()
    line = response.readline()
    seconds = time.perf_counter() - began
    frames = [line, *response.read().splitlines()]
    connection.close()
    if response.status != http.client.OK:
        sys.exit(f"the server answered {response.status}: {line.decode(errors='replace')}")
    told = [json.loads(frame.removeprefix(b"data: ")) for frame in frames if frame.startswith(b"data: {")]
    return seconds, int(told[-1]["usage"]["prompt_tokens_details"]["cached_tokens"])


def measure(address: str, shared: list[int], questions: list[list[int]], rounds: int) -> dict[str, Any]:
    """Medians of the cold and the warm requests, and their ratio."""
    cold: list[float] = []
    warm: list[float] = []
    found: list[int] = []
    for number in range(rounds):
        for i, question in enumerate(questions):
            seconds, cached = first_token(address, shared + question, f"round {number}")
            if i == 0 and cached:
                sys.exit(f"a request with a salt of its own found {cached} tokens in the cache")
            (warm if i else cold).append(seconds)
            found += [cached] if i else []
    middle = statistics.median(cold), statistics.median(warm)
    return {
        "cold_seconds": middle[0],
        "warm_seconds": middle[1],
        "ratio": middle[1] / middle[0],
        "ratio_of_fastest": min(warm) / min(cold),
        "fewest_cached_tokens": min(found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=1000, help="length of the prefix")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    llm = LLM(options.model, self_test=False)
    shared = prefix(llm, options.tokens)
    questions = [llm.tokenizer.encode(f"\n{question}\n", add_special=False) for question in QUESTIONS]
    with serving(llm) as server:
        first_token(server.address, shared[:64], "warm-up")
        found = measure(server.address, shared, questions, options.rounds)
    within = found["ratio"] <= LIMIT
    print("  ".join(f"{name} {value:.4g}" for name, value in found.items()), "" if within else f" over the limit of {LIMIT}")
    if options.json:
        result = {
            "provenance": provenance(),
            "prefix_tokens": options.tokens,
            "rounds": options.rounds,
            "limit": LIMIT,
            **found,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.exit(not within)


if __name__ == "__main__":
    main()
