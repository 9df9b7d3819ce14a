"""Faults that other engines shipped, replayed through the whole engine under every rule: the law of what comes out.

The target is a chain whose next-token law is a table, so a long run is many independent draws of a known law.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

import pytest
import torch
from harness import FLAT

from specdec import kernels
from specdec.config import EngineConfig, SamplingParams, SpeculationConfig
from specdec.draft.base import Drafter
from specdec.draft.ngram import NgramDrafter
from specdec.engine import Engine
from specdec.testing import TableDrafter, TableModel
from specdec.verify import RULES
from specdec.verify.broken import BROKEN

EXACT = ("coupled", "rejection", "block", "recursive", "multistep", "traversal")
BY_CHANCE = EXACT[1:]
NEVER = -30.0
SHAPES = {"one": (3, 1), "distinct": (2, 2), "repeated": (2, 2)}


@pytest.fixture(scope="module")
def ops():
    return kernels.select(torch.device("cpu"))


def after_every_token(*probabilities: float, width: int | None = None) -> torch.Tensor:
    """[V, V] log-probabilities of a chain; tokens beyond those named do not come."""
    row = torch.full((width or len(probabilities),), NEVER)
    row[: len(probabilities)] = torch.tensor(probabilities).log()
    return row.expand(len(row), -1).contiguous()


def drafter_for(acceptance: str, logp: torch.Tensor) -> TableDrafter:
    draws = RULES[acceptance].siblings
    depth, width = SHAPES[draws or "distinct"]
    return TableDrafter(logp, draws, depth, width)


def generate(
    ops, acceptance: str, target: torch.Tensor, drafter: Drafter | None, params: SamplingParams, n: int, broken: str = ""
) -> list[list[int]]:
    """n tokens in all, of answers of 100: a pass costs what its sequences are long. A broken rule may mimic the right one."""
    config = EngineConfig(
        speculation=SpeculationConfig(drafters=(), acceptance=acceptance),
        self_test=False,
        prefix_cache=False,
        pass_seconds=FLAT,
        max_sequences=16,
        kv_tokens=16 * 160,
    )
    engine = Engine(TableModel(target, 160), ops, config, drafter, BROKEN[broken].rule if broken else None)
    params = params.replace(max_tokens=100, ignore_eos=True)
    got = {engine.add([0], params, frozenset(), seed): list[int]() for seed in range(n // 100)}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            got[delta.sequence_id] += delta.tokens
    assert drafter is None or engine.stats.drafted > 0
    return list(got.values())


def law_of(answers: Many[Many[int]], v: int) -> list[float]:
    counts = torch.bincount(torch.tensor([token for tokens in answers for token in tokens]), minlength=v)
    return (counts / counts.sum()).tolist()


def check(answers: Many[Many[int]], expected: Many[float], within: float) -> None:
    """Total variation; what has no probability must not come at all."""
    found = law_of(answers, len(expected))
    assert sum(abs(a - b) for a, b in zip(found, expected, strict=True)) / 2 < within, found
    assert all(a == 0 for a, b in zip(found, expected, strict=True) if b == 0), found


@pytest.mark.parametrize("acceptance", EXACT)
def test_c05_the_law_does_not_drift_to_the_draft(ops, acceptance: str) -> None:
    """A drafter's row is the law that it drew from, whatever the target filters. Raw rows would give 0.453 and 0.547."""
    target, draft = after_every_token(0.45, 0.35, 0.20), after_every_token(0.35, 0.45, 0.20)
    answers = generate(ops, acceptance, target, drafter_for(acceptance, draft), SamplingParams(top_k=2), 1_500)
    check(answers, (0.5625, 0.4375, 0), 0.04)


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", EXACT)
def test_c17_sampling_settings_hold_on_the_speculative_path(ops, acceptance: str) -> None:
    """A skewed draft over 3,000 steps: neither the argmax, nor a draft that must equal a fresh draw."""
    target, draft = after_every_token(0.5, 0.3, 0.2), after_every_token(0.2, 0.3, 0.5)
    answers = generate(ops, acceptance, target, drafter_for(acceptance, draft), SamplingParams(), 3_000)
    check(answers, (0.5, 0.3, 0.2), 0.03)


@pytest.mark.parametrize("broken", ["odds-of-target", "corrected-from-target"])
def test_a_broken_rule_in_the_engine_would_have_been_seen(ops, broken: str) -> None:
    """By the same check of the same case."""
    acceptance = BROKEN[broken].mimics
    target, draft = after_every_token(0.5, 0.3, 0.2), after_every_token(0.2, 0.3, 0.5)
    answers = generate(ops, acceptance, target, drafter_for(acceptance, draft), SamplingParams(), 1_500, broken)
    with pytest.raises(AssertionError):
        check(answers, (0.5, 0.3, 0.2), 0.03)


@pytest.mark.parametrize("acceptance", EXACT)
def test_c17_filters_hold_on_the_speculative_path(ops, acceptance: str) -> None:
    """top-k, then top-p with the token that crosses its limit kept."""
    target = after_every_token(0.30, 0.22, 0.18, 0.12, 0.08, 0.05, 0.03, 0.02)
    drafter = drafter_for(acceptance, after_every_token(0.02, 0.03, 0.05, 0.08, 0.12, 0.18, 0.22, 0.30))
    params = SamplingParams(temperature=0.7, top_k=5, top_p=0.8)
    check(generate(ops, acceptance, target, drafter, params, 1_000), (0.4708, 0.3023, 0.2269, *[0.0] * 5), 0.05)


@pytest.mark.parametrize("acceptance", EXACT)
def test_c23_a_drafter_that_does_not_draw_is_not_judged_as_if_it_did(ops, acceptance: str) -> None:
    """An argmax judged by its probability of 0.9 would give 0.667."""
    target, draft = after_every_token(0.6, 0.4), after_every_token(0.9, 0.1)
    for drafter in (
        TableDrafter(draft, None, 1, 1),
        TableDrafter(draft, None, 4, 1),
        NgramDrafter(SpeculationConfig(ngram_min=1)),
    ):
        check(generate(ops, acceptance, target, drafter, SamplingParams(), 1_500), (0.6, 0.4), 0.045)


@pytest.mark.parametrize("acceptance", EXACT)
@pytest.mark.parametrize("temperature", [1e-4, 1e-2, 1.0])
def test_c31_a_draft_that_is_the_target_itself_leaves_no_residual(ops, acceptance: str, temperature: float) -> None:
    v = 6
    path = torch.full((v, v), NEVER)
    for token in range(v):
        path[token, (token + 2) % v] = 0
    for target in (path.log_softmax(1), torch.zeros(v, v).log_softmax(1)):
        drafter = drafter_for(acceptance, target)
        answers = generate(ops, acceptance, target, drafter, SamplingParams(temperature=temperature), 400)
        assert all(0 <= token < v for tokens in answers for token in tokens)
        if target[0, 0] < -10:
            assert all(tokens == [(2 * (i + 1)) % v for i in range(len(tokens))] for tokens in answers)


@pytest.mark.parametrize("acceptance", EXACT)
def test_c55_what_the_target_rules_out_never_comes(ops, acceptance: str) -> None:
    """The draft favours the token that the target's top-k removes; a uniform of exactly 0 is in test_rules."""
    target, draft = after_every_token(0.6, 0.3, 0.1), after_every_token(0.05, 0.05, 0.9)
    answers = generate(ops, acceptance, target, drafter_for(acceptance, draft), SamplingParams(top_k=2), 1_000)
    check(answers, (2 / 3, 1 / 3, 0), 0.04)


SETTINGS = {
    "min_p": (SamplingParams(min_p=0.5), (0.625, 0.375, 0)),
    "logit_bias": (SamplingParams(logit_bias={1: math.log(2)}), (0.5 / 1.3, 0.6 / 1.3, 0.2 / 1.3)),
    "bad words": (SamplingParams(bad_words_ids=((2,),)), (0.625, 0.375, 0)),
    "top_k": (SamplingParams(top_k=1), (1, 0, 0)),
    "top_p": (SamplingParams(top_p=0.6), (0.625, 0.375, 0)),
    "temperature": (SamplingParams(temperature=0.5), (0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38)),
}


@pytest.mark.parametrize("acceptance", EXACT)
@pytest.mark.parametrize("setting", SETTINGS)
def test_c59_every_setting_is_applied_with_a_drafter(ops, acceptance: str, setting: str) -> None:
    params, expected = SETTINGS[setting]
    target, draft = after_every_token(0.5, 0.3, 0.2), after_every_token(0.25, 0.35, 0.4)
    check(generate(ops, acceptance, target, drafter_for(acceptance, draft), params, 800), expected, 0.06)


@pytest.mark.parametrize("acceptance", BY_CHANCE)
def test_c59_penalties_see_the_path_of_each_node(ops, acceptance: str) -> None:
    """The law of the second token depends on which the first was: the joint law of many short answers shows it."""
    target, draft = after_every_token(0.5, 0.3, 0.2), after_every_token(0.25, 0.35, 0.4)
    penalty = 1.5
    params = SamplingParams(frequency_penalty=penalty, presence_penalty=0.5)
    drafter = drafter_for(acceptance, draft)
    config = EngineConfig(
        speculation=SpeculationConfig(drafters=(), acceptance=acceptance), self_test=False, pass_seconds=FLAT, max_sequences=64
    )
    engine = Engine(TableModel(target, 64), ops, config, drafter)
    n = 1_000
    got = {engine.add([0], params.replace(max_tokens=2), frozenset(), seed): list[int]() for seed in range(n)}
    while engine.has_work:
        for delta in engine.step():
            got[delta.sequence_id] += delta.tokens
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    expected = torch.empty(3, 3, dtype=torch.float64)
    for first in range(3):
        weights = p.clone()
        weights[first] *= math.exp(-penalty - 0.5)
        expected[first] = p[first] * weights / weights.sum()
    found = torch.zeros(3, 3, dtype=torch.float64)
    for first, second in got.values():
        found[first, second] += 1 / n
    assert float((found - expected).abs().sum()) / 2 < 0.06


@pytest.mark.parametrize("acceptance", EXACT)
def test_c70_log_probabilities_are_the_models_own(ops, acceptance: str) -> None:
    """Whatever is filtered or heated: log 0.5, 0.3 and 0.2."""
    probabilities = (0.5, 0.3, 0.2)
    target, draft = after_every_token(*probabilities), after_every_token(0.25, 0.35, 0.4)
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.1),
        SamplingParams(temperature=2),
        SamplingParams(top_p=0.4),
        SamplingParams(top_k=1),
    ):
        config = EngineConfig(
            speculation=SpeculationConfig(drafters=(), acceptance=acceptance), self_test=False, pass_seconds=FLAT
        )
        engine = Engine(TableModel(target, 64), ops, config, drafter_for(acceptance, draft))
        engine.add([0], params.replace(logprobs=3, max_tokens=24), frozenset(), 0)
        entries = []
        while engine.has_work:
            for delta in engine.step():
                assert [entry.token for entry in delta.logprobs] == list(delta.tokens)
                entries += delta.logprobs
        for entry in entries:
            assert entry.logprob == pytest.approx(math.log(probabilities[entry.token]), abs=1e-5)
            assert [token for token, _ in entry.top] == [0, 1, 2]
            assert [logprob for _, logprob in entry.top] == pytest.approx([math.log(p) for p in probabilities], abs=1e-5)


@pytest.mark.parametrize("acceptance", EXACT)
def test_c101_a_very_large_temperature_flattens_what_is_left(ops, acceptance: str) -> None:
    v = 48
    target, draft = after_every_token(0.9, 0.05, 0.05, width=v), after_every_token(0.1, 0.2, 0.7, width=v)
    drafter = drafter_for(acceptance, draft)
    three = generate(ops, acceptance, target, drafter, SamplingParams(temperature=1e6, top_k=3), 1_000)
    check(three, (*[1 / 3] * 3, *[0.0] * (v - 3)), 0.05)
    whole = generate(ops, acceptance, target, drafter, SamplingParams(temperature=1e6), 2_000)
    assert max(law_of(whole, v)) < 2 / v  # three tokens would have a third each
    check(whole, [1 / v] * v, 0.1)


def test_typical_acceptance_is_off_by_default_and_not_the_targets_law(ops) -> None:
    """So a user who asks for it is told: it is lossy (``stats["lossy"]``), and this is by how much here."""
    assert SpeculationConfig().acceptance == "coupled"
    target, draft = after_every_token(0.5, 0.3, 0.2), after_every_token(0.2, 0.3, 0.5)
    drafter = TableDrafter(draft, None, 2, 1)
    found = law_of(generate(ops, "typical", target, drafter, SamplingParams(), 1_000), 3)
    assert found[2] > 0.5
