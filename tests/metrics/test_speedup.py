"""The live estimate of the speed-up against the truth: the same load with speculation off, on a clock that only passes move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from harness import make_engine

from specdec import engine as engine_module
from specdec.config import SamplingParams
from specdec.draft.base import Drafter
from specdec.engine import Engine
from specdec.kernels.portable import PortableKernels
from specdec.metrics.speedup import Pass, Recent, plain
from specdec.metrics.stats import PHASES
from specdec.testing import Adversary, Oracle, TableModel, Thicket
from specdec.types import Draft, Forward, Step

V, LENGTH = 24, 40
FLAT = {1: 10.0, 64: 10.0}
STEEP = {1: 10.0, 64: 640.0}
KNEE = {1: 10.0, 8: 12.0, 64: 96.0}


class Clock:
    """Stands in for the time module within the engine."""

    def __init__(self) -> None:
        self.now = 1.0

    def perf_counter(self) -> float:
        return self.now


def cycle() -> torch.Tensor:
    """[V, V] log-probabilities of a law that says the tokens in order, over and over."""
    logp = torch.full((V, V), -30.0)
    logp[torch.arange(V), (torch.arange(V) + 1) % V] = 0.0
    return logp


def truth(sequence) -> list[int]:
    return [(sequence.tokens[-1] + 1 + i) % V for i in range(min(12, sequence.room))]


def timed(
    monkeypatch: pytest.MonkeyPatch, costs: dict[int, float], drafter: Drafter | None, price: float, at_once: int, prompt: int
) -> tuple[float, Engine]:
    """Seconds that 16 sequences take, at most so many at once, where a pass takes what its rows cost, asking for drafts its
    price for each sequence, and everything else a little."""
    clock = Clock()
    monkeypatch.setattr(engine_module, "time", clock)
    engine = make_engine(
        TableModel(cycle(), 256),
        PortableKernels(),
        drafter=drafter,
        max_sequences=at_once,
        pass_seconds=costs,
        prefix_cache=False,
    )
    forward, next_, judge = engine._runner.forward, engine.scheduler.next, engine.acceptance.verdict

    def slow_forward(step: Step) -> Forward:
        clock.now += engine.costs.seconds(step.n_rows)
        return forward(step)

    def slow_next():
        clock.now += 0.3
        return next_()

    def slow_judge(span, logits, first, chosen):
        verdict = judge(span, logits, first, chosen)
        clock.now += 0.05 * (1 + len(verdict.path))
        return verdict

    monkeypatch.setattr(engine._runner, "forward", slow_forward)
    monkeypatch.setattr(engine.scheduler, "next", slow_next)
    monkeypatch.setattr(engine.acceptance, "verdict", slow_judge)
    if drafter:
        propose = drafter.propose

        def slow_propose(sequences: Sequence, budgets: Sequence[int]) -> list[Draft]:
            clock.now += price * len(sequences)
            return propose(sequences, budgets)

        monkeypatch.setattr(drafter, "propose", slow_propose)
    for i in range(16):
        text = [(i + j) % V for j in range(prompt)]
        engine.add(text, SamplingParams(max_tokens=LENGTH - i % 7), frozenset(), seed=i)
    began = clock.now
    while engine.has_work:
        engine.step()
    return clock.now - began, engine


COSTS = {"flat": FLAT, "steep": STEEP, "knee": KNEE}


@cache
def timed_off(costs: str, at_once: int, prompt: int) -> tuple[float, Engine]:
    """With speculation off, once for all drafters."""
    with pytest.MonkeyPatch.context() as patch:
        return timed(patch, COSTS[costs], None, 0.0, at_once, prompt)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("at_once", "prompt"), [(1, 1), (6, 1), (6, 40)])
@pytest.mark.parametrize(
    ("make", "price"),
    [(lambda: Oracle(truth), 0.5), (lambda: Thicket(truth, V, 5), 1.5), (lambda: Adversary(truth, V), 1.0)],
    ids=["right", "mixed", "wrong"],
)
def test_the_estimate_is_the_truth(
    monkeypatch: pytest.MonkeyPatch,
    costs: str,
    at_once: int,
    prompt: int,
    make: Callable[[], Drafter],
    price: float,
) -> None:
    """What the same load takes with speculation off: whatever rows cost, alone and in a batch, with prompts to read, with
    drafts that are right, mixed, or always wrong (which makes it slower). One at a time it is exact; in a batch it is within
    12 %, since with speculation the last sequences are left alone at other times than without."""
    plain, off = timed_off(costs, at_once, prompt)
    spent, on = timed(monkeypatch, COSTS[costs], make(), price, at_once, prompt)
    assert sum(on.stats.seconds.values()) == pytest.approx(spent)
    assert on.stats.emitted == off.stats.emitted
    assert on.stats.speedup == pytest.approx(plain / spent, rel=0.12 if at_once > 1 else 0.001)
    assert off.stats.speedup == pytest.approx(1.0)


def done(**parts: float) -> Pass:
    """A pass of which nothing is known but this."""
    spent = tuple(parts.pop(phase, 0.0) for phase in PHASES)
    nothing = dict.fromkeys(("rows", "sequences", "reading", "drafted", "emitted"), 0)
    return Pass(**{**nothing, **parts}, spent=spent)  # type: ignore[arg-type]


def test_a_sequences_own_estimate() -> None:
    """What one sequence of a batch would have waited: a pass for each of its tokens, while all tokens together need their mean
    number of passes."""
    both = done(rows=12, sequences=2, drafted=10, emitted=6, draft=1.0, forward=12.0, verify=0.6, host=0.4)
    one = 12.0 * 2 / 12 + 0.6 * 2 / 6 + 0.4
    assert plain(both, float).seconds(both.plain_passes) == pytest.approx(3 * one)
    assert plain(both, float).seconds(5) == pytest.approx(5 * one)
    assert plain(both, float).seconds(1) == pytest.approx(one)


def test_reading_prompts_counts_on_both_sides() -> None:
    """A pass that only reads takes as long either way, what drafters did in it apart; a mixed one shares its rows out."""
    assert plain(done(rows=100, reading=3, draft=0.5, forward=9.0, host=0.1), float).seconds(1) == pytest.approx(9.1)
    mixed = done(rows=100, sequences=1, reading=1, emitted=1, forward=10.0, verify=0.2, host=0.1)
    assert plain(mixed, float).seconds(mixed.plain_passes) == pytest.approx(mixed.seconds)


def test_without_drafts_reading_hides_behind_decoding() -> None:
    """One sequence gets 7 tokens while another reads: without drafts 8 places are needed, and 2 are filled by each pass."""
    mixed = done(rows=24, sequences=1, reading=1, drafted=7, emitted=7, forward=10.0)
    assert plain(mixed, lambda rows: 1.0).seconds(mixed.plain_passes) == pytest.approx(40.0)


def test_recent_figures_fade() -> None:
    """Before anything ran they are 1 and 0; later they follow what is going on, and forget what was a long time ago."""
    recent = Recent(memory=10.0)
    assert (recent.speedup, recent.tokens_per_pass) == (1.0, 0.0)
    recent.add(1.0, 3.0, 2, 8)
    assert (recent.speedup, recent.tokens_per_pass) == (3.0, 4.0)
    for _ in range(100):
        recent.add(1.0, 1.0, 1, 1)
    assert recent.speedup == pytest.approx(1.0, abs=0.01)
    assert recent.tokens_per_pass == pytest.approx(1.0, abs=0.01)
