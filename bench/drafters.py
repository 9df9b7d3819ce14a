"""Drafters without a model: what a step costs, and how much of a recorded text they would have foreseen.

    python bench/drafters.py time                          microseconds per propose and observe
    python bench/drafters.py replay --text FILE            bytes of a text as tokens; the first half is the prompt
    python bench/drafters.py replay --traces FILE.jsonl    recorded outputs: one {"prompt", "output", "top", "task"} a line

``prompt`` and ``output`` are token ids; ``top``, if there, holds for each output token the target's best successors at
that place, so that token recycling can learn as it does in the engine; without it, it learns the token that came. A replay
has no logits for rejected nodes, from which recycling learns too: its figures are a lower bound. ``task`` groups the report.

``tau`` is mean tokens per pass, ``nodes`` mean drafted nodes per pass, ``gain`` tau over the mean cost of a pass, by the
table ``--cost`` of rows to cost (a straight line in between), drafting itself not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from specdec.config import SamplingParams, SpeculationConfig
from specdec.draft import build
from specdec.draft.base import Drafter, Target
from specdec.metrics.stats import Stats
from specdec.types import ROOT, Draft, Forward, Sequence, Span, Step, Tree, Verdict

if TYPE_CHECKING:
    from specdec.history import History
    from specdec.kv.blocks import BlockTable


@dataclasses.dataclass(frozen=True)
class Trace:
    prompt: list[int]
    output: list[int]
    top: list[list[int]]
    task: str = "text"


@dataclasses.dataclass
class Tally:
    passes: int = 0
    emitted: int = 0
    nodes: int = 0
    cost: float = 0.0
    accepted: dict[str, int] = dataclasses.field(default_factory=dict)
    drafted: dict[str, int] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        by_source = "  ".join(f"{name} {self.accepted.get(name, 0)}/{n}" for name, n in sorted(self.drafted.items()))
        return (
            f"tau {self.emitted / self.passes:5.2f}  nodes {self.nodes / self.passes:5.2f}  "
            f"gain {self.emitted / self.cost:5.2f}  accepted/drafted: {by_source or '-'}"
        )


def sequence(number: int, prompt: list[int], end_tokens: frozenset[int]) -> Sequence:
    """A sequence without a cache: drafters look at its tokens only."""
    table, history = cast("BlockTable", None), cast("History", None)
    return Sequence(number, list(prompt), len(prompt), SamplingParams(), 0, 2**31, end_tokens, table, history, Stats())


def recorded_top(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """In a replay the rows hold the recorded ids themselves, best first."""
    return logits[:, :k], logits[:, :k].long()


def recorded_target(vocab_size: int) -> Target:
    """What drafters that need no model ask of it."""
    return Target(
        cast(Any, SimpleNamespace(shape=SimpleNamespace(vocab_size=vocab_size))),
        cast(Any, SimpleNamespace(top=recorded_top)),
        0,
    )


def replay(drafter: Drafter | None, traces: list[Trace], budget: int, cost: Callable[[int], float]) -> dict[str, Tally]:
    """Decode every trace in turn with drafts checked against what was recorded; tallies by task."""
    tallies: dict[str, Tally] = {}
    for number, trace in enumerate(traces):
        tally = tallies.setdefault(trace.task, Tally())
        row = sequence(number, trace.prompt, frozenset())
        done = 0
        while done < len(trace.output):
            left = len(trace.output) - done
            draft = drafter.propose([row], [min(budget, left - 1)])[0] if drafter else Draft()
            child = {(p, t): n for n, (p, t) in enumerate(zip(draft.tree.parents, draft.tree.tokens, strict=True))}
            node = ROOT
            path: list[int] = []
            while (found := child.get((node, trace.output[done + len(path)]))) is not None:
                node = found
                path.append(node)
            emitted = trace.output[done : done + len(path) + 1]
            tally.passes += 1
            tally.emitted += len(emitted)
            tally.nodes += len(draft)
            tally.cost += cost(1 + len(draft))
            for n, source in enumerate(draft.sources):
                tally.drafted[source] = tally.drafted.get(source, 0) + 1
                tally.accepted[source] = tally.accepted.get(source, 0) + (n in path)
            # What is observed is the accepted path alone: of the other nodes the trace knows no logits.
            m = len(path)
            chain = Draft(Tree(tuple(emitted[:m]), tuple(range(ROOT, m - 1))), tuple(draft.sources[n] for n in path))
            span = Span(row, len(row.tokens) - 1, len(row.tokens), chain)
            row.tokens += emitted
            logits = torch.tensor(trace.top[done : done + m + 1])  # [m + 1, recorded successors]
            if drafter:
                drafter.observe(Step((span,)), Forward(logits, (slice(0, m + 1),)), [Verdict(tuple(range(m)), emitted[-1])])
            done += m + 1
        row.status = "finished"
        if drafter:
            drafter.release(row)
    return tallies


def read_traces(path: Path, k: int) -> list[Trace]:
    traces = []
    for line in path.read_text().splitlines():
        record: dict[str, Any] = json.loads(line)
        output = record["output"]
        top = record.get("top") or [[token] + [-1] * (k - 1) for token in output]
        traces.append(Trace(record["prompt"], output, top, record.get("task", "text")))
    return traces


def read_text(path: Path, k: int) -> list[Trace]:
    tokens = list(path.read_bytes())
    half = len(tokens) // 2
    return [Trace(tokens[:half], tokens[half:], [[token] + [-1] * (k - 1) for token in tokens[half:]])]


def microseconds(drafter: Drafter, vocab_size: int, length: int, passes: int = 200) -> tuple[float, float, float]:
    """Fastest first propose (it reads the prompt), median later propose, median observe, at ``length`` tokens of context.

    The text is drawn from a power law, as words are, with a passage that repeats, so that tails are found.
    """
    generator = np.random.default_rng(0)
    words = (generator.zipf(1.2, size=length + passes) % vocab_size).tolist()
    passage = words[:64]
    for at in range(256, length + passes - 64, 256):
        words[at : at + 64] = passage
    firsts, proposes, observes = [], [], []
    for number in range(5):
        row = sequence(number, words[:length], frozenset())
        start = time.perf_counter()
        drafter.propose([row], [8])
        firsts.append(time.perf_counter() - start)
        for token in words[length:]:
            start = time.perf_counter()
            draft = drafter.propose([row], [8])[0]
            proposes.append(time.perf_counter() - start)
            n = 1 + len(draft)
            span = Span(row, len(row.tokens) - 1, len(row.tokens), draft)
            row.tokens.append(token)
            forward = Forward(torch.arange(n * 8).view(n, 8) % vocab_size, (slice(0, n),))
            start = time.perf_counter()
            drafter.observe(Step((span,)), forward, [Verdict((), token)])
            observes.append(time.perf_counter() - start)
        row.status = "finished"
        drafter.release(row)
    return min(firsts) * 1e6, float(np.median(proposes)) * 1e6, float(np.median(observes)) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "replay"))
    parser.add_argument(
        "--drafters", default="ngram suffix recycling suffix,recycling ngram,recycling", help="spaces between runs"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of SpeculationConfig")
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--cost", default="1:1,4:1.2,8:1.5,16:2.3,32:4")
    arguments = parser.parse_args()
    settings = {name: json.loads(value) for name, value in (item.split("=", 1) for item in arguments.set)}
    rows, costs = zip(*((float(r), float(c)) for r, c in (pair.split(":") for pair in arguments.cost.split(","))), strict=True)

    def cost(n: int) -> float:
        return float(np.interp(n, rows, costs))

    for method in arguments.drafters.split():
        config = SpeculationConfig.parse(method, **settings)
        drafter = build(config, recorded_target(arguments.vocabulary))
        if arguments.what == "time":
            if drafter:
                first, propose, observe = microseconds(drafter, arguments.vocabulary, arguments.context)
                print(f"{method:18} first propose {first:8.0f} us  propose {propose:6.1f} us  observe {observe:6.1f} us")
            continue
        k = config.recycling_successors
        traces = (read_text(arguments.text, k) if arguments.text else []) + (
            read_traces(arguments.traces, k) if arguments.traces else []
        )
        total = Tally()
        for task, tally in sorted(replay(drafter, traces, config.max_nodes, cost).items()):
            print(f"{method:18} {task:9} {tally}")
            for name in ("passes", "emitted", "nodes", "cost"):
                setattr(total, name, getattr(total, name) + getattr(tally, name))
        print(f"{method:18} {'all':9} {total}")


if __name__ == "__main__":
    main()
