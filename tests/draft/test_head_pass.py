"""A pass of an EAGLE-3 head: in one native call it gives the bits of its operations, and reads nothing that is not there."""

from __future__ import annotations

import functools

import pytest
import torch
from checkpoints import tiny
from recomputed import random_head

from specdec import kernels
from specdec.config import SpeculationConfig
from specdec.draft.base import Target
from specdec.draft.features import Features, Piece, Track
from specdec.draft.layers import Layers
from specdec.draft.recurrent import RecurrentDrafter
from specdec.kernels.head_pass import Races, RowList, States
from specdec.models.load import load_model
from specdec.models.source import resolve

pytestmark = pytest.mark.skipif(kernels.select("cpu").name == "torch", reason="there is no such call here")

N_BLOCKS = 20
BLOCKS = [5, 2]


@functools.lru_cache(maxsize=1)
def ops():
    return kernels.select(torch.device("cpu"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(resolve(str(tiny(tmp_path_factory.mktemp("tiny")))), "q8", ops(), torch.device("cpu"))


def layers_of(model, precision: str = "q8", **head) -> Layers:
    loaded = random_head(model, "eagle3", **head)
    config = SpeculationConfig(trained_precision=precision)
    return RecurrentDrafter(loaded, Target(model, ops(), N_BLOCKS), config)._layers


def track_of(model, n: int, taps: int = 2) -> Track:
    """n rows whose features were seen in two passes, among rows of others."""
    generator = torch.Generator().manual_seed(n)
    passes = [tuple(torch.randn(n + 3, model.architecture.hidden_size, generator=generator) for _ in range(taps)) for _ in "12"]
    return Track(0, 0, [Piece(passes[0], list(range(1, n))), Piece(passes[1], [n + 2])], n)


def numbers(states: States) -> list[float]:
    """Of every row, one row behind the other."""
    return (states.flatten() if isinstance(states, torch.Tensor) else states).tolist()


def committed(n: int) -> RowList:
    rows = RowList()
    rows.add_committed([97 + i % 100 for i in range(n)], 0, 0)
    return rows


def races(n: int, temperature: float) -> Races:
    return Races([temperature] * n, list(range(n)), list(range(20, 20 + n)))


@pytest.mark.parametrize("taps", [1, 2])
@pytest.mark.parametrize("vocabulary", [100, None])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "q8", "q4"])
def test_one_call_has_the_bits_of_the_operations(model, precision: str, vocabulary: int | None, taps: int) -> None:
    """Rows that are only fed, rows that are heard, and a tree behind them: states, logits, candidates and chances."""
    n, found = 19, []
    for native in (True, False):
        layers = layers_of(model, precision, vocabulary=vocabulary, taps=tuple(range(taps)))
        assert layers._native
        if not native:
            layers._native = None
        features, track = Features(range(taps)), track_of(model, n, taps)
        tables = [BLOCKS] if native else torch.tensor([BLOCKS], dtype=torch.int32)
        first, _ = layers.run(0, layers.start(features, [track]), committed(n), tables, [3, n - 1], races(2, 0.0))
        tree = RowList()
        for token, slot, path in ((101, n, [n]), (102, n + 1, [n + 1]), (103, n + 2, [n, n + 2])):
            tree.add(token, 0, slot, n, path)
        start = layers.go_on(first.ends, [1, 1, 0], [])
        second, _ = layers.run(0, start, tree, tables, [0, 1, 2], races(3, 1.0))
        found += [first, second]
    for one, other in zip(found[:2], found[2:], strict=True):
        assert numbers(one.ends) == numbers(other.ends)
        assert torch.equal(one.logits, other.logits)
        assert one.tokens == other.tokens
        assert one.chances == other.chances


@pytest.mark.parametrize("n", [19, 300])
def test_rows_that_nobody_wants_leave_their_keys_and_values(model, n: int) -> None:
    """A prompt is fed first, in however many parts, and heard with its last row: as if all had been fed at once."""
    found, blocks = [], [(7 * i + 3) % 20 for i in range(20)]
    for split in (0, n - 1):
        layers, track = layers_of(model), track_of(model, n)
        features, rows = Features((0, 1)), committed(n)
        if split:
            last = track.part()
            said, _ = layers.run(0, layers.start(features, [track]), committed(split), [blocks], [])
            assert len(said.ends) == len(said.tokens) == 0
            track, rows = Track(0, split, [last], 1), RowList()
            rows.add_committed(committed(n).tokens[split:], 0, split)
        found.append(layers.run(0, layers.start(features, [track]), rows, [blocks], [len(rows) - 1], races(1, 0.0))[0])
    assert torch.equal(found[0].logits, found[1].logits)
    assert found[0].ends == found[1].ends


def test_sequences_in_one_call_are_as_alone(model) -> None:
    """Each reads its own blocks, from its own features, and has its own candidates: committed rows, then a level of trees."""
    sizes, tables, d = (19, 7), (BLOCKS, [0, 7]), model.architecture.hidden_size

    def told(which: tuple[int, ...]) -> list[list]:
        layers, rows, tree = layers_of(model), RowList(), RowList()
        for owner, i in enumerate(which):
            rows.add_committed(list(range(97, 97 + sizes[i])), owner, 0)
            tree.add(101 + i, owner, sizes[i], sizes[i], [sizes[i]])
        ends = [sum(sizes[i] for i in which[: k + 1]) - 1 for k in range(len(which))]
        given, inputs = [tables[i] for i in which], layers.start(Features((0, 1)), [track_of(model, sizes[i]) for i in which])
        fed, _ = layers.run(0, inputs, rows, given, ends, Races([0.0] * len(which), list(which), [sizes[i] for i in which]))
        heats = [1.0 + i for i in which]
        grown, _ = layers.run(
            0, layers.go_on(fed.ends, list(range(len(which))), []), tree, given, list(range(len(which))),
            Races(heats, [7 + i for i in which], [sizes[i] + 1 for i in which]),
        )  # fmt: skip
        return [
            [numbers(said.ends)[k * d : k * d + d], said.logits[k].tolist(), said.tokens[k], said.chances[k]]
            for k in range(len(which))
            for said in (fed, grown)
        ]

    assert told((0, 1)) == told((0,)) + told((1,))


@pytest.mark.parametrize(("change", "error"), [
    ({"tables": [[N_BLOCKS, 2]]}, IndexError),
    ({"tables": [[5]]}, IndexError),
    ({"wanted": [19]}, IndexError),
    ({"wanted": [4, 4]}, IndexError),
    ({"rows": committed(18)}, ValueError),
])  # fmt: skip
def test_what_is_not_there_is_an_error(model, change: dict, error: type[Exception]) -> None:
    layers, n = layers_of(model), 19
    given = {"rows": committed(n), "tables": [BLOCKS], "wanted": [n - 1], **change}
    inputs = layers.start(Features((0, 1)), [track_of(model, n)])
    with pytest.raises(error):
        layers.run(0, inputs, given["rows"], given["tables"], given["wanted"], races(len(given["wanted"]), 0.0))


def test_hidden_states_of_another_kind_are_refused(model) -> None:
    layers = layers_of(model)
    tap = torch.zeros(3, model.architecture.hidden_size, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="contiguous float32 on the CPU"):
        layers.start(Features((0, 1)), [Track(0, 0, [Piece((tap, tap), [0])], 1)])


def test_a_pool_that_does_not_fit_the_weights_is_refused(model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native call takes addresses and has no other way to notice: it would write beside the pool."""
    fuse, taken = ops().fuse_head, []
    monkeypatch.setattr(ops(), "fuse_head", lambda *given: taken.append(given) or fuse(*given))
    layers_of(model)
    ((weights, keys, values, ids, best),) = taken
    twice = torch.cat([keys, keys], -1)
    for wrong, message in (
        ((keys, values[:, :-1].contiguous()), "was expected"),
        ((twice, values), "was expected"),
        ((keys, values.double()), "was expected"),
        ((twice[..., : keys.shape[-1]], values), "in one piece"),
    ):
        with pytest.raises(ValueError, match=message):
            fuse(weights, *wrong, ids, best)
