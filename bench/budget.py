"""What the budget makes of recorded texts, in modelled time: drafts are real, the seconds of passes come from given curves.

    python bench/budget.py --traces FILE.jsonl [--rows 0.03 0.10 0.20] [--pass-ms 4] [--draft-ms 0.3] [--json out.json]

Traces are those of bench/drafters.py. A pass of M rows takes ``pass-ms * (1 + rows * (M - 1))``, a drafter that is asked
its share of ``draft-ms``, everything else ``host-ms``. Three ways of decoding are compared: *off*; *fixed*, which asks for
every pass and verifies all that is proposed up to ``--max-nodes``; and *budget*. ``tau`` is tokens per pass, ``rows`` drafted
rows per pass, ``asks`` the share of passes for which a drafter was asked, ``speed`` the modelled time of off over this one's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence as Many
from pathlib import Path

import torch
from drafters import Trace, read_traces, recorded_target, sequence

from specdec.bench.provenance import provenance
from specdec.config import SpeculationConfig
from specdec.draft import build
from specdec.draft.base import Drafter
from specdec.draft.budget import Budget
from specdec.draft.merge import Merge
from specdec.metrics.stats import Stats
from specdec.runner.cost import Costs
from specdec.types import ROOT, Draft, Forward, Sequence, Span, Step, Tree, Verdict

SHARES = {"suffix": 2.0, "recycling": 1.0, "ngram": 0.2}
"""How the time of asking is divided among drafters."""


class Clock:
    """Seconds that pass only where somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(Drafter):
    """A drafter whose asking takes a given time."""

    def __init__(self, inner: Drafter, clock: Clock, seconds: float) -> None:
        self._inner, self._clock, self._seconds = inner, clock, seconds
        self.name, self.taps, self.thrifty = inner.name, inner.taps, inner.thrifty

    def propose(self, sequences: Many[Sequence], budgets: Many[int]) -> list[Draft]:
        self._clock.now += self._seconds * len(sequences)
        return self._inner.propose(sequences, budgets)

    def observe(self, step: Step, forward: Forward, verdicts: Many[Verdict | None]) -> None:
        self._inner.observe(step, forward, verdicts)

    def release(self, sequence: Sequence) -> None:
        self._inner.release(sequence)


@dataclasses.dataclass
class Tally:
    passes: int = 0
    emitted: int = 0
    rows: int = 0
    asks: int = 0
    seconds: float = 0.0
    off: float = 0.0

    def add(self, other: Tally) -> None:
        for f in dataclasses.fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    @property
    def speed(self) -> float:
        return self.off / self.seconds

    def __str__(self) -> str:
        n = self.passes
        return f"tau {self.emitted / n:5.2f}  rows {self.rows / n:5.2f}  asks {self.asks / n:4.2f}  speed {self.speed:5.2f}"


@dataclasses.dataclass(frozen=True)
class Setting:
    method: str
    settings: dict[str, object]
    max_nodes: int
    curve: dict[int, float]
    draft: float
    host: float
    vocabulary: int


def drafter_of(setting: Setting, clock: Clock) -> Drafter:
    config = SpeculationConfig.parse(setting.method, **setting.settings)
    built = build(config, recorded_target(setting.vocabulary))
    assert built is not None
    parts = built.drafters if isinstance(built, Merge) else (built,)
    whole = sum(SHARES[part.name] for part in parts)
    timed = [Timed(part, clock, setting.draft * SHARES[part.name] / whole) for part in parts]
    return Merge(timed) if len(timed) > 1 else timed[0]


def replay(traces: Many[Trace], setting: Setting, budgeted: bool) -> list[Tally]:
    """Decode every trace in turn; one tally each."""
    clock, costs = Clock(), Costs(setting.curve, fixed=True)
    drafter = drafter_of(setting, clock)
    budget = Budget(drafter, costs, Stats(), clock) if budgeted else None
    tallies = []
    for number, trace in enumerate(traces):
        row = sequence(number, trace.prompt, frozenset())
        tally = Tally(off=len(trace.output) * (costs.seconds(1) + setting.host))
        started, done = clock.now, 0
        while done < len(trace.output):
            limit = min(setting.max_nodes, len(trace.output) - done - 1)
            before = row.stats.quiet_passes
            if budget:
                (draft,) = budget.propose([row], [limit], 1)
            else:
                (draft,) = drafter.propose([row], [limit])
            child = {edge: n for n, edge in enumerate(zip(draft.tree.parents, draft.tree.tokens, strict=True))}
            node = ROOT
            path: list[int] = []
            while (found := child.get((node, trace.output[done + len(path)]))) is not None:
                node = found
                path.append(node)
            m = len(path)
            emitted = trace.output[done : done + m + 1]
            clock.now += costs.seconds(1 + len(draft)) + setting.host
            # What is observed is the accepted path alone: of the other nodes the trace knows no logits.
            chain = Draft(Tree(tuple(emitted[:m]), tuple(range(ROOT, m - 1))), tuple(draft.sources[n] for n in path))
            step = Step((Span(row, len(row.tokens) - 1, len(row.tokens), chain),))
            row.tokens += emitted
            forward = Forward(torch.tensor(trace.top[done : done + m + 1]), (slice(0, m + 1),))
            (budget or drafter).observe(step, forward, [Verdict(tuple(range(m)), emitted[-1])])
            if budget:
                costs.follow(1 + len(draft), costs.seconds(1 + len(draft)))
                budget.follow(setting.host)
            done += m + 1
            tally.passes += 1
            tally.emitted += m + 1
            tally.rows += len(draft)
            tally.asks += row.stats.quiet_passes == before
        tally.seconds = clock.now - started
        row.status = "finished"
        (budget or drafter).release(row)
        tallies.append(tally)
    return tallies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--rows", type=float, nargs="*", default=[0.0, 0.03, 0.10, 0.20], help="cost of an extra row")
    parser.add_argument("--pass-ms", type=float, default=4.0)
    parser.add_argument("--draft-ms", type=float, default=0.3)
    parser.add_argument("--host-ms", type=float, default=0.25)
    parser.add_argument("--drafters", default="auto", help="spaces between runs")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of SpeculationConfig")
    parser.add_argument("--max-nodes", type=int, nargs="*", default=[8, 16])
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--brief", action="store_true", help="totals only")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    settings = {name: json.loads(value) for name, value in (item.split("=", 1) for item in arguments.set)}
    traces = read_traces(arguments.traces, 8)
    results = []
    for method in arguments.drafters.split():
        for nodes in arguments.max_nodes:
            for rows in arguments.rows:
                base = arguments.pass_ms / 1e3
                curve = {1: base, 65: base * (1 + 64 * rows)}
                setting = Setting(
                    method, settings, nodes, curve, arguments.draft_ms / 1e3, arguments.host_ms / 1e3, arguments.vocabulary
                )
                for name, budgeted in (("fixed", False), ("budget", True)):
                    tallies = replay(traces, setting, budgeted)
                    tasks = dict.fromkeys(trace.task for trace in traces)
                    for task in [*([] if arguments.brief else tasks), "all"]:
                        total = Tally()
                        for trace, tally in zip(traces, tallies, strict=True):
                            if task in ("all", trace.task):
                                total.add(tally)
                        label = f"{method:12} nodes {nodes:2}  row {rows:4.0%}  {name:6} {task:8}"
                        worst = min(
                            tally.speed for trace, tally in zip(traces, tallies, strict=True) if task in ("all", trace.task)
                        )
                        print(f"{label} {total}  worst {worst:5.3f}")
                        results.append(
                            {"drafters": method, "max_nodes": nodes, "row": rows, "way": name, "task": task, "worst": worst}
                            | {"tau": total.emitted / total.passes, "rows": total.rows / total.passes}
                            | {"asks": total.asks / total.passes, "speed": total.speed}
                        )
    if arguments.json:
        kept = {k: v.name if isinstance(v, Path) else v for k, v in vars(arguments).items() if k != "json"}
        arguments.json.write_text(
            json.dumps({"provenance": provenance(), "settings": kept, "results": results}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
