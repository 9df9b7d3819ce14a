"""The live estimate of the speed-up against the truth: the same load in turns with speculation and without.

Two engines share the model. Each round gives both the same requests, some at a time, in alternating order; the truth is the
time of all rounds without speculation over that with it, the estimate is what the speculating engine said of itself in the
same rounds. Both emit the same tokens, at temperature 1.

    python bench/live_speedup.py --drafters auto --at-once 1 4 --rounds 6 --json bench/results/live_speedup.json
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec.bench import prompts
from specdec.bench.provenance import provenance
from specdec.config import DEFAULT_MODEL, SamplingParams, SpeculationConfig
from specdec.engine import Engine
from specdec.llm import LLM


def run(llm: LLM, engine: Engine, texts: list[str], tokens: int, at_once: int) -> tuple[float, list[list[int]]]:
    """Seconds for all texts, of which so many run at a time, and what came out."""
    params = SamplingParams(max_tokens=tokens)
    waiting = [llm.lay_out([{"role": "user", "content": text}], {}) for text in texts]
    answers: dict[int, list[int]] = {}
    began = time.perf_counter()
    running = 0
    while waiting or engine.has_work:
        while waiting and running < at_once:
            answers[engine.add(waiting.pop(0), params, llm.end_tokens, 0)] = []
            running += 1
        for delta in engine.step():
            answers[delta.sequence_id] += delta.tokens
            running -= delta.finish_reason is not None
    return time.perf_counter() - began, list(answers.values())


def compare(llm: LLM, plain: Engine, texts: list[str], at_once: int, options: argparse.Namespace) -> dict[str, Any]:
    """The truth and the estimate at so many sequences at once."""
    speculating = llm.engine
    run(llm, plain, texts[:at_once], 8, at_once)
    run(llm, speculating, texts[:at_once], 8, at_once)
    before = speculating.stats.plain_seconds, sum(speculating.stats.seconds.values())
    seconds = {"off": 0.0, "on": 0.0}
    for i in range(options.rounds):
        outputs = {}
        for name in ("off", "on") if i % 2 else ("on", "off"):
            engine = speculating if name == "on" else plain
            engine.forget()
            took, outputs[name] = run(llm, engine, texts, options.tokens, at_once)
            seconds[name] += took
        if outputs["on"] != outputs["off"]:
            raise AssertionError("speculation changed a token")
    truth = seconds["off"] / seconds["on"]
    spent = sum(speculating.stats.seconds.values()) - before[1]
    estimate = (speculating.stats.plain_seconds - before[0]) / spent
    return {
        "at_once": at_once,
        "truth": truth,
        "estimate": estimate,
        "error": estimate / truth - 1,
        "seconds_on": seconds["on"],
        "seconds_off": seconds["off"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--drafters", default="auto")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    llm = LLM(options.model, speculation=options.drafters, max_sequences=max(options.at_once), self_test=False)
    config = replace(llm.config, speculation=SpeculationConfig.parse("off"))
    plain = Engine(llm.engine.model, llm.kernels, config)
    chosen = prompts.select(prompts.load(prompts.DEFAULT), (), options.prompts)
    texts = [prompt.request for prompt in chosen if isinstance(prompt.request, str)]
    rows = []
    for at_once in options.at_once:
        rows.append(compare(llm, plain, texts, at_once, options))
        row = rows[-1]
        print(f"{at_once} at once: truth {row['truth']:.3f}  estimate {row['estimate']:.3f}  error {row['error']:+.1%}")
    if options.json:
        kept = {name: value for name, value in vars(options).items() if name != "json"}
        options.json.write_text(json.dumps({"provenance": provenance(), "settings": kept, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
