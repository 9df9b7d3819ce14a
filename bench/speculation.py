"""Speculation off against on, interleaved: the same prompts, the same tokens, fewer passes, and how much less time.

    python bench/speculation.py [--speculation auto] [--max-nodes 8] [--repeats 3] [--json out.json]

Every prompt runs with speculation off and on, in turns, ``--repeats`` times; the fastest run of each counts, since noise on
a shared machine only ever adds. Seconds include reading the prompt. The tokens of all runs must be the same.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

from specdec.config import DEFAULT_MODEL, SamplingParams, SpeculationConfig
from specdec.llm import LLM
from specdec.results import Result

PROMPTS = Path(__file__).with_name("prompts.jsonl")


def measure(off: LLM, on: LLM, prompt: dict[str, Any], params: SamplingParams, repeats: int) -> dict[str, Any]:
    """One prompt, off and on in turns."""
    runs: dict[str, list[Result]] = {"off": [], "on": []}
    messages = [{"role": "user", "content": prompt["prompt"]}]
    for turn in range(repeats):
        order = [("off", off), ("on", on)]
        for name, llm in order if turn % 2 == 0 else order[::-1]:
            if llm.engine.budget:
                llm.engine.budget.clear()  # no drafter may remember the answer from the turn before
            runs[name] += llm.chat(messages, params)
    if len({run.tokens for run in runs["off"] + runs["on"]}) != 1:
        sys.exit(f"{prompt['id']}: speculation changed the tokens")
    best = {name: min(some, key=lambda run: run.seconds) for name, some in runs.items()}
    stats = best["on"].stats
    return {
        **{key: prompt[key] for key in ("id", "kind", "repeats")},
        "prompt_tokens": best["on"].prompt_tokens,
        "tokens": len(best["on"].tokens),
        "passes_off": best["off"].stats["target_passes"],
        "passes_on": stats["target_passes"],
        "seconds_off": best["off"].seconds,
        "seconds_on": best["on"].seconds,
        "decode_seconds_off": best["off"].seconds - best["off"].first_token_seconds,
        "decode_seconds_on": best["on"].seconds - best["on"].first_token_seconds,
        "drafted": stats["drafted"],
        "accepted": stats["accepted"],
        "accepted_by_drafter": stats["accepted_by_drafter"],
        "reached_by_depth": stats["reached_by_depth"],
        "accepted_by_depth": stats["accepted_by_depth"],
        "seconds_by_phase_on": stats["seconds"],
    }


def summary(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Totals over prompts, and the geometric mean of the speed-ups."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update({key: row[key] for key in row if key.endswith(("_off", "_on")) and key != "seconds_by_phase_on"})
        total["tokens"] += row["tokens"]
    return {
        "group": name,
        "prompts": len(rows),
        "tokens_per_pass": total["tokens"] / total["passes_on"],
        "fewer_passes": total["passes_off"] / total["passes_on"],
        "speedup": total["seconds_off"] / total["seconds_on"],
        "speedup_decoding": total["decode_seconds_off"] / max(total["decode_seconds_on"], 1e-9),
        "speedup_geometric": math.exp(sum(math.log(r["seconds_off"] / r["seconds_on"]) for r in rows) / len(rows)),
        "speedup_worst": min(r["seconds_off"] / r["seconds_on"] for r in rows),
        "tokens_per_second_off": total["tokens"] / total["seconds_off"],
        "tokens_per_second_on": total["tokens"] / total["seconds_on"],
    }


def groups(rows: list[dict[str, Any]]) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    for kind in dict.fromkeys(row["kind"] for row in rows):
        yield kind, [row for row in rows if row["kind"] == kind]
    yield "text that repeats itself", [row for row in rows if row["repeats"]]
    yield "free text", [row for row in rows if not row["repeats"]]
    yield "all", rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--speculation", default="auto")
    parser.add_argument("--max-nodes", type=int)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    nodes = {} if arguments.max_nodes is None else {"max_nodes": arguments.max_nodes}
    config = SpeculationConfig.parse(arguments.speculation, **nodes)
    on = LLM(arguments.model, precision=arguments.precision, speculation=config, threads=arguments.threads)
    off = on.without_speculation()
    params = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens, seed=0)
    on.chat([{"role": "user", "content": "Warm up."}], params.replace(max_tokens=8))

    rows = []
    print(f"{'prompt':12} {'tokens':>6} {'passes off/on':>14} {'τ':>5} {'seconds off/on':>15} {'speed-up':>9}  accepted by")
    for line in arguments.prompts.read_text().splitlines():
        row = measure(off, on, json.loads(line), params, arguments.repeats)
        rows.append(row)
        print(
            f"{row['id']:12} {row['tokens']:6} {row['passes_off']:7} /{row['passes_on']:5} "
            f"{row['tokens'] / row['passes_on']:5.2f} "
            f"{row['seconds_off']:8.2f} /{row['seconds_on']:5.2f} {row['seconds_off'] / row['seconds_on']:9.2f}  "
            f"{row['accepted_by_drafter']}",
            flush=True,
        )
    summaries = [summary(name, some) for name, some in groups(rows) if some]
    print(
        f"\n{'':26} {'τ':>5} {'fewer passes':>13} {'speed-up':>9} {'decoding':>9} {'worst':>6} {'tokens/s off':>13} {'on':>6}"
    )
    for s in summaries:
        print(
            f"{s['group']:26} {s['tokens_per_pass']:5.2f} {s['fewer_passes']:13.2f} {s['speedup']:9.2f} "
            f"{s['speedup_decoding']:9.2f} {s['speedup_worst']:6.2f} {s['tokens_per_second_off']:13.1f} "
            f"{s['tokens_per_second_on']:6.1f}"
        )
    if arguments.json:
        settings = {k: v.name if isinstance(v, Path) else v for k, v in vars(arguments).items() if k != "json"}
        settings["kernels"] = on.kernels.name
        result = {"provenance": provenance(), "settings": settings, "summary": summaries, "prompts": rows}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
