"""Plans from what was measured: the figures that ``specdec.plan`` needs, out of result files."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.bench.result import ALL, MODES, Report, Timing
from specdec.config import ConfigError
from specdec.draft import shape
from specdec.draft.shape import Accuracy, Shape
from specdec.plan import Chain, Mix, Prices, best, chains, least
from specdec.runner.cost import Costs

OFF, ON = MODES

MOST_BATCH = 256
"""Batches beyond this are not looked at for where drafting stops to pay."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The fastest tree, and what to expect of it."""

    shape: Shape
    tokens: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Throttled:
    """What pays for so many sequences in a pass."""

    batch: int
    depth: int
    """Of the fastest chain; 0: drafting does not pay."""
    speedup: float
    least: float
    """The acceptance from which drafting one token would pay."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A measured run beside what is expected of its acceptance and of v(M)."""

    task: str
    temperature: float
    tokens: float
    """τ"""
    expected: float
    """Speed-up of decoding, by the plan."""
    measured: float

    @property
    def error(self) -> float:
        """By how much the plan is above the measurement, as a share of it."""
        return self.expected / self.measured - 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What to expect, and what is best."""

    accuracy: Accuracy
    prices: Prices
    budget: int
    chains: list[Chain]
    tree: Tree | None
    """None where only one candidate of each depth is known: the best tree is a chain then."""
    throttle: list[Throttled]
    stops: int | None
    """The least number of sequences from which on drafting does not pay; None where it pays up to ``MOST_BATCH``."""

    @property
    def best(self) -> Chain:
        return best(self.chains)


def make(accuracy: Accuracy, prices: Prices, *, budget: int, batches: Sequence[int]) -> Plan:
    """Plan for drafters of this accuracy by depth and rank (``draft/shape``).

    Args:
        budget: most drafted tokens of a pass, for each sequence.
        batches: numbers of sequences to look at.
    """
    alone = [ranks[0] for ranks in accuracy][:budget]

    def throttled(batch: int) -> Throttled:
        found = best(chains(alone, prices, batch))
        return Throttled(batch, found.depth, found.speedup, least(prices, batch))

    pays = [batch for batch in range(1, MOST_BATCH + 1) if throttled(batch).depth]
    last = max(pays, default=0)
    tree = _tree(accuracy, prices, budget) if any(len(ranks) > 1 for ranks in accuracy) else None
    return Plan(
        accuracy=accuracy,
        prices=prices,
        budget=budget,
        chains=chains(alone, prices),
        tree=tree,
        throttle=[throttled(batch) for batch in batches],
        stops=None if last == MOST_BATCH else last + 1,
    )


def _tree(accuracy: Accuracy, prices: Prices, budget: int) -> Tree:
    found = shape.fitted(accuracy, budget, prices.step)
    tokens = shape.expected_tokens(found, accuracy)
    return Tree(found, tokens, tokens / prices.ratio(max(found.depths, default=0), len(found)))


@dataclass(frozen=True, slots=True)
class Observed:
    """What a result of ``specdec bench`` says of drafting, over the runs of one task and temperature."""

    acceptance: tuple[float, ...]
    """α by depth, where a draft reached it."""
    mix: Mix
    host: float
    """Of a plain step, what its pass did not take."""
    ask: float
    """Drafting in a pass for which drafters were asked, in plain steps."""
    beside: float
    """All that a step did beside its pass, drafting and longer verification included, in plain steps."""


def observe(report: Report, task: str = ALL, temperature: float | None = None) -> Observed:
    """Read a result of ``specdec bench`` with one request in flight.

    Raises:
        ConfigError: the result has no such task or temperature, or does not hold what is needed.
    """
    row = report.row(ON, task, temperature)
    if report.modes != MODES or row is None or not row.acceptance_by_depth:
        tasks, temperatures = ", ".join(report.tasks), ", ".join(f"{t:g}" for t in report.temperatures)
        raise ConfigError(f"a plan needs a task and a temperature with drafts; this result has {tasks} at {temperatures}")
    if report.settings.get("concurrency") != 1:
        raise ConfigError("a plan needs a result with one request in flight (--concurrency 1)")
    off, on = (_runs(report, mode, task, row.temperature) for mode in MODES)
    try:
        plain = sum(run.seconds - (run.first_token_seconds or 0.0) for run in off) / (_sum(off, "target_passes") - len(off))
        passes, drafting = _sum(on, "target_passes"), sum(_stats(run)["seconds"]["draft"] for run in on)
        asked = passes - _sum(on, "quiet_passes")
        host, beside = _beside(off) / plain, _beside(on) / plain
        mix = Mix(*([n / passes for n in _by_depth(on, name)] for name in ("drafted_by_depth", "accepted_by_depth")))
    except (KeyError, ZeroDivisionError) as error:
        raise ConfigError(f"the runs of this result lack what a plan needs: {error}") from error
    if not 0 <= host < 1:
        raise ConfigError(f"the seconds of these runs contradict each other: {host:.0%} of a plain step lie beside its pass")
    return Observed(
        acceptance=row.acceptance_by_depth,
        mix=mix,
        host=host,
        ask=drafting / asked / plain if asked else 0.0,
        beside=beside,
    )


def check(report: Report, costs: Costs) -> list[Checked]:
    """Every task and temperature of a result beside what its acceptance and v(M) let expect; those without drafts left out."""
    found = []
    for temperature in report.temperatures:
        for task in report.tasks:
            row = report.row(ON, task, temperature)
            if row is None or not row.acceptance_by_depth or not row.speedup_decoding:
                continue
            seen = observe(report, task, temperature)
            expected = seen.mix.speedup(Prices(host=seen.host, cost=costs.seconds), seen.beside)
            found.append(Checked(task, temperature, seen.mix.tokens, expected, row.speedup_decoding))
    return found


def costs_of(report: Report) -> Costs:
    """v(M) of a result of ``specdec bench``.

    Raises:
        ConfigError: it was not measured.
    """
    if not report.v:
        raise ConfigError("this result holds no v(M): give the costs of passes in another way")
    try:
        return Costs({int(rows): float(cost) for rows, cost in report.v.items()}, fixed=True)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"v of this result must be costs by rows: {error}") from None


def _runs(report: Report, mode: str, task: str, temperature: float) -> list[Timing]:
    return [r for r in report.runs if (r.mode, r.temperature) == (mode, temperature) and task in (r.task, ALL)]


def _stats(run: Timing) -> Mapping[str, Any]:
    if run.stats is None:
        raise ConfigError(f"the run of {run.prompt} has no counters of the engine")
    return run.stats


def _beside(runs: Sequence[Timing]) -> float:
    """Seconds of a step that its pass did not take, on average."""
    seconds: dict[str, float] = {}
    for run in runs:
        for phase, some in _stats(run)["seconds"].items():
            seconds[phase] = seconds.get(phase, 0.0) + some
    return (sum(seconds.values()) - seconds["forward"]) / _sum(runs, "target_passes")


def _sum(runs: Sequence[Timing], name: str) -> int:
    return sum(_stats(run)[name] for run in runs)


def _by_depth(runs: Sequence[Timing], name: str) -> list[int]:
    """Counts of all runs by depth, depth 1 first."""
    total: Counter[int] = Counter()
    for run in runs:
        total.update(dict(enumerate(_stats(run)[name])))
    return [total[depth] for depth in range(max(total, default=-1) + 1)]


def as_dict(plan: Plan, costs: Costs | None, checked: Sequence[Checked]) -> dict[str, Any]:
    """A plan as plain values."""
    prices = {name: getattr(plan.prices, name) for name in ("draft", "ask", "host")}
    tree = plan.tree and {
        "parents": list(plan.tree.shape.parents),
        "ranks": list(plan.tree.shape.ranks),
        "tokens": plan.tree.tokens,
        "speedup": plan.tree.speedup,
    }
    return {
        "accuracy": [list(ranks) for ranks in plan.accuracy],
        "prices": {**prices, "v": None if costs is None else costs.relative()},
        "budget": plan.budget,
        "chains": [_chain(chain) for chain in plan.chains],
        "best": _chain(plan.best),
        "tree": tree,
        "throttle": [dataclasses.asdict(row) for row in plan.throttle],
        "stops_paying_at": plan.stops,
        "checked": [{**dataclasses.asdict(row), "error": row.error} for row in checked],
    }


def _chain(chain: Chain) -> dict[str, float]:
    return {**dataclasses.asdict(chain), "speedup": chain.speedup}
