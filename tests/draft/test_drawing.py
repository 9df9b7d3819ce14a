"""Drawn drafts: each token comes from the row that is handed over with it, and that row is the drafter's own law there."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import random_weights, tiny, tiny_config, write
from drafting import paths, sequence
from forward import logits_of
from harness import Request, make_engine, run
from recomputed import features_of, logits_after, random_head
from test_medusa import config_of
from test_medusa import random_head as medusa_head
from torch import Tensor

from specdec import kernels
from specdec.config import SamplingParams, SpeculationConfig
from specdec.draft.base import Drafter, Target
from specdec.draft.drawing import Drawing, Drawings, layout
from specdec.draft.medusa import MedusaDrafter
from specdec.draft.model import ModelDrafter
from specdec.draft.recurrent import RecurrentDrafter
from specdec.draft.shape import Shape
from specdec.models.head_files import LoadedHead
from specdec.models.load import load_model
from specdec.models.source import resolve
from specdec.types import ROOT, Draft, Sequence, Siblings
from specdec.verify.rows import drawn

DRAWS: tuple[Siblings, ...] = ("one", "distinct", "repeated")
RULE = {"one": "rejection", "distinct": "recursive", "repeated": "multistep"}
N_BLOCKS = 64
PAIR = Shape((ROOT, ROOT), (0, 1))


@functools.lru_cache(maxsize=1)
def ops():
    return kernels.select(torch.device("cpu"))


def text(seed: int, temperature: float = 1.0, **settings) -> Sequence:
    row = sequence([1, 2, 3], **settings)
    row.seed, row.params = seed, SamplingParams(temperature=temperature)
    return row


def drawing_of(shape: Shape, draws: Siblings, logits: Tensor, row: Sequence, vocabulary=None, v: int | None = None) -> Draft:
    drawing = Drawing(shape, draws, row, v or len(logits), vocabulary)
    leaves = [ROOT]
    while leaves:
        for node in leaves:
            drawing.draw(node, logits)
        leaves = drawing.next()
    return drawing.draft("test")


LOGITS = torch.tensor([0.5, -1.0, 2.0, 0.0, -30.0])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_rows_are_the_laws_that_tokens_are_drawn_from(temperature: float) -> None:
    law = torch.softmax(LOGITS.double() / temperature, 0)
    for seed in range(8):
        draft = drawing_of(PAIR, "distinct", LOGITS, text(seed, temperature))
        first = draft.tree.tokens[0]
        left = law.clone()
        left[first] = 0
        torch.testing.assert_close(draft.q, torch.stack([law, left / left.sum()]))
        assert draft.q[1, first] == 0
        draft = drawing_of(PAIR, "repeated", LOGITS, text(seed, temperature))
        torch.testing.assert_close(draft.q, torch.stack([law, law]))


@pytest.mark.parametrize("draws", ["distinct", "repeated"])
def test_tokens_come_as_often_as_their_rows_say(draws: Siblings) -> None:
    """Over seeds, and over positions of one seed: pairs of draws have their joint law."""
    law = torch.softmax(LOGITS.double(), 0)
    n, v = 800, len(LOGITS)
    found = torch.zeros(2, v, v, dtype=torch.float64)
    for i in range(n):
        seeded, placed = text(i), text(7)
        placed.tokens = [0] * (i + 1)
        for counts, row in zip(found, (seeded, placed), strict=True):
            draft = drawing_of(PAIR, draws, LOGITS, row)
            first, second = (draft.tree.tokens[draw.node] for draw in drawn(draft)[ROOT])
            counts[first, second] += 1 / n
    expected = law[:, None] * law
    if draws == "distinct":
        expected = expected * (1 - torch.eye(v)) / (1 - law)[:, None]
    for counts in found:
        assert float((counts - expected).abs().sum()) / 2 < 0.07


def test_a_draw_depends_on_the_seed_and_the_position_alone() -> None:
    shape = layout("distinct", 10, 3, 4)
    drafts = [drawing_of(shape, "distinct", LOGITS, text(seed)).tree.tokens for seed in (5, 5, 6)]
    assert drafts[0] == drafts[1] != drafts[2]
    further = text(5)
    further.tokens.append(1)
    assert drawing_of(shape, "distinct", LOGITS, further).tree.tokens != drafts[0]


def test_a_smaller_vocabulary_is_spread_over_the_targets() -> None:
    ids = torch.tensor([7, 2, 9, 0, 4]).numpy()
    for seed in range(10):
        draft = drawing_of(PAIR, "distinct", LOGITS, text(seed), ids, v=12)
        assert draft.q.shape == (2, 12)
        assert set(draft.q[0].nonzero().flatten().tolist()) == {7, 2, 9, 0, 4}
        torch.testing.assert_close(draft.q[0, ids], torch.softmax(LOGITS.double(), 0))
        assert all(draft.q[i, token] > 0 for i, token in enumerate(draft.tree.tokens))


def test_shapes_are_fixed_by_the_budget() -> None:
    """A smaller one is the beginning of a larger one, and no draft has more draws than its shape has nodes."""
    assert layout("one", 9, 4, 3).parents == (ROOT, 0, 1, 2)
    whole = layout("distinct", 10, 3, 4)
    assert max(whole.depths) <= 3
    for n in range(1, 11):
        small = layout("distinct", n, 3, 4)
        assert (small.parents, small.ranks) == (whole.parents[:n], whole.ranks[:n])
    for draws in DRAWS:
        draft = drawing_of(layout(draws, 10, 3, 4), draws, LOGITS, text(3))
        assert len(draft) <= len(draft.q) <= 10


def test_a_token_that_is_drawn_again_is_one_node_with_a_row_for_each_draw() -> None:
    certain = torch.tensor([-40.0, 0.0, -40.0])
    draft = drawing_of(Shape((ROOT, ROOT, 0, 1), (0, 1, 0, 0)), "repeated", certain, text(0))
    assert (draft.tree.tokens, draft.tree.parents, draft.draws) == ((1, 1), (ROOT, 0), (0, 0, 1))
    assert len(draft.q) == 3


def test_nothing_is_drawn_behind_an_end_token_nor_from_damaged_logits() -> None:
    certain = torch.tensor([-40.0, 0.0, -40.0])
    assert drawing_of(layout("one", 4, 4, 1), "one", certain, text(0, end_tokens=[1])).tree.tokens == (1,)
    assert len(drawing_of(layout("one", 4, 4, 1), "one", certain * torch.nan, text(0))) == 0
    assert drawing_of(PAIR, "distinct", torch.tensor([0.0, -torch.inf]), text(0)).tree.tokens == (0,)


def test_at_temperature_0_candidates_are_ranked() -> None:
    drawings = Drawings("distinct", SpeculationConfig(), 5, None)
    assert drawings.start(text(0, 0.0), 4) is None
    assert drawings.start(text(0, 1.0), 4) is not None
    assert Drawings(None, SpeculationConfig(), 5, None).start(text(0, 1.0), 4) is None


# --- the drafters ---


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(resolve(str(tiny(tmp_path_factory.mktemp("tiny")))), "fp32", ops(), torch.device("cpu"))


SETTINGS = SpeculationConfig(trained_precision="fp32", trained_depth=3, trained_width=2, trained_nodes=7)
Rows = Callable[[list[int], tuple[int, ...]], Tensor]
"""(committed tokens, drafted path) -> the drafter's logits [V] of the token after them, recomputed from nothing."""


def made_of_another_model(model, draws: Siblings, folder: Path) -> tuple[Drafter, Rows]:
    config = tiny_config(vocab_size=model.shape.vocab_size, num_hidden_layers=1)
    write(folder, config, random_weights(config, 3))
    draft = load_model(resolve(str(folder)), "fp32", ops(), torch.device("cpu"))
    ids = torch.arange(40, 200, 2)

    def rows(tokens: list[int], path: tuple[int, ...]) -> Tensor:
        logits = torch.full((model.shape.vocab_size,), -torch.inf)
        logits[ids] = logits_of(draft, [*tokens, *path])[-1, ids]
        return logits

    return ModelDrafter(draft, Target(model, ops(), N_BLOCKS), SETTINGS, "draft", ids, draws), rows


def made_of_a_recurrent_head(model, draws: Siblings, folder: Path) -> tuple[Drafter, Rows]:
    loaded = random_head(model, "eagle3")

    def rows(tokens: list[int], path: tuple[int, ...]) -> Tensor:
        logits = torch.full((model.shape.vocab_size,), -torch.inf)
        features = features_of(model, loaded.config, tokens[:-1])
        logits[loaded.vocabulary_ids] = logits_after(model, loaded, features, tokens, path)
        return logits

    return RecurrentDrafter(loaded, Target(model, ops(), N_BLOCKS), SETTINGS, draws), rows


def made_of_medusa_heads(model, draws: Siblings, correction: str) -> tuple[Drafter, Rows]:
    head = medusa_head(config_of(model, correction))
    drafter = MedusaDrafter(LoadedHead("test", head, None), Target(model, ops(), N_BLOCKS), SETTINGS, draws)

    def rows(tokens: list[int], path: tuple[int, ...]) -> Tensor:
        (feature,) = drafter._features.values()
        after = torch.tensor([tokens[-1], *path])
        if correction == "hydra":
            between = model.embedding(after).reshape(1, -1)
            return model.head(head(len(path), feature[None], between))[0]
        logits = drafter._parallel(feature[None])[0, len(path)]
        return logits if correction == "none" else logits + drafter._heads.bias(after[-1:])[0]

    return drafter, rows


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("kind", ["model", "eagle3", "none", "markov", "hydra"])
def test_drafters_hand_over_the_rows_that_they_drew_from(model, tmp_path, kind: str, draws: Siblings) -> None:
    """Through the engine, after bursts of all lengths: every row is the drafter's law, recomputed, given earlier siblings."""
    if kind == "model":
        drafter, rows = made_of_another_model(model, draws, tmp_path)
    elif kind == "eagle3":
        drafter, rows = made_of_a_recurrent_head(model, draws, tmp_path)
    else:
        drafter, rows = made_of_medusa_heads(model, draws, kind)
    propose, dice, compared = drafter.propose, random.Random(0), [0, 0]

    def checked(sequences, budgets):
        drafts = propose(sequences, budgets)
        for row, draft in zip(sequences, drafts, strict=True):
            if not len(draft) or dice.random() < 0.6:
                continue
            assert draft.q is not None
            found = [(), *paths(draft.tree)]
            for node, children in drawn(draft).items():
                if not children:
                    continue
                with torch.inference_mode():
                    left = torch.softmax(rows(row.tokens, found[node + 1]).double() / row.params.temperature, 0)
                left = left.clone()
                for draw in children:
                    torch.testing.assert_close(draft.q[draw.row], left / left.sum(), rtol=2e-3, atol=1e-6)
                    compared[0] += 1
                    if draws != "repeated":
                        left[draft.tree.tokens[draw.node]] = 0
            compared[1] += max(len(path) for path in found) > 1
        return drafts

    drafter.propose = checked  # type: ignore[method-assign]
    engine = make_engine(model, ops(), drafter=drafter, rule=RULE[draws], kv_tokens=N_BLOCKS * 16)
    (answer,) = run(engine, [Request((101, 99, 116, 97), SamplingParams(temperature=0.8, max_tokens=24), seed=1)])
    assert answer.error is None
    assert answer.stats["drafted"] > 20
    assert compared[0] > 10
    assert compared[1] > 2
