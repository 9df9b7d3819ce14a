"""Drafting with recurrent heads: no draft changes a token, and every draft is what recomputing everything would give."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from checkpoints import tiny
from drafting import paths
from harness import Request, make_engine, run, truth_of
from recomputed import KINDS, random_head, tree_of

from specdec import kernels
from specdec.config import SamplingParams, SpeculationConfig
from specdec.draft.base import Drafter, Target
from specdec.draft.recurrent import RecurrentDrafter
from specdec.models.load import load_model
from specdec.models.source import resolve
from specdec.testing import Thicket

N_BLOCKS = 64
SMALL = {"kv_tokens": 128, "max_len": 128}
"""A pool so small that sequences are preempted."""


@functools.lru_cache(maxsize=1)
def ops():
    return kernels.select(torch.device("cpu"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(tmp_path_factory.mktemp("tiny"), "fp32")


def load(folder, precision: str):
    return load_model(resolve(str(tiny(folder))), precision, ops(), torch.device("cpu"))


def drafter_of(model, loaded, **settings) -> RecurrentDrafter:
    config = SpeculationConfig(**{"trained_precision": "fp32", "trained_min_probability": 0.001, **settings})
    return RecurrentDrafter(loaded, Target(model, ops(), N_BLOCKS), config)


def requests_of(n: int, temperature: float, seed: int = 0) -> list[Request]:
    """Prompts of 1 to 70 tokens and answers of different lengths; some may end before."""
    dice = random.Random(seed)
    found = []
    for i in range(n):
        phrase = [dice.randint(97, 122) for _ in range(dice.randint(1, 20))]
        prompt = tuple((phrase * 70)[: (1, 2, 70, 17, 40, 5)[i % 6]])
        params = SamplingParams(temperature=temperature, max_tokens=50 - 7 * (i % 4))
        found.append(Request(prompt, params, seed=100 * seed + i, end_tokens=frozenset({101} if i % 3 == 0 else ())))
    return found


def poisoned(model, drafter: Drafter, recurrent: RecurrentDrafter, **settings):
    """An engine in which freed blocks hold NaN in the drafter's pool as well."""
    engine = make_engine(model, ops(), drafter=drafter, **settings)
    pools = engine.pool, recurrent._layers.pool
    pools[1].poison(range(N_BLOCKS))
    engine.allocator.on_free = lambda blocks: [pool.poison(blocks) for pool in pools]
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_no_head_changes_a_token(tmp_path, kind: str, temperature: float) -> None:
    """Mixed sequences in one batch, prompts in chunks, a pool that runs short: the tokens are those of plain decoding."""
    model = load(tmp_path, "q8")
    requests = requests_of(6, temperature)
    alone = [run(make_engine(model, ops()), [request])[0] for request in requests]
    for config in ({}, {"prefill_rows": 7}, {"prefill_rows": 100, **SMALL}, {"max_nodes": 1}, {"max_sequences": 2}):
        drafter = drafter_of(model, random_head(model, kind), trained_precision="q8")
        engine = poisoned(model, drafter, drafter, **config)
        answers = run(engine, requests)
        assert [answer.same for answer in answers] == [answer.same for answer in alone]
        assert engine.stats.drafted > 50
        if config.get("kv_tokens"):
            assert engine.stats.preemptions > 0


class Shadow(Thicket):
    """Has drafts of a recurrent drafter made and checked, but random trees around the truth verified: bursts of any length."""

    name = "shadow"

    def __init__(self, recurrent: RecurrentDrafter, check, truth, vocab_size: int) -> None:
        super().__init__(truth, vocab_size, seed=3)
        self.taps = recurrent.taps
        self._recurrent, self._check = recurrent, check

    def propose(self, sequences, budgets):
        made = self._recurrent.propose(sequences, budgets)
        for sequence, budget, draft in zip(sequences, budgets, made, strict=True):
            self._check(sequence, budget, draft)
        return super().propose(sequences, budgets)

    def observe(self, step, forward, verdicts) -> None:
        self._recurrent.observe(step, forward, verdicts)

    def release(self, sequence) -> None:
        self._recurrent.release(sequence)


@pytest.mark.parametrize("config", [{}, {"prefill_rows": 7}, {"prefill_rows": 100, **SMALL}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_recomputing_everything(model, kind: str, temperature: float, config: dict) -> None:
    """After bursts of 0 to 8 accepted nodes, chunks and preemptions, each tree and each estimate is the reference's."""
    requests = requests_of(5, temperature, seed=1)
    answers = [run(make_engine(model, ops()), [request])[0] for request in requests]
    loaded = random_head(model, kind, seed=1)
    recurrent = drafter_of(model, loaded, trained_depth=5, trained_width=2, trained_nodes=8)
    checked: list[int] = []
    dice = random.Random(0)

    def check(sequence, budget: int, draft) -> None:
        if sequence.n_cached < len(sequence.tokens) - 1 or sequence.n_cached == 0 or dice.random() < 0.75:
            return  # nothing can be drafted while the prompt is read; and the reference takes its time
        with torch.inference_mode():
            expected = tree_of(model, loaded, sequence, sequence.tokens, 5, 2, 0.001, min(budget, 8))
        found = dict(zip(paths(draft.tree), draft.estimates, strict=True))
        assert list(found) == list(expected)
        assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-3)
        checked.append(len(draft))

    shadow = Shadow(recurrent, check, truth_of(requests, answers), model.shape.vocab_size)
    engine = poisoned(model, shadow, recurrent, **config)
    got = run(engine, requests)
    assert [answer.same for answer in got] == [answer.same for answer in answers]
    assert len(checked) > 10
    assert len(engine.stats.accepted_by_depth) > 4
    if config.get("kv_tokens"):
        assert engine.stats.preemptions > 0
