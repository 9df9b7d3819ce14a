"""From single requests to the figures of a task.

A request is measured in several turns; the median over the turns stands for it, so that a disturbance does not count. The
tokens of all requests over the sum of their seconds are then the tokens per second of the task: a slow request weighs as
much as it costs.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.bench.result import ALL, Summary, Timing


def gaps(deliveries: Sequence[tuple[float, int]]) -> dict[str, float | None]:
    """Quantiles of the seconds between a token and the one before it, as a client sees them.

    Args:
        deliveries: time and number of tokens of each delivery. A burst comes at one moment: its first token has waited
            since the delivery before, its others have waited for nothing.

    Returns:
        ``p50`` and ``p99``; None where fewer than two tokens came.
    """
    waits: list[float] = []
    for i, (moment, tokens) in enumerate(deliveries):
        waits += [moment - deliveries[i - 1][0]] if i else []
        waits += [0.0] * (tokens - 1)
    return {"p50": quantile(waits, 0.50), "p99": quantile(waits, 0.99)}


def quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value that at least the share ``q`` of the values does not exceed; None for no values."""
    ordered = sorted(values)
    rank = -(-len(ordered) * round(q * 1000) // 1000)
    return ordered[max(rank, 1) - 1] if ordered else None


def summarise(runs: Iterable[Timing], modes: Sequence[str]) -> list[Summary]:
    """A row per temperature, mode and task, and one of all tasks; speed-ups are against the first mode."""
    runs = list(runs)
    rows: list[Summary] = []
    for temperature in dict.fromkeys(run.temperature for run in runs):
        for task in [*dict.fromkeys(run.task for run in runs), ALL]:
            base: _Total | None = None
            for mode in modes:
                mine = [r for r in runs if (r.mode, r.temperature) == (mode, temperature) and task in (r.task, ALL)]
                if not mine:
                    continue
                total = _Total.of(mine)
                base = base or (total if mode == modes[0] else None)
                rows.append(_row(mode, task, temperature, mine, total, base))
    return sorted(rows, key=lambda row: (row.temperature, modes.index(row.mode)))


@dataclass(frozen=True, slots=True)
class _Total:
    """Sums over prompts of the medians over turns."""

    prompts: int
    tokens: float
    seconds: float
    later_tokens: float
    """Those after the first, where it is known when the first came."""
    later_seconds: float

    @classmethod
    def of(cls, runs: list[Timing]) -> _Total:
        tokens = seconds = later_tokens = later_seconds = 0.0
        prompts = _by_prompt(runs)
        for turns in prompts:
            tokens += statistics.median(run.tokens for run in turns)
            seconds += statistics.median(run.seconds for run in turns)
            known = [run for run in turns if run.first_token_seconds is not None and run.tokens > 1]
            if known:
                later_tokens += statistics.median(run.tokens - 1 for run in known)
                later_seconds += statistics.median(run.seconds - (run.first_token_seconds or 0) for run in known)
        return cls(len(prompts), tokens, seconds, later_tokens, later_seconds)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float | None:
        return self.later_tokens / self.later_seconds if self.later_seconds else None


def _row(mode: str, task: str, temperature: float, runs: list[Timing], total: _Total, base: _Total | None) -> Summary:
    decoding, base_decoding = total.decode_rate, base.decode_rate if base else None
    tau, by_depth = acceptance([run.stats for run in runs if run.stats])
    return Summary(
        mode=mode,
        task=task,
        prompts=total.prompts,
        tokens_per_second=total.rate,
        decode_tokens_per_second=decoding,
        first_token_seconds=_typical(runs, lambda run: run.first_token_seconds),
        gap_p50=_typical(runs, lambda run: run.gaps["p50"]),
        gap_p99=_typical(runs, lambda run: run.gaps["p99"]),
        tau=tau,
        acceptance_by_depth=by_depth,
        speedup=total.rate / base.rate if base else None,
        speedup_decoding=decoding / base_decoding if decoding and base_decoding else None,
        temperature=temperature,
    )


def acceptance(counted: Sequence[Mapping[str, Any]]) -> tuple[float | None, tuple[float, ...] | None]:
    """τ, and accepted over reached by depth, of sequences' counters together; None where there are none."""
    passes = sum(stats["target_passes"] for stats in counted)
    if not passes:
        return None, None
    reached: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for stats in counted:
        reached.update(dict(enumerate(stats["reached_by_depth"])))
        accepted.update(dict(enumerate(stats["accepted_by_depth"])))
    depths = range(max((depth for depth in reached if reached[depth]), default=-1) + 1)
    tau = sum(stats["emitted"] for stats in counted) / passes
    return tau, tuple(accepted[depth] / reached[depth] if reached[depth] else 0.0 for depth in depths)


def _typical(runs: list[Timing], value: Callable[[Timing], float | None]) -> float | None:
    """Median over prompts of the median over turns; None where no run knows it."""
    medians = []
    for turns in _by_prompt(runs):
        known = [number for run in turns if (number := value(run)) is not None]
        medians += [statistics.median(known)] if known else []
    return statistics.median(medians) if medians else None


def _by_prompt(runs: list[Timing]) -> list[list[Timing]]:
    groups: dict[str, list[Timing]] = {}
    for run in runs:
        groups.setdefault(run.prompt, []).append(run)
    return list(groups.values())
