"""Recorded passes, with a record that runs on the CPU: whatever is padded, the real rows and the pool are untouched by it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from checkpoints import tiny
from harness import Request, make_engine, run

from specdec import attention
from specdec.config import SamplingParams
from specdec.history import History
from specdec.kernels.portable import PortableKernels
from specdec.kv.blocks import BlockAllocator, BlockTable
from specdec.kv.pool import Pool
from specdec.metrics.stats import Stats
from specdec.models.base import Model, Result
from specdec.models.load import load_model
from specdec.models.source import resolve
from specdec.runner.compiled import LEAST_WIDTH, RecordedRunner, make_runner
from specdec.runner.runner import Runner
from specdec.tree import chain
from specdec.types import ROOT, Draft, Sequence, Span, Step, Tree

N_BLOCKS = 48
KERNELS = PortableKernels()


class Recorder:
    """Repeats a pass into the tensors of its first result, as a graph does: it sees inputs only where they were at first."""

    def __init__(self) -> None:
        self.passes = 0

    def __call__(self, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        self.passes += 1
        kept = work()

        def replay() -> None:
            logits, taps = work()
            kept[0].copy_(logits)
            for layer, x in taps.items():
                kept[1][layer].copy_(x)

        kept[0].fill_(torch.nan)  # recording computes nothing
        return replay, kept


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    return load_model(
        resolve(str(tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024))), "fp32", KERNELS, torch.device("cpu")
    )


class Side:
    """A runner with a pool of its own in which every slot that no row wrote is NaN."""

    def __init__(self, model: Model, make: Callable[..., Runner]) -> None:
        s = model.shape
        self.pool = Pool(s.n_layers, N_BLOCKS, s.n_kv_heads, s.head_dim, model.kv_dtype, model.device)
        self.pool.poison(range(N_BLOCKS))
        self.allocator = BlockAllocator(N_BLOCKS)
        self.runner = make(model, attention.select(self.pool, KERNELS), (0,))

    def sequence(self, tokens: list[int], slots: int) -> Sequence:
        table = BlockTable(self.allocator)
        table.reserve(slots)
        n = len(tokens)
        return Sequence(0, tokens, n, SamplingParams(), 0, slots, frozenset(), table, History.of(tokens, n), Stats())


def steps(side: Side) -> list[Step]:
    """Prompts in chunks, one row, bursts, trees, two sequences, and a table wider than the least one; 70 rows as well."""
    chance = random.Random(1)
    text = [chance.randrange(32, 127) for _ in range(90)]

    def draft(tree: Tree) -> Draft:
        return Draft(tree, ("x",) * len(tree))

    one, two = side.sequence(text[:20], 60), side.sequence(text[20:29], LEAST_WIDTH * 16 + 1)
    long = side.sequence(text[:71], 90)
    tree = draft(Tree((40, 41, 42, 43, 44), (ROOT, 0, 0, ROOT, 2)))
    return [
        Step((Span(one, 0, 13),)),
        Step((Span(one, 13, 20),)),
        Step((Span(one, 19, 20),)),
        Step((Span(one, 19, 20, tree),)),
        Step((Span(two, 0, 9, draft(chain([50, 51]))),)),
        Step((Span(two, 8, 9, draft(chain([60]))), Span(one, 19, 20, tree))),
        Step((Span(long, 0, 70),)),
        Step((Span(long, 70, 71), Span(one, 19, 20))),
    ]


def test_recorded_passes_equal_plain_ones(model: Model) -> None:
    """Logits, hidden states and every slot of the pool are the same bits, step by step, and recordings are shared."""
    recorder = Recorder()
    plain = Side(model, lambda *arguments: Runner(*arguments))
    recorded = Side(model, lambda *arguments: RecordedRunner(*arguments, recorder))
    for number, (mine, its) in enumerate(zip(steps(plain), steps(recorded), strict=True)):
        expected, got = plain.runner.forward(mine), recorded.runner.forward(its)
        assert torch.equal(got.logits, expected.logits), f"step {number}"
        assert torch.equal(got.taps[0], expected.taps[0]), f"step {number}"
        assert (got.rows, got.prompt_rows) == (expected.rows, expected.prompt_rows)
        for a, b in ((plain.pool.keys, recorded.pool.keys), (plain.pool.values, recorded.pool.values)):
            assert torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9)), f"step {number} touched other slots"
    assert recorder.passes == 6, "16, 8, 1, wide 16, wide 8 and 2 rows; 70 are not recorded"


def test_hidden_states_outlive_the_next_pass(model: Model) -> None:
    """A repetition overwrites the tensors of the one before, so what was handed out is a copy. (Logits go to the host.)"""
    side = Side(model, lambda *arguments: RecordedRunner(*arguments, Recorder()))
    first = side.runner.forward(Step((Span(side.sequence([65, 66, 67], 16), 0, 3),)))
    kept = first.taps[0].clone()
    side.runner.forward(Step((Span(side.sequence([80, 81, 82], 16), 0, 3),)))
    assert torch.equal(first.taps[0], kept)


def test_an_engine_on_recorded_passes_gives_the_same_tokens(model: Model) -> None:
    requests = [
        Request(tuple(b"the cat sat on the mat, the cat sat on"), SamplingParams(temperature=t, max_tokens=12), seed=i)
        for i, t in enumerate((0, 0.8))
    ]
    answers = []
    for speculation, record in (("off", False), ("auto", True), ("off", True)):
        engine = make_engine(model, KERNELS, speculation)
        if record:
            taps = engine.drafter.taps if engine.drafter else ()
            engine._runner = RecordedRunner(model, attention.select(engine.pool, KERNELS), taps, Recorder())
        answers.append([answer.tokens for answer in run(engine, requests)])
    assert answers[0] == answers[1] == answers[2]


def test_nothing_is_recorded_on_a_cpu(model: Model) -> None:
    assert not model.capturable
    assert type(Side(model, make_runner).runner) is Runner
