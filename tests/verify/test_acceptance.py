"""Rules in the engine: seeds, temperature 0, what is refused at the start, and what a result says of its rule."""

from __future__ import annotations

import itertools

import pytest
import torch
from harness import FLAT, Request, run

from specdec import kernels
from specdec.config import ACCEPTANCES, ConfigError, EngineConfig, SamplingParams, SpeculationConfig
from specdec.draft.merge import Merge
from specdec.draft.ngram import NgramDrafter
from specdec.draft.suffix import SuffixDrafter
from specdec.engine import Engine, RequestError
from specdec.testing import TableDrafter, TableModel
from specdec.types import Speculation
from specdec.verify import RULES

V = 12
BY_CHANCE = [name for name in ACCEPTANCES if RULES[name].keeps != "tokens"]
DRAWN = {"one": (3, 1), "distinct": (2, 2), "repeated": (2, 2)}
"""Depth and width of drafts by how their siblings are drawn."""


@pytest.fixture(scope="module")
def ops():
    return kernels.select(torch.device("cpu"))


def table(seed: int, sharpness: float = 1.0) -> torch.Tensor:
    return torch.log_softmax(sharpness * torch.randn(V, V, generator=torch.Generator().manual_seed(seed)), 1)


def drafter_for(acceptance: str, logp: torch.Tensor) -> TableDrafter:
    draws = RULES[acceptance].siblings
    depth, width = DRAWN[draws or "distinct"]
    return TableDrafter(logp, draws, depth, width)


def engine(ops, acceptance: str, drafter=None, model: torch.Tensor | None = None, **settings) -> Engine:
    speculation = SpeculationConfig(drafters=(), max_nodes=8, acceptance=acceptance)
    config = EngineConfig(speculation=speculation, self_test=False, pass_seconds=FLAT, **settings)
    return Engine(TableModel(table(0) if model is None else model, 512), ops, config, drafter)


def requests(n: int, **params) -> list[Request]:
    return [Request((i % V, 3), SamplingParams(max_tokens=40, **params), seed=i) for i in range(n)]


@pytest.mark.parametrize("acceptance", BY_CHANCE)
def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(ops, acceptance: str) -> None:
    """And another seed others; a draft was really judged."""
    made = [run(engine(ops, acceptance, drafter_for(acceptance, table(1))), requests(6)) for _ in range(2)]
    alone = [run(engine(ops, acceptance, drafter_for(acceptance, table(1))), [request])[0] for request in requests(6)]
    tokens = [answer.tokens for answer in alone]
    assert tokens == [answer.tokens for answer in made[0]] == [answer.tokens for answer in made[1]]
    assert len({tuple(t) for t in tokens}) == 6
    assert 0 < sum(a.stats["accepted"] for a in alone) < sum(a.stats["drafted"] for a in alone)


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_temperature_0_is_plain_decoding_under_every_rule(ops, acceptance: str) -> None:
    plain = run(engine(ops, "coupled"), requests(4, temperature=0, logprobs=2))
    drafted = run(engine(ops, acceptance, drafter_for(acceptance, table(0, 0.5))), requests(4, temperature=0, logprobs=2))
    assert [answer.same for answer in drafted] == [answer.same for answer in plain]
    assert sum(answer.stats["accepted"] for answer in drafted) > 50


@pytest.mark.parametrize("acceptance", [name for name in ACCEPTANCES if name != "greedy"])
def test_without_a_draft_every_rule_is_plain_decoding(ops, acceptance: str) -> None:
    plain = run(engine(ops, "coupled"), requests(4, logprobs=1))
    for drafter in (None, drafter_for(acceptance, table(1))):
        made = engine(ops, acceptance, drafter)
        ids = [
            made.add(list(r.prompt), r.params, r.end_tokens, r.seed, speculation=Speculation(drafters=())) for r in requests(4)
        ]
        tokens: dict[int, list[int]] = {i: [] for i in ids}
        while made.has_work:
            for delta in made.step():
                tokens[delta.sequence_id] += delta.tokens
        assert [tokens[i] for i in ids] == [answer.tokens for answer in plain]


def test_coupled_drafts_change_nothing_and_others_change_tokens(ops) -> None:
    """The promise of the default rule, and that the others do not give it: their results must say which rule it was."""
    plain = run(engine(ops, "coupled"), requests(4))
    for acceptance in ("coupled", "rejection", "recursive", "multistep", "block", "traversal"):
        made = run(engine(ops, acceptance, drafter_for(acceptance, table(1))), requests(4))
        assert ([a.tokens for a in made] == [a.tokens for a in plain]) == (acceptance == "coupled")


def test_results_name_the_rule_and_say_what_is_lossy(ops) -> None:
    for acceptance in ACCEPTANCES[1:]:
        made = engine(ops, acceptance, drafter_for(acceptance, table(1)))
        (answer,) = run(made, requests(1, temperature=0 if acceptance == "greedy" else 1))
        for stats in (answer.stats, made.stats.as_dict()):
            assert stats["acceptance"] == acceptance
            assert stats["lossy"] == (acceptance == "typical")
    (answer,) = run(engine(ops, "coupled", drafter_for("coupled", table(1))), requests(1))
    assert "acceptance" not in answer.stats
    assert "lossy" not in answer.stats


def test_the_greedy_rule_refuses_to_sample(ops) -> None:
    made = engine(ops, "greedy", drafter_for("greedy", table(1)))
    with pytest.raises(RequestError, match="ask for temperature 0"):
        made.add([1, 2], SamplingParams(temperature=0.5), frozenset(), 0)
    assert not made.has_work


@pytest.mark.parametrize("acceptance", [name for name in ACCEPTANCES if RULES[name].keeps == "law"])
def test_drawn_drafts_cannot_be_merged(ops, acceptance: str) -> None:
    drawn = drafter_for(acceptance, table(1))
    merged = Merge([NgramDrafter(SpeculationConfig()), drawn])
    with pytest.raises(ConfigError, match="cannot be merged with those of ngram"):
        engine(ops, acceptance, merged)
    engine(ops, "coupled", merged)
    engine(ops, acceptance, drawn)


def test_drafts_drawn_otherwise_than_the_rule_needs_are_refused(ops) -> None:
    refused = 0
    for acceptance, draws in itertools.product(ACCEPTANCES, ("one", "distinct", "repeated")):
        rule, drafter = RULES[acceptance], TableDrafter(table(1), draws, 2, 1 if draws == "one" else 2)
        if rule.keeps != "law" or draws in ("one", rule.siblings):
            engine(ops, acceptance, drafter)
            continue
        with pytest.raises(ConfigError, match=rf"judges siblings that were drawn as '{rule.siblings}'.*acceptance=coupled"):
            engine(ops, acceptance, drafter)
        refused += 1
    assert refused == 2 * 2 + 3


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_rules_for_chains_judge_the_likeliest_path_of_a_tree_that_was_not_drawn(ops, acceptance: str) -> None:
    """Such a tree is a function of the text, so it may be cut to a chain; at temperature 0 it need not be."""
    logp = table(1)
    tree = TableDrafter(logp, None, 2, 2)
    answers = run(engine(ops, acceptance, tree), requests(3))
    chain = run(engine(ops, acceptance, TableDrafter(logp, None, 2, 1)), requests(3))
    # Where the room runs out, the tree has its last nodes beside each other, and the chain below.
    assert [a.tokens[:35] for a in answers] == [a.tokens[:35] for a in chain]
    assert all(a.stats["drafted"] <= 2 * a.stats["target_passes"] < a.stats["proposed"] for a in answers)
    (greedy,) = run(engine(ops, acceptance, tree), requests(1, temperature=0))
    assert greedy.stats["drafted"] > 2 * greedy.stats["target_passes"]


def test_deterministic_drafters_run_together_under_every_rule(ops) -> None:
    cycle = torch.full((V, V), -6.0)
    for t in range(V):
        cycle[t, (t + 1) % V] = 0
    for acceptance in BY_CHANCE:
        config = SpeculationConfig()
        merged = Merge([SuffixDrafter(config), NgramDrafter(config)])
        answers = run(engine(ops, acceptance, merged, cycle.log_softmax(1)), requests(3))
        assert sum(answer.stats["accepted"] for answer in answers) > 30


@pytest.mark.parametrize("acceptance", BY_CHANCE)
def test_limits_ends_and_log_probabilities_are_those_of_each_emitted_token(ops, acceptance: str) -> None:
    """A burst that was drawn ends in its middle like any other, and its log-probabilities are the model's own."""
    logp = table(0)
    made = engine(ops, acceptance, drafter_for(acceptance, table(1)))
    asked = [
        Request((i, 3), SamplingParams(max_tokens=37, logprobs=2, temperature=0.8, top_k=6), seed=i, end_tokens=frozenset({5}))
        for i in range(6)
    ]
    for request, answer in zip(asked, run(made, asked), strict=True):
        assert answer.finish_reason == ("stop" if answer.tokens[-1] == 5 else "length")
        assert 5 not in answer.tokens[:-1]
        assert len(answer.tokens) <= 37
        assert [entry.token for entry in answer.logprobs] == answer.tokens
        for before, entry in zip((request.prompt[-1], *answer.tokens), answer.logprobs, strict=False):
            assert entry.logprob == pytest.approx(float(logp[before, entry.token]), abs=1e-5)
            assert len(entry.top) == 2


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="acceptance must be one of coupled, greedy"):
        SpeculationConfig(acceptance="exact")
