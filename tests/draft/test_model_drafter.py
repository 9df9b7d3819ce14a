"""A draft model: what it drafts depends on the text alone, whatever its cache went through, and changes no token."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_weights, tiny_config, write
from drafting import paths, sequence
from harness import EOS, Request, make_engine, run

from specdec import kernels
from specdec.config import BLOCK_SIZE, SamplingParams, SpeculationConfig
from specdec.draft.base import Target
from specdec.draft.model import READ_ROWS, ModelDrafter
from specdec.kv.blocks import BlockAllocator, BlockTable
from specdec.models.decoder import Decoder
from specdec.models.load import load_model
from specdec.models.source import resolve
from specdec.runner.pack import Lines
from specdec.tree import ancestors, path_tokens
from specdec.types import ROOT, Draft, Sequence

V = 24
"""Tokens of the models here: few enough that every one of them is ranked with noise."""

KV_TOKENS = 1024


def ops() -> kernels.base.Kernels:
    return kernels.select(torch.device("cpu"))


def make(folder: Path, seed: int = 0, precision: str = "fp32", **overrides: Any) -> Decoder:
    config = tiny_config(**{"vocab_size": V, "max_position_embeddings": 512, **overrides})
    write(folder, config, random_weights(config, seed))
    return load_model(resolve(str(folder)), precision, ops(), torch.device("cpu"))


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Decoder:
    return make(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafts(tmp_path_factory) -> dict[str, Decoder]:
    """Draft models by how well they know the target: its very weights, the same in four bits, others of another shape."""

    def folder() -> Path:
        return tmp_path_factory.mktemp("draft")

    return {
        "same": make(folder()),
        "coarse": make(folder(), precision="q4"),
        "other": make(folder(), 7, num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1),
        "padded": make(folder(), 5, vocab_size=V + 17),
        "smaller": make(folder(), 3, vocab_size=V - 5),
        "short": make(folder(), precision="q8", max_position_embeddings=40),
    }


def drafter_of(
    draft: Decoder,
    target: Decoder,
    kv_tokens: int = KV_TOKENS,
    make_drafter: type[ModelDrafter] = ModelDrafter,
    vocabulary: torch.Tensor | None = None,
    **settings: Any,
) -> ModelDrafter:
    """A drafter whose cache holds NaN where nothing was written."""
    config = SpeculationConfig(**{"trained_min_probability": 1e-6, **settings})
    drafter = make_drafter(draft, Target(target, ops(), kv_tokens // BLOCK_SIZE), config, "draft", vocabulary)
    drafter._pool.poison(range(drafter._pool.n_blocks))
    return drafter


def requests_of(n: int, temperature: float, seed: int = 0, longest: int = 60) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            tuple(rng.randrange(2, V) for _ in range(rng.randint(1, longest))),
            SamplingParams(temperature=temperature if i % 3 else 0.6 * temperature, max_tokens=rng.randint(20, 70)),
            seed=100 * seed + i,
            end_tokens=EOS if i % 2 else frozenset(),
        )
        for i in range(n)
    ]


class Checked(ModelDrafter):
    """Says nothing now and then, and otherwise exactly what a drafter says that reads everything anew."""

    chance = 1.0
    """Of being asked."""
    compared = 0

    def propose(self, sequences: Many[Sequence], budgets: Many[int]) -> list[Draft]:
        rng = random.Random(self.compared)
        budgets = [n if rng.random() < self.chance else 0 for n in budgets]
        found = super().propose(sequences, budgets)
        config = SpeculationConfig(
            trained_depth=self._depth, trained_width=self._width, trained_nodes=self._nodes, trained_min_probability=1e-6
        )
        fresh = ModelDrafter(self._model, Target(self.target, ops(), self._pool.n_blocks), config, "draft")
        fresh._pool.poison(range(fresh._pool.n_blocks))
        for row, budget, draft in zip(sequences, budgets, found, strict=True):
            assert fresh.propose([row], [budget]) == [draft]
            self.compared += 1
        return found

    target: Decoder


SHAPES = ({"trained_width": 1}, {"trained_width": 3, "trained_nodes": 12}, {"trained_width": 2, "trained_depth": 8})
CONFIGS = (
    {},
    {"max_sequences": 3, "prefill_rows": 7},
    {"kv_tokens": 192, "max_len": 150, "prefill_rows": 16},
)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    ("kind", "shape"),
    [("coarse", SHAPES[0]), ("coarse", SHAPES[1]), ("coarse", SHAPES[2]), ("padded", SHAPES[1]), ("short", SHAPES[2])],
)
def test_what_is_drafted_depends_on_the_text_alone(target, drafts, kind: str, shape: dict, config: dict) -> None:
    """After chunks, preemptions, passes without a draft, accepted and refused paths: what an empty cache drafts, bit by bit."""
    for temperature, chance in ((0.0, 1.0), (0.9, 0.6)):
        drafter = drafter_of(drafts[kind], target, config.get("kv_tokens", KV_TOKENS), Checked, **shape)
        assert isinstance(drafter, Checked)
        drafter.chance, drafter.target = chance, target
        engine = make_engine(target, ops(), drafter=drafter, **{"kv_tokens": KV_TOKENS, **config})
        answers = run(engine, requests_of(8, temperature))
        assert drafter.compared > 50
        if kind == "coarse":
            drafted, accepted = (sum(a.stats[key] for a in answers) for key in ("drafted", "accepted"))
            assert 50 < accepted < drafted - 50, "both kinds of ends were meant to occur often"
        if config.get("max_len"):
            assert engine.stats.preemptions > 0, "the pool was meant to run short"


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_draft_model_changes_a_token(target, drafts, temperature: float, config: dict) -> None:
    """The same texts as each request alone without drafts."""
    requests = requests_of(6, temperature, seed=1)
    limits = {"max_len": config.get("max_len")}
    expected = [run(make_engine(target, ops(), **limits), [request])[0].same for request in requests]
    for draft, shape in zip(drafts.values(), itertools.cycle(SHAPES), strict=False):
        drafter = drafter_of(draft, target, config.get("kv_tokens", KV_TOKENS), **shape)
        engine = make_engine(target, ops(), drafter=drafter, **{"kv_tokens": KV_TOKENS, **config})
        assert [a.same for a in run(engine, requests)] == expected


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("depth", [1, 4, 7])
def test_the_target_as_its_own_draft_model_is_right_in_every_token(target, drafts, temperature: float, depth: int) -> None:
    """Every pass emits depth + 1 tokens until the text ends: greedy tokens are the same, and so are sampled ones, drawn with
    the same noise."""
    requests = [
        Request(r.prompt, r.params.replace(max_tokens=6 * (depth + 1)), r.seed) for r in requests_of(3, temperature, seed=2)
    ]
    drafter = drafter_of(drafts["same"], target, trained_width=1, trained_depth=depth)
    engine = make_engine(target, ops(), drafter=drafter, kv_tokens=KV_TOKENS, max_nodes=16)
    for answer in run(engine, requests):
        assert answer.stats["target_passes"] == 6
        assert len(answer.tokens) == 6 * (depth + 1)


class Watched:
    """A drafter whose passes are counted, and one sequence after another that it drafts for."""

    def __init__(self, draft: Decoder, target: Decoder, **settings: Any) -> None:
        self.drafter = drafter_of(draft, target, **settings)
        self.allocator = BlockAllocator(KV_TOKENS // BLOCK_SIZE)
        self.passes: list[int] = []
        """Rows of committed tokens in each pass that had some."""
        forward = self.drafter._runner.run

        def spy(lines: Lines) -> Any:
            if n := sum(position < self._stops[owner] for position, owner in zip(lines.positions, lines.owner, strict=True)):
                self.passes.append(n)
            return forward(lines)

        self.drafter._runner.run = spy  # type: ignore[method-assign]

    def sequence(self, tokens: Many[int], number: int = 0) -> Sequence:
        new = sequence(tokens, number=number)
        new.table = BlockTable(self.allocator)
        return new

    def propose(self, *sequences: Sequence, budget: int = 16) -> list[Draft]:
        self._stops = [len(s.tokens) for s in sequences]
        self.passes.clear()
        for s in sequences:
            s.table.reserve(len(s.tokens) + budget)
        return self.drafter.propose(sequences, [budget] * len(sequences))

    def commit(self, row: Sequence, tokens: Many[int]) -> None:
        row.tokens += tokens
        row.table.truncate(len(row.tokens) - 1)


def text(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(V) for _ in range(n)]


def test_only_what_is_missing_is_read(target, drafts) -> None:
    """Rows of accepted tokens are kept, whichever branch they were on; the last of a whole path was never fed."""
    watched = Watched(drafts["coarse"], target, trained_width=2, trained_depth=3, trained_nodes=64)
    row = watched.sequence(text(2 * READ_ROWS + 9))
    (draft,) = watched.propose(row)
    assert watched.passes == [READ_ROWS, READ_ROWS, 9]
    for length, branch in itertools.product((3, 2, 1, 0), (0, -1)):
        tree = draft.tree
        nodes = [i for i, path in enumerate(ancestors(tree)) if len(path) == length and (length == 3 or i in tree.parents)]
        tokens = path_tokens(tree, nodes[branch]) if nodes else ()
        follower = next(token for token in range(V) if (*tokens, token) not in paths(tree))
        watched.commit(row, [*tokens, follower])
        (draft,) = watched.propose(row)
        assert watched.passes == [2 if length == 3 else 1], (length, branch)


def test_blocks_that_changed_hands_are_noticed(target, drafts) -> None:
    """A preempted sequence that comes back to its own blocks has its rows still, unless another has written there."""
    watched = Watched(drafts["coarse"], target)
    row, other = watched.sequence(text(40), 0), watched.sequence(text(20, seed=1), 1)
    (expected,) = watched.propose(row)
    held = list(row.table.blocks)
    row.table.truncate(0)
    assert watched.propose(row) == [expected]
    assert (row.table.blocks, watched.passes) == (held, [1])
    row.table.truncate(0)
    watched.propose(other)
    assert other.table.blocks[0] == held[0]
    other.table.truncate(0)
    assert watched.propose(row) == [expected]
    assert (row.table.blocks, watched.passes) == (held, [40])


def test_drafted_rows_take_the_place_of_what_was_there(target, drafts) -> None:
    """Rows of a preempted sequence are gone where another one's draft was written, though no committed row of that was."""
    watched = Watched(drafts["coarse"], target)
    row, other = watched.sequence(text(40), 0), watched.sequence(text(16, seed=1), 1)
    (expected,) = watched.propose(row)
    first, second, *_ = row.table.blocks
    other.table.blocks = [next(block for block in range(8) if block not in row.table.blocks), second]
    watched.propose(other, budget=8)
    assert watched.propose(row) == [expected]
    assert (row.table.blocks[0], watched.passes) == (first, [24])


def test_the_blocks_of_a_common_beginning_are_read_once(target, drafts) -> None:
    """Two sequences whose tables begin with the same blocks do not take them from each other."""
    watched = Watched(drafts["coarse"], target)
    row = watched.sequence(text(37))
    watched.propose(row)
    fork = watched.sequence([*row.tokens[:32], 3, 4], number=1)
    fork.table = row.table.share(32)
    watched.propose(fork)
    assert watched.passes == [2]
    watched.propose(row, fork)
    assert watched.passes == [2]  # their pending tokens


def test_prompts_are_read_beside_the_target(target, drafts) -> None:
    """Chunk by chunk while the target reads them, and the end before the asking is timed; none of these rows has logits."""
    drafter = drafter_of(drafts["coarse"], target)
    engine = make_engine(target, ops(), drafter=drafter, kv_tokens=KV_TOKENS, prefill_rows=50)
    engine.add(text(120), SamplingParams(temperature=0, max_tokens=2), frozenset(), 0)
    rows: list[tuple[int, int]] = []
    forward, propose = drafter._runner.run, drafter.propose
    drafter._runner.run = lambda lines: rows.append((len(lines), len(lines.wanted))) or forward(lines)  # type: ignore

    def asked(*args: Any) -> list[Draft]:
        rows.append((0, 0))
        return propose(*args)

    drafter.propose = asked  # type: ignore[method-assign]
    engine.step()
    engine.step()
    assert rows == [(50, 0), (50, 0)]
    engine.step()
    assert rows[2:5] == [(19, 0), (0, 0), (1, 1)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_is_never_drafted(target, tmp_path, temperature: float) -> None:
    """Not even where the draft model likes it best."""
    config = tiny_config(vocab_size=V + 40)
    weights = random_weights(config, 1)
    weights["lm_head.weight"][V:] *= 10
    write(tmp_path, config, weights)
    padded = load_model(resolve(str(tmp_path)), "fp32", ops(), torch.device("cpu"))
    watched = Watched(padded, target, trained_width=4, trained_nodes=64)
    row = watched.sequence(text(10))
    row.params = SamplingParams(temperature=temperature)
    (draft,) = watched.propose(row, budget=40)
    assert len(draft) == 40
    assert max(draft.tree.tokens) < V


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_vocabulary_is_the_whole_one_without_the_rest(target, drafts, temperature: float) -> None:
    """Some outputs alone: the tokens that rank highest among them, under their own ids, and the rest of the model as it was."""
    ids = torch.tensor([2, 3, 5, 7, 11, 13, 17, 19])
    whole = Watched(drafts["coarse"], target, trained_width=V, trained_depth=1, trained_nodes=64)
    cut = Watched(drafts["coarse"], target, vocabulary=ids, trained_width=3, trained_depth=1)
    for n in (1, 20):
        row = whole.sequence(text(n, seed=n), number=n)
        row.params = SamplingParams(temperature=temperature)
        (draft,) = whole.propose(row, budget=V)
        assert len(draft) == V
        expected = [token for token in draft.tree.tokens if token in ids.tolist()][:3]
        assert list(cut.propose(row)[0].tree.tokens) == expected


def test_nothing_is_drafted_for_what_the_draft_model_cannot_read(target, drafts) -> None:
    """A token past its embedding, a text past its context; the last draft ends with the context."""
    watched = Watched(drafts["smaller"], target)
    fine, strange = watched.sequence([1, 2, 3]), watched.sequence([1, V - 1, 2], number=1)
    drafts_made = watched.propose(fine, strange)
    assert [len(draft) > 0 for draft in drafts_made] == [True, False]
    watched = Watched(drafts["short"], target, trained_width=1, trained_depth=4)
    for n, depth in ((36, 4), (38, 3), (39, 2), (40, 1), (41, 0), (60, 0)):
        row = watched.sequence(text(n, seed=n), number=n)
        assert len(watched.propose(row)[0]) == depth
        watched.drafter.read([row])  # bounded by the context too


def test_paths_of_little_chance_end(target, drafts) -> None:
    """Estimates are products along a path, and none falls below the least that is drafted."""
    watched = Watched(drafts["coarse"], target, trained_min_probability=0.2, trained_depth=8, trained_width=4)
    (draft,) = watched.propose(watched.sequence(text(30)))
    assert len(draft) > 0
    assert min(draft.estimates) >= 0.2
    for node, parent in enumerate(draft.tree.parents):
        assert parent == ROOT or draft.estimates[node] <= draft.estimates[parent]
    assert draft.sources == ("draft",) * len(draft)


def test_nothing_is_kept_of_sequences_that_ended(target, drafts) -> None:
    """Whether they ended by themselves or were aborted."""
    drafter = drafter_of(drafts["coarse"], target)
    engine = make_engine(target, ops(), drafter=drafter, kv_tokens=KV_TOKENS)
    for request in requests_of(4, 0.7, seed=3):
        engine.add(list(request.prompt), request.params, request.end_tokens, request.seed)
    for _ in range(3):
        engine.step()
    assert drafter._drafted
    for sequence_id in list(engine._sequences):
        engine.abort(sequence_id)
    assert not drafter._drafted
    assert not drafter._contents._digests
    assert drafter.n_bytes >= drafts["coarse"].n_bytes
