"""Drafting with recurrent heads: no draft changes a token, and every draft is what recomputing everything would give."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from checkpoints import tiny
from drafting import paths
from harness import Answer, Request, make_engine, run, truth_of
from recomputed import KINDS, random_head, tree_of

from specdec import kernels
from specdec.config import ConfigError, SamplingParams, SpeculationConfig
from specdec.draft import recurrent as recurrent_module
from specdec.draft.base import Drafter, Target
from specdec.draft.recurrent import RecurrentDrafter
from specdec.models.load import load_model
from specdec.models.source import resolve
from specdec.testing import Thicket
from specdec.types import Draft

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


def alone_by_temperature(model, n: int, seed: int):
    """Requests by temperature, and what plain decoding answers to each alone: once for all drafters."""

    @functools.cache
    def of(temperature: float) -> tuple[list[Request], list[Answer]]:
        requests = requests_of(n, temperature, seed)
        return requests, [run(make_engine(model, ops()), [request])[0] for request in requests]

    return of


def poisoned(model, drafter: Drafter, recurrent: RecurrentDrafter, **settings):
    """An engine in which freed blocks hold NaN in the drafter's pool as well."""
    engine = make_engine(model, ops(), drafter=drafter, **settings)
    pools = engine.pool, recurrent._layers.pool
    pools[1].poison(range(N_BLOCKS))
    engine.allocator.on_free = lambda blocks: [pool.poison(blocks) for pool in pools]
    return engine


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A model in q8, and by temperature requests with what plain decoding answers to each alone."""
    model = load(tmp_path_factory.mktemp("packed"), "q8")
    return model, alone_by_temperature(model, 6, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_no_head_changes_a_token(packed, kind: str, temperature: float) -> None:
    """Mixed sequences in one batch, prompts in chunks, a pool that runs short: the tokens are those of plain decoding."""
    model, plain = packed
    requests, alone = plain(temperature)
    for config in ({}, {"prefill_rows": 7}, {"prefill_rows": 100, **SMALL}, {"max_nodes": 1}):
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


@pytest.fixture(scope="module")
def plain(model):
    """Requests by temperature, and what plain decoding answers to each alone."""
    return alone_by_temperature(model, 5, 1)


@pytest.mark.parametrize("config", [{}, {"prefill_rows": 7}, {"prefill_rows": 100, **SMALL}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_recomputing_everything(model, plain, kind: str, temperature: float, config: dict) -> None:
    """After bursts of 0 to 8 accepted nodes, chunks and preemptions, each tree and each estimate is the reference's."""
    requests, answers = plain(temperature)
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


@pytest.mark.parametrize("kind", ["eagle3", "mtp3"])
def test_memory_is_bounded_and_released(model, monkeypatch, kind: str) -> None:
    """However long a sequence goes unasked it holds few rows; nothing is left of sequences that ended or were aborted."""

    class Silent(Shadow):
        def propose(self, sequences, budgets):
            for track in recurrent._features._tracks.values():
                most.append(track.n_held)
                assert sum(len(piece.rows) for piece in track.held) == track.n_held
                assert track.stop > 0
            return super(Shadow, self).propose(sequences, budgets)

    monkeypatch.setattr(recurrent_module, "MOST_HELD", 64)
    recurrent, most = drafter_of(model, random_head(model, kind)), []
    before = recurrent.n_bytes
    requests = [Request((97, 98) * 30, SamplingParams(temperature=0, max_tokens=150)) for _ in range(4)]
    answers = [run(make_engine(model, ops()), [request])[0] for request in requests]
    silent = Silent(recurrent, None, truth_of(requests, answers), model.shape.vocab_size)
    engine = poisoned(model, silent, recurrent, max_nodes=2, prefill_rows=32)
    run(engine, requests[:3])
    assert 32 < max(most) <= 64
    assert recurrent.n_bytes == before
    number = engine.add(list(requests[3].prompt), requests[3].params, frozenset(), 0)
    for _ in range(5):
        engine.step()
    assert recurrent.n_bytes > before
    engine.abort(number)
    assert recurrent.n_bytes == before


def test_a_level_is_drafted_where_it_pays(model) -> None:
    """A level costs time: the tree ends where what its children are expected to save is less, and has no cheap rows."""
    request = requests_of(3, 1.0, seed=4)[-1]

    def depth(token: float, row: float) -> int:
        recurrent = drafter_of(model, random_head(model, "eagle3"), trained_depth=4)
        recurrent.weigh(token, row)
        watched = Watched(recurrent, request.prompt)
        run(make_engine(model, ops(), drafter=watched), [request])
        depths = [max(map(len, paths(draft.tree))) for draft in watched.seen.values() if len(draft)]
        return sorted(depths)[-2]

    assert depth(1e3, 0.0) == 4, "a token is worth any time"
    assert depth(1e-12, 0.0) == 1, "the first level comes with the rows that are fed anyway"
    assert depth(1.0, 2.0) == 1, "no row is worth its place in a pass"


def test_what_a_level_once_took_is_not_believed_for_ever(model) -> None:
    """The first one may have met a busy machine. What is known of levels comes down to what every ask takes, or none would
    be drafted that could show it."""
    request = requests_of(3, 1.0, seed=4)[-1]
    recurrent = drafter_of(model, random_head(model, "eagle3"), trained_depth=2)
    recurrent.weigh(1e2, 0.0)
    recurrent._levels._seconds = 1e3
    watched = Watched(recurrent, request.prompt)
    run(make_engine(model, ops(), drafter=watched), [request])
    depths = [max(map(len, paths(draft.tree))) for draft in watched.seen.values() if len(draft)]
    assert depths[0] == 1, "it would have taken too long"
    assert recurrent._levels._seconds < 5e2


@pytest.mark.parametrize("kind", ["eagle", "mtp3"])
def test_a_sequence_with_unknown_rows_is_drafted_for_and_keeps_its_tokens(model, kind: str) -> None:
    """Passes that were not observed, as those of a prefix that another sequence has read, cost acceptance and no more."""
    requests = requests_of(4, 0.0, seed=2)
    answers = [run(make_engine(model, ops()), [request])[0] for request in requests]
    recurrent = drafter_of(model, random_head(model, kind))

    class Distracted(Shadow):
        passes = 0

        def propose(self, sequences, budgets):
            return recurrent.propose(sequences, budgets)

        def observe(self, step, forward, verdicts) -> None:
            self.passes += 1
            if self.passes % 5:
                super().observe(step, forward, verdicts)

    distracted = Distracted(recurrent, None, truth_of(requests, answers), model.shape.vocab_size)
    engine = make_engine(model, ops(), drafter=distracted, prefill_rows=9)
    assert [answer.same for answer in run(engine, requests)] == [answer.same for answer in answers]
    assert engine.stats.drafted > 20


class Watched(Drafter):
    """Has drafts made and keeps those of one prompt; none is verified."""

    name = "watched"

    def __init__(self, recurrent: RecurrentDrafter, prompt: tuple[int, ...]) -> None:
        self.taps = recurrent.taps
        self.seen: dict[int, Draft] = {}
        self._recurrent, self._prompt = recurrent, list(prompt)
        self.observe, self.release = recurrent.observe, recurrent.release

    def propose(self, sequences, budgets):
        for sequence, draft in zip(sequences, self._recurrent.propose(sequences, budgets), strict=True):
            if sequence.tokens[: sequence.n_prompt] == self._prompt:
                self.seen[len(sequence.tokens)] = draft
        return [Draft()] * len(sequences)


@pytest.mark.parametrize("kind", ["eagle3", "mtp3"])
def test_batches_draft_what_each_sequence_drafts_alone(model, kind: str) -> None:
    """The same trees and the same estimates, whoever else is in the batch."""
    requests = requests_of(6, 1.0, seed=3)
    drafted = []
    for n in (1, 6):
        watched = Watched(drafter_of(model, random_head(model, kind)), requests[-1].prompt)
        run(make_engine(model, ops(), drafter=watched), requests[-n:])
        drafted.append(watched.seen)
    both = drafted[0].keys() & drafted[1].keys()  # a drafter that never helps is asked now and then only
    assert len(both) > 10
    for n in both:
        alone, among = drafted[0][n], drafted[1][n]
        assert alone.tree == among.tree
        assert alone.estimates == pytest.approx(among.estimates, rel=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "q8", "q4"])
def test_a_pass_in_one_native_call_gives_the_same_drafts(model, precision: str) -> None:
    """EAGLE-3's layer in one call and operation by operation: the same trees, the same estimates to the last bit."""
    if ops().name == "torch":
        pytest.skip("there is no such call here")
    request = requests_of(3, 1.0, seed=4)[-1]
    drafted = []
    for fused in (True, False):
        recurrent = drafter_of(model, random_head(model, "eagle3"), trained_precision=precision)
        assert recurrent._layers._native is not None
        if not fused:
            recurrent._layers._native = None
        watched = Watched(recurrent, request.prompt)
        run(make_engine(model, ops(), drafter=watched), [request])
        drafted.append(watched.seen)
    both = drafted[0].keys() & drafted[1].keys()
    assert len(both) > 10
    assert all(drafted[0][n] == drafted[1][n] for n in both)
    other = drafter_of(model, random_head(model, "eagle3", normed_residual=True), trained_precision=precision)
    assert other._layers._native is None, "it does not do this"


@pytest.mark.parametrize(("settings", "reason"), [
    ({"hidden_size": 32}, "width 32"),
    ({"vocab_size": 300}, "300 tokens"),
    ({"taps": (7,)}, "at least 8 layers"),
])  # fmt: skip
def test_a_head_of_another_model_is_refused(model, settings: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        drafter_of(model, random_head(model, "mtp", **settings))
