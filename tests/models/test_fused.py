"""The native pass over a whole decoder has the bits of its operations one by one, for everything a model may be made of."""

from __future__ import annotations

import ctypes
import subprocess
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import tiny
from forward import attention_of, batch_of

from specdec import kernels
from specdec.kernels import fused
from specdec.kernels.base import PlainRows
from specdec.kernels.build import SOURCES, compiler
from specdec.kernels.cpu import NativeKernels
from specdec.kernels.library import LIBRARY
from specdec.kernels.library import load as load_library
from specdec.kv.codec import KINDS as KINDS_OF_ROWS
from specdec.kv.codec import name_of
from specdec.models.base import Batch
from specdec.models.decoder import Decoder
from specdec.models.load import load_model
from specdec.models.source import resolve
from specdec.quant.linear import Linear, StackedLinear

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native kernels are not built")

CPU = torch.device("cpu")
TEXT = list((b"It was the best of times, it was the worst of times, " * 3)[:150])
KINDS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "every bias": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"family": "qwen3", "head_dim": 48},
    "window": {"family": "mistral", "sliding_window": 20},
    "ragged vocabulary": {"vocab_size": 331},
}


class OneByOne(NativeKernels):
    """The native kernels as if there were no native pass."""

    def fuse(self, weights):
        return None


def both(folder: Path, precision: str):
    """The same model twice: fused, and one operation after the other."""
    source = resolve(str(folder))
    models = [load_model(source, precision, run, CPU) for run in (kernels.select(CPU), OneByOne(load_library()))]
    assert models[0]._fused is not None
    assert models[1]._fused is None
    return models


def outputs(model, *batches: Batch) -> list[torch.Tensor]:
    """Logits and both layers' hidden states of one pass after another over the same cache; and logits alone, over another, of
    passes in whose last layer only the wanted rows matter."""
    cache, other, found = attention_of(model), attention_of(model), []
    for batch in batches:
        logits, taps = model.forward(batch, cache, taps=(0, 1))
        found += [logits, taps[0], taps[1], model.forward(batch, other)[0]]
    return found


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "q8", "q4"])
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_as_operation_by_operation(tmp_path: Path, kind: str, precision: str) -> None:
    """Rows in one slab, in several, alone, and in a pass that wants only some or none of them."""
    settings = dict(KINDS[kind])
    native, plain = both(tiny(tmp_path, settings.pop("family", "llama"), **settings), precision)
    batches = (
        batch_of(TEXT[:70], wanted=[0, 63, 64, 69]),
        batch_of(TEXT[70:80], 70, wanted=[]),
        batch_of(TEXT[80:81], 80),
        batch_of(TEXT[81:90], 81, wanted=[2, 8]),
    )
    assert_equal(outputs(native, *batches), outputs(plain, *batches))


@pytest.mark.parametrize("dtype", list(KINDS_OF_ROWS), ids=name_of)
@pytest.mark.parametrize("settings", [{}, {"family": "qwen3", "head_dim": 48}, {"family": "qwen3", "head_dim": 64}])
def test_same_bits_whatever_keys_and_values_are_held_in(tmp_path: Path, settings: dict, dtype: torch.dtype) -> None:
    native, plain = (model.holding(dtype) for model in both(tiny(tmp_path, **settings), "q8"))
    batches = batch_of(TEXT[:70], wanted=[0, 69]), batch_of(TEXT[70:80], 70), batch_of(TEXT[80:81], 80)
    assert_equal(outputs(native, *batches), outputs(plain, *batches))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_same_bits_on_any_number_of_threads(tmp_path: Path, threads: int) -> None:
    """A matrix is cut at other places; a channel does not notice."""
    native, plain = both(tiny(tmp_path, hidden_size=256, intermediate_size=1024, vocab_size=4096), "q4")
    before = torch.get_num_threads()
    try:
        kernels.set_threads(threads)
        assert_equal(outputs(native, batch_of(TEXT[:90])), outputs(plain, batch_of(TEXT[:90])))
    finally:
        kernels.set_threads(before)


def test_parts_of_different_encodings(tmp_path: Path) -> None:
    """Matrices that could not be joined are multiplied part by part, each with the rows in the form that it takes."""
    source = resolve(str(tiny(tmp_path)))
    runs = kernels.select(CPU), OneByOne(load_library())
    q4, q8, fp32 = (load_model(source, precision, runs[0], CPU) for precision in ("q4", "q8", "fp32"))
    found = []
    for run in runs:
        layers = [
            replace(
                one,
                qkv=StackedLinear([part(one.qkv, 0, 64, run), part(two.qkv, 64, 128, run)]),
                gate_up=StackedLinear([part(three.gate_up, 0, 96, run), part(two.gate_up, 96, 192, run)]),
            )
            for one, two, three in zip(q4.layers, q8.layers, fp32.layers, strict=True)
        ]
        model = Decoder(
            q4.architecture,
            embedding=q4.embedding,
            layers=layers,
            norm=q4.norm,
            head=q4.head,
            kernels=run,
            precision="q4",
            kv_dtype=torch.bfloat16,
            device=CPU,
        )
        found.append(outputs(model, batch_of(TEXT[:70])))
    assert_equal(*found)


def part(linear: Linear, start: int, stop: int, run: NativeKernels) -> Linear:
    """Some channels of a packed matrix, whole blocks of them."""
    weight = linear.weight
    cut = replace(weight, data=weight.data[start // 16 : stop // 16].contiguous(), n=stop - start)
    return type(linear)(cut, run)


def test_what_it_cannot_cut_runs_one_by_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Heads or a feed-forward that do not fall on blocks of channels: the model runs by its single operations, and says so."""
    for settings, reason in (({"head_dim": 24}, "heads of 24"), ({"intermediate_size": 80}, "a feed-forward of 80")):
        folder = tmp_path / reason.replace(" ", "-")
        folder.mkdir()
        model = load_model(resolve(str(tiny(folder, "qwen3", **settings))), "fp32", kernels.select(CPU), CPU)
        assert model._fused is None
        assert reason in (fused.why_not(model._weights()) or "")
        assert f"operation by operation, more slowly: the fused pass does not take {reason}" in caplog.text


def plain(batch: Batch) -> PlainRows:
    """The same rows as plain integers."""
    r, wide, narrow = batch.rows, array("q"), array("i")
    for x in (batch.tokens, batch.positions, batch.lengths, batch.wanted):
        wide.extend(x.tolist())
    for x in (r.sequence, r.slot, r.prefix, r.n_path, r.tables, r.path):
        narrow.extend(x.flatten().tolist())
    longest = int(batch.lengths.max())
    return PlainRows(wide, narrow, len(r), len(batch.wanted), *r.tables.shape, r.path.shape[1], longest)


@pytest.mark.parametrize("rope", ["default", "dynamic"])
def test_plain_rows_give_the_bits_of_tensors(tmp_path: Path, rope: str) -> None:
    """Past the context that a dynamic scaling was made for too, where angles do not come out of one table; for a prompt and for
    drafted rows with paths and two tables."""
    scaling = {"rope_scaling": {"rope_type": rope, "factor": 2.0}, "max_position_embeddings": 64} if rope != "default" else {}
    model, _ = both(tiny(tmp_path, **scaling), "q8")
    here, there = attention_of(model), attention_of(model)
    tapped, untapped = model.bind(here, (0, 1)), model.bind(here)
    for batch in (
        batch_of(TEXT[:60], wanted=[0, 59]),
        batch_of(TEXT[60:70], 60, 60, wanted=[]),
        batch_of(TEXT[70:80], 70, 60),
        in_a_tree(batch_of(TEXT[80:83], 80, 60)),
    ):
        logits, taps = model.forward(batch, there, (0, 1))
        got, got_taps = tapped(plain(batch))
        assert_equal([got, got_taps[0], got_taps[1]], [logits, taps[0], taps[1]])
        assert_equal([untapped(plain(batch))[0]], [logits])


def in_a_tree(batch: Batch) -> Batch:
    """Three consecutive rows, the last two being siblings that follow the first."""
    start = int(batch.positions[0])
    batch.positions[2] = start + 1
    rows = replace(
        batch.rows,
        sequence=torch.tensor([0, 1, 1], dtype=torch.int32),
        tables=batch.rows.tables.repeat(2, 1),
        prefix=torch.tensor([start + 1] * 3, dtype=torch.int32),
        path=torch.tensor([[-1], [start + 1], [start + 2]], dtype=torch.int32),
        n_path=torch.tensor([0, 1, 1], dtype=torch.int32),
    )
    return replace(batch, rows=rows)


def test_bad_plain_rows_are_errors(tmp_path: Path) -> None:
    model, _ = both(tiny(tmp_path), "q8")
    run, good = model.bind(attention_of(model)), plain(batch_of(TEXT[:3]))
    with pytest.raises(ValueError, match="4 rows, 3 wanted, need 15 wide and 17 narrow integers"):
        run(replace(good, n_rows=4))
    with pytest.raises(ValueError, match="3 rows, 3 wanted, need 12 wide and 14 narrow integers"):
        run(replace(good, table_width=2))
    good.narrow[3] = 16
    with pytest.raises(IndexError, match="outside the tables"):
        run(good)
    with pytest.raises(ValueError, match=r"taps \[2\] are not layers"):
        model.bind(attention_of(model), (2,))


def test_bad_rows_are_errors(tmp_path: Path) -> None:
    """What would read or write outside a tensor is refused before anything runs."""
    model, _ = both(tiny(tmp_path), "q8")
    cache = attention_of(model)
    cases = [
        (batch_of([1, 2, 320]), "token is outside"),
        (batch_of(TEXT[:3], wanted=[3]), "wanted rows must increase"),
        (batch_of(TEXT[:3], wanted=[2, 1]), "wanted rows must increase"),
    ]
    table = batch_of(TEXT[:3])
    table.rows.tables.fill_(99)
    slot = batch_of(TEXT[:3])
    slot.rows.slot[1] = 16
    for batch, message in [*cases, (table, "outside the pool"), (slot, "outside the tables")]:
        with pytest.raises(IndexError, match=message):
            model.forward(batch, cache)
    wrong = batch_of(TEXT[:3])
    object.__setattr__(wrong, "tokens", wrong.tokens.int())
    with pytest.raises(ValueError, match=r"tokens must be contiguous torch.int64 \[3\]"):
        model.forward(wrong, cache)


def test_python_and_c_agree_on_the_structures(tmp_path: Path) -> None:
    """A field that one side adds and the other does not would shift all that follow it."""
    names = {
        "Part": fused._Part,
        "Matrix": fused._Matrix,
        "Layer": fused._Layer,
        "Decoder": fused.NativeDecoder,
        "Pass": fused.NativePass,
    }
    checks = []
    for name, structure in names.items():
        checks.append(f"_Static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, {name!r});".replace("'", '"'))
        for field, *_ in structure._fields_:
            offset = getattr(structure, field).offset
            checks.append(f'_Static_assert(offsetof({name}, {field}) == {offset}, "{name}.{field}");')
    source = tmp_path / "layout.c"
    source.write_text("\n".join(["#include <stddef.h>", '#include "decoder.h"', *checks]))
    done = subprocess.run(
        [*compiler(), "-fsyntax-only", f"-I{SOURCES}", str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
