"""Medusa heads at work: the right shift, the right history, the noise of the right position; and never another token."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path

import pytest
import torch
from checkpoints import chain, path_law, tiny
from drafting import paths, sequence
from harness import Request, make_engine, run
from torch import Tensor

from specdec import kernels
from specdec.config import ConfigError, SamplingParams, SpeculationConfig
from specdec.draft.base import Target
from specdec.draft.medusa import MedusaDrafter
from specdec.draft.shape import static
from specdec.models.decoder import Decoder
from specdec.models.head_config import Correction, HeadConfig
from specdec.models.head_files import LoadedHead
from specdec.models.heads import MedusaHead
from specdec.models.load import load_model
from specdec.models.source import resolve
from specdec.types import Draft, Forward, Sequence, Span, Step, Tree, Verdict

CORRECTIONS: tuple[Correction, ...] = ("none", "markov", "hydra")
SLOW = {1: 1e6, 64: 1e6}
"""Costs beside which no hiccup of the machine makes drafting look dear."""

PIECES = [chr(97 + i) for i in range(24)]


@functools.lru_cache(maxsize=1)
def ops():
    return kernels.select(torch.device("cpu"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Decoder:
    return load(tiny(tmp_path_factory.mktemp("tiny")))


def load(folder: Path, precision: str = "fp32") -> Decoder:
    return load_model(resolve(str(folder)), precision, ops(), torch.device("cpu"))


def config_of(model: Decoder, correction: Correction, **settings) -> HeadConfig:
    a = model.architecture
    shape = {"hidden_size": a.hidden_size, "vocab_size": a.vocab_size, "taps": (a.n_layers - 1,), "rms_eps": a.rms_eps}
    return HeadConfig(kind="medusa", correction=correction, rank=32, **{**shape, "normed": True, "depth": 4, **settings})


def drafter_of(model: Decoder, head: MedusaHead, ids: Tensor | None = None, measured=None, **settings) -> MedusaDrafter:
    settings = {"trained_precision": "fp32", "trained_min_probability": 1e-6, "trained_nodes": 12, **settings}
    return MedusaDrafter(
        LoadedHead("test", head, ids, measured=measured or {}), Target(model, ops(), 64), SpeculationConfig(**settings)
    )


def random_head(config: HeadConfig, seed: int = 0) -> MedusaHead:
    torch.manual_seed(seed)
    head = MedusaHead(config)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 1.0 / parameter.shape[1] ** 0.5))
    return head


def see(drafter: MedusaDrafter, rows: list[Sequence], features: Tensor) -> None:
    """Let the drafter observe a pass that read each sequence up to its last token but one and chose that one; [n, d] taps."""
    step, verdicts = [], []
    for row in rows:
        pending = row.tokens.pop()
        step.append(Span(row, len(row.tokens) - 1, len(row.tokens)))
        verdicts.append(Verdict((), pending))
        row.tokens.append(pending)
    n = len(rows)
    forward = Forward(torch.zeros(n, 4), tuple(slice(i, i + 1) for i in range(n)), taps={drafter.taps[0]: features})
    drafter.observe(Step(tuple(step)), forward, verdicts)


def requests(temperature: float, n_tokens: int = 40) -> list[Request]:
    kinds = ({}, {"top_k": 5}, {"repetition_penalty": 1.3, "top_p": 0.9}, {"logprobs": 2}, {"logit_bias": {101: 4.0}})
    return [
        Request(
            tuple(b"the cat sat on the mat and the cat"[i : 4 + 7 * i]),
            SamplingParams(temperature=temperature * (i % 3 != 2), max_tokens=n_tokens, **kind),
            seed=i,
        )
        for i, kind in enumerate(kinds)
    ]


# --- it changes nothing ---


@pytest.fixture(scope="module")
def plain(model):
    """What plain decoding answers to ``requests``, by temperature and settings: once for all heads."""

    @functools.cache
    def of(temperature: float, **config: int) -> list[tuple]:
        return [a.same for a in run(make_engine(model, ops(), **config), requests(temperature))]

    return of


@pytest.mark.parametrize("config", [{}, {"max_sequences": 2, "prefill_rows": 5}, {"kv_tokens": 96, "max_len": 90}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_no_head_changes_a_token(model, plain, correction: Correction, temperature: float, config: dict) -> None:
    """Random heads, several sequences with parameters of their own, prompts in pieces, a pool that runs short."""
    wanted = requests(temperature)
    ids = torch.randperm(320, generator=torch.Generator().manual_seed(1))[:90].sort().values
    heads = [
        (random_head(config_of(model, correction)), None),
        (random_head(config_of(model, correction, vocabulary=90, normed=False, taps=(0,), blocks=2)), ids),
        (random_head(config_of(model, correction, own_output=True, own_embedding=True, vocabulary=90)), ids),
    ]
    for head, vocabulary in heads:
        drafter = drafter_of(model, head, vocabulary)
        before = drafter.n_bytes
        engine = make_engine(model, ops(), drafter=drafter, **config)
        answers = run(engine, wanted)
        assert [a.same for a in answers] == plain(temperature, **config)
        assert all(a.stats["drafted"] > 0 for a in answers)
        assert drafter.n_bytes == before, "a sequence that ended left something behind"
        if "kv_tokens" in config:
            assert engine.stats.preemptions > 0, "the pool was meant to run short"


@pytest.mark.parametrize("precision", ["q8", "q4", "bf16"])
def test_packed_heads_and_targets_change_no_token(tmp_path, precision: str) -> None:
    model = load(tiny(tmp_path), precision)
    wanted = requests(1.0, 20)
    plain = run(make_engine(model, ops()), wanted)
    for correction in CORRECTIONS:
        drafter = drafter_of(model, random_head(config_of(model, correction)), trained_precision=precision)
        assert [a.same for a in run(make_engine(model, ops(), drafter=drafter), wanted)] == [a.same for a in plain]


# --- it is right where it can be ---


def cycle(tmp_path: Path) -> Decoder:
    """A target that goes through its 24 tokens in a fixed order, over and over."""
    return load(chain(tmp_path, path_law(ORDER, 24), PIECES))


ORDER = [int(i) for i in torch.randperm(24, generator=torch.Generator().manual_seed(2))]
AFTER = dict(itertools.pairwise([*ORDER, ORDER[0]]))


def ahead(width: int, n: int) -> Tensor:
    """[width, width] takes the unit vector of a token to that of the one n places further on."""
    moved = torch.zeros(width, width)
    for token in range(24):
        further = token
        for _ in range(n):
            further = AFTER[further]
        moved[further, token] = 1.0
    return moved


def knowing(model: Decoder, correction: Correction, block: int = 0, shift: int = 0, **settings) -> MedusaHead:
    """Heads that know the order; hydra's reads it off the token ``block`` places after the pending one. ``shift`` puts all
    of them as many places off."""
    head = MedusaHead(config_of(model, correction, **settings))
    d = head.config.hidden_size
    with torch.no_grad():
        for k in range(head.config.depth):
            # The state is near the unit vector of the token before the one to be said.
            if correction == "none":
                head.heads[k][0].linear.weight.copy_(10 * ahead(d, k + 1 + shift))
            if correction == "hydra":
                at = min(block, k)
                head.joins[k].weight[:, at * d : (at + 1) * d] = 10 * ahead(d, k - at + shift)
        if correction == "markov":
            head.markov[0].first.weight.copy_(torch.eye(24, 32))
            head.markov[0].second.weight.copy_(1000 * ahead(32, 1 + shift)[:24])
    return head


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("correction", "block"), [("none", 0), ("markov", 0), ("hydra", 0), ("hydra", 1), ("hydra", 9)])
def test_heads_that_know_the_text_are_always_right(tmp_path, correction: Correction, block: int, normed: bool) -> None:
    """Head k says the token k + 2 places after the feature's own: every pass emits four drafted tokens and one more."""
    model = cycle(tmp_path)
    wanted = [Request((ORDER[i],), SamplingParams(temperature=t, max_tokens=51), seed=i) for i, t in enumerate((0.0, 1.0))]
    plain = run(make_engine(model, ops()), wanted)
    drafter = drafter_of(model, knowing(model, correction, block, normed=normed))
    answers = run(make_engine(model, ops(), drafter=drafter, pass_seconds=SLOW), wanted)
    assert [a.same for a in answers] == [a.same for a in plain]
    for answer in answers:
        assert answer.stats["target_passes"] == 11, "the prompt gives one token, ten passes give fifty"
        assert answer.stats["accepted"] == 40


@pytest.mark.parametrize("shift", [1, 2])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_heads_that_are_one_place_off_are_never_right(tmp_path, correction: Correction, shift: int) -> None:
    """So the test above would notice a feature, a label or a token of the wrong place."""
    model = cycle(tmp_path)
    drafter = drafter_of(model, knowing(model, correction, 9, shift), trained_width=1)
    (answer,) = run(make_engine(model, ops(), drafter=drafter), [Request((0,), SamplingParams(temperature=0, max_tokens=30))])
    assert answer.stats["drafted"] > 0
    assert answer.stats["accepted"] == 0


@pytest.mark.parametrize("mapped", [False, True])
def test_at_temperature_1_heads_that_know_the_law_are_always_right(tmp_path, mapped: bool) -> None:
    """Candidates are ranked with the noise of the position that they are for, and of the target's own ids."""
    law = torch.rand(24, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64) ** 4
    law /= law.sum(1, keepdim=True)
    model = load(chain(tmp_path, law, PIECES))
    ids = torch.randperm(24, generator=torch.Generator().manual_seed(4)) if mapped else torch.arange(24)
    head = MedusaHead(config_of(model, "markov", own_output=True, depth=3, vocabulary=24))
    with torch.no_grad():
        for output in head.outputs:
            output.weight.zero_()
        head.markov[0].first.weight.copy_(torch.eye(24, 32))
        head.markov[0].second.weight.zero_()[:, :24] = law.log().T[ids].float()
    drafter = drafter_of(model, head, ids, trained_width=1, trained_min_probability=1e-9)
    wanted = [Request((i,), SamplingParams(temperature=t, max_tokens=41), seed=i) for i, t in enumerate((1.0, 0.6, 1.5, 0.0))]
    plain = run(make_engine(model, ops()), wanted)
    answers = run(make_engine(model, ops(), drafter=drafter, pass_seconds=SLOW), wanted)
    assert [a.same for a in answers] == [a.same for a in plain]
    assert [a.stats["target_passes"] for a in answers] == [11] * 4, "three drafted tokens and one more in each pass"


# --- trees ---


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_estimates_are_the_products_of_what_the_modules_say_along_a_path(model, correction: Correction, own: bool) -> None:
    """Against the float modules, path by path: the level's head, the tokens in between and their order."""
    ids = torch.arange(5, 320, 3)
    config = config_of(model, correction, vocabulary=len(ids), own_output=own, own_embedding=own, depth=3)
    head = random_head(config)
    drafter = drafter_of(model, head, ids, trained_width=3, trained_nodes=64)
    rows = [sequence([1, 2, token], number=token) for token in (7, 30)]
    features = torch.randn(2, config.hidden_size, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        for row in rows:
            row.params = SamplingParams(temperature=0)
        see(drafter, rows, features)
        embed = head.embedding if own else model.embedding
        for row, feature, draft in zip(rows, features, drafter.propose(rows, [40, 40]), strict=True):
            assert len(draft) > 3 + 9
            normed = ops().rms_norm(feature[None], model.norm, config.rms_eps)[0]
            estimates = dict(zip(paths(draft.tree), draft.estimates, strict=True))
            for path, estimate in estimates.items():
                k, before = len(path) - 1, torch.tensor([row.tokens[-1], *path[:-1]])
                state = head(k, normed, embed(before).flatten())
                logits = head.outputs[k](state) if own else model.head(state[None])[0, ids]
                bias = head.bias(before[-1])
                chance = (logits if bias is None else logits + bias).softmax(0)[int((ids == path[-1]).nonzero())]
                assert estimate == pytest.approx(float(chance) * estimates.get(path[:-1], 1.0), rel=1e-3)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_company_changes_no_draft(model, correction: Correction) -> None:
    """Three sequences are drafted for at once as one by one; those never observed, or without budget, get nothing."""
    drafter = drafter_of(model, random_head(config_of(model, correction)))
    rows = [sequence([1, 2, 10 * i], number=i) for i in range(5)]
    for row in rows:
        row.params = SamplingParams(temperature=row.id % 2)
    see(drafter, rows[:4], torch.randn(4, 64))
    together = drafter.propose(rows, [12, 5, 3, 0, 12])
    assert together[3] == together[4] == Draft()
    for row, budget, draft in zip(rows[:3], (12, 5, 3), together, strict=False):
        (alone,) = drafter.propose([row], [budget])
        assert alone.tree == draft.tree
        assert len(draft) == budget
        assert alone.estimates == pytest.approx(draft.estimates)


def test_after_a_pass_the_feature_is_that_of_the_row_that_gave_the_pending_token(model) -> None:
    """Of a prompt its last row, of a draft the last accepted node's, in a batch of all kinds."""
    drafter = drafter_of(model, random_head(config_of(model, "none", normed=False)))
    prompt, refused, accepted, unfinished = (sequence([1, 2, 3, 4], number=i) for i in range(4))
    draft = Draft(Tree((5, 6, 7), (-1, 0, 0)), ("test",) * 3)
    step = Step((Span(unfinished, 0, 2), Span(prompt, 1, 4), Span(refused, 3, 4, draft), Span(accepted, 3, 4, draft)))
    taps = torch.arange(13.0)[:, None].expand(13, 64)  # 2 + 3 + 4 + 4 rows
    verdicts = [None, Verdict((), 9), Verdict((), 9), Verdict((0, 2), 9)]
    drafter.observe(step, Forward(torch.empty(0), (), taps={1: taps}), verdicts)
    held = {number: float(feature[0]) for number, feature in drafter._features.items()}
    assert held == {0: 4.0, 1: 5.0, 2: 12.0}


def test_measured_accuracy_decides_the_shape(model) -> None:
    """A table by head and rank gives the shape, the heads' own estimates stay; candidates that are too unlikely drop out."""
    head = random_head(config_of(model, "none", depth=3))
    accuracy = [[0.4, 0.1, 0.1], [0.6, 0.01, 0.0], [0.9, 0.0, 0.0]]
    drafter = drafter_of(model, head, measured={"accuracy": accuracy}, trained_nodes=5)
    row = sequence([1, 2, 3])
    row.params = SamplingParams(temperature=0)
    see(drafter, [row], torch.randn(1, 64))
    (draft,) = drafter.propose([row], [5])
    (free,) = drafter_of_same(drafter, model, head, row)
    shape = static(accuracy, 5)
    depths = [len(path) for path in paths(draft.tree)]
    assert sorted(depths) == sorted(shape.depths)
    assert set(paths(draft.tree)) != set(paths(free.tree))
    assert list(draft.estimates) == sorted(draft.estimates, reverse=True)
    row.end_tokens = frozenset(draft.tree.tokens[:1])
    (ended,) = drafter.propose([row], [5])
    assert len(ended) == 3, "nothing follows an end token: the branch of two below it is left out"


def drafter_of_same(drafter: MedusaDrafter, model: Decoder, head: MedusaHead, row: Sequence) -> list[Draft]:
    """What the same heads draft without a measurement."""
    other = drafter_of(model, head, trained_nodes=5)
    other._features = drafter._features
    return other.propose([row], [5])


def test_unlikely_nodes_are_left_out_and_broken_features_draft_nothing(model) -> None:
    head = random_head(config_of(model, "markov"))
    row = sequence([1, 2, 3])
    for least, features in ((0.3, torch.randn(1, 64)), (1e-9, torch.full((1, 64), torch.nan))):
        drafter = drafter_of(model, head, trained_min_probability=least)
        see(drafter, [row], features)
        (draft,) = drafter.propose([row], [12])
        assert all(estimate >= least for estimate in draft.estimates)
        assert len(draft) < 12


def test_memory_is_one_feature_for_each_sequence(model) -> None:
    drafter = drafter_of(model, random_head(config_of(model, "none")))
    weights = drafter.n_bytes
    rows = [sequence([1, 2, 3], number=i) for i in range(3)]
    for _ in range(4):
        see(drafter, rows, torch.randn(3, 64))
    assert drafter.n_bytes == weights + 3 * 64 * 4
    drafter.release(rows[1])
    drafter.release(sequence([1], number=99))
    assert drafter.n_bytes == weights + 2 * 64 * 4
    drafter.clear()
    assert drafter.n_bytes == weights


@pytest.mark.parametrize("wrong", [{"hidden_size": 96}, {"vocab_size": 321}, {"taps": (2,)}])
def test_heads_of_another_model_are_refused(model, wrong: dict) -> None:
    config = dataclasses.replace(config_of(model, "none"), **wrong)
    with pytest.raises(ConfigError, match=r"made for a model of width .* this one has width 64, 320 tokens and 2 layers"):
        drafter_of(model, MedusaHead(config))
