"""Every drafter on its own, and those of ``auto`` together: what it foresees, and what that is worth on this machine.

    python bench/drafter_table.py --trained eagle3=DIR medusa=DIR --limit 12 --json bench/results/drafters.json

Each row is measured as ``specdec bench`` does, off and on in turns over the same prompts. Where rows are dear, few drafted
tokens are verified, and little is seen of what a drafter could foresee; so each drafter also runs with passes declared free,
where all that it drafts is verified: that τ and that acceptance belong to the drafter and not to the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from specdec.bench import prompts as files
from specdec.bench.provenance import provenance
from specdec.bench.result import ALL, MODES
from specdec.bench.run import Plan, measure
from specdec.bench.summary import acceptance
from specdec.config import DEFAULT_MODEL, SamplingParams, SpeculationConfig
from specdec.engine import Engine
from specdec.llm import LLM

UNTRAINED = ("ngram", "suffix", "recycling", "suffix,recycling")
FREE = {1: 0.01, 64: 0.01}
"""Seconds of a pass by its rows, as if rows cost nothing and drafting next to nothing."""


def row(label: str, llm: LLM, prompts: list[files.Prompt], plan: Plan) -> list[dict[str, Any]]:
    """A drafter's figures, one entry per temperature."""
    report = measure(llm, prompts, plan)
    found = []
    for temperature in plan.temperatures:
        off, on = (report.row(mode, ALL, temperature) for mode in MODES)
        assert off
        assert on
        together = [report.throughput(mode, temperature) for mode in MODES]
        found.append(
            {
                "drafter": label,
                "temperature": temperature,
                "in_flight": plan.concurrency,
                "tau": on.tau,
                "decoding": on.speedup_decoding,
                "whole": together[1] / together[0] if together[0] and together[1] else on.speedup,
                "accepted_at_depth": on.acceptance_by_depth,
            }
        )
    return found


def foreseen(label: str, llm: LLM, prompts: list[files.Prompt], params: SamplingParams) -> dict[str, Any]:
    """What a drafter foresees if every row is free."""
    free = dataclasses.replace(llm.config, pass_seconds=FREE)
    llm.engine = Engine(llm.engine.model, llm.kernels, free, llm.engine.drafter)
    llm.engine.forget()  # what earlier runs of the same prompts taught
    taus: dict[str, float] = {}
    everything = []
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        ids = [prompt.encode(llm.tokenizer) for prompt in prompts if prompt.task == task]
        stats = [result.stats for one in ids for result in llm.generate([one], params)]  # one at a time
        tau, _ = acceptance(stats)
        taus[task] = tau or 1.0
        everything += stats
    tau, by_depth = acceptance(everything)
    return {
        "drafter": label, "temperature": params.temperature, "tau": tau, "tau_by_task": taus, "accepted_at_depth": by_depth,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--trained", nargs="*", default=[], metavar="LABEL=DRAFTER", help="folders of trained drafters")
    parser.add_argument("--untrained", nargs="*", default=list(UNTRAINED), help="drafters without weights")
    parser.add_argument("--prompts", type=Path, default=files.DEFAULT)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    prompts = files.select(files.load(arguments.prompts), (), arguments.limit)
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens, seed=0)
    alone = Plan((0.0, 1.0), params, 1, 1)
    many = Plan((0.0,), params, 8, 1)
    kinds = [(name, name, None) for name in arguments.untrained]
    for label, path in (item.split("=", 1) for item in arguments.trained):
        kinds += [(label, "trained", path), (f"auto with {label}", "auto", path)]
    measured, free = [], []
    for label, method, drafter in kinds:
        speculation = SpeculationConfig.parse(method, **({"trained": drafter} if drafter else {}))
        llm = LLM(arguments.model, speculation=speculation, self_test=False, max_sequences=8)
        measured += row(label, llm, prompts, alone) + row(label, llm, prompts, many)
        free += [foreseen(label, llm, prompts, params.replace(temperature=t)) for t in alone.temperatures]
        print(label, *(f"T={m['temperature']:g} x{m['in_flight']}: {m['whole']:.2f}" for m in measured[-3:]))
        print(f"    tau with free rows {free[-2]['tau']:.2f}, {free[-1]['tau']:.2f}", flush=True)
        result = {
            "provenance": provenance(model=arguments.model, prompts=len(prompts), max_tokens=arguments.max_tokens),
            "measured": measured,
            "free": free,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
