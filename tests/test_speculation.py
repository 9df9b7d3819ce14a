"""What a request may say about its own speculation: whom to ask, how much, and what the output may resemble."""

from __future__ import annotations

import math

import pytest
import torch
from harness import Answer, make_engine

from specdec import kernels
from specdec.config import SamplingParams
from specdec.engine import Engine, RequestError
from specdec.kernels.base import Kernels
from specdec.testing import TableModel
from specdec.types import Speculation

V = 64
PARAMS = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture(scope="module")
def ops() -> Kernels:
    return kernels.select(torch.device("cpu"))


def ring() -> TableModel:
    """Token t is followed by t + 1: nothing repeats within 64 tokens, so that only a prediction can be looked up."""
    logp = torch.full((V, V), math.log(0.1 / (V - 1)))
    for t in range(V):
        logp[t, (t + 1) % V] = math.log(0.9)
    return TableModel(logp, 256)


def answer(engine: Engine, prompt: list[int], speculation: Speculation | None, params: SamplingParams = PARAMS) -> Answer:
    engine.add(prompt, params, frozenset(), 0, speculation=speculation)
    got = Answer()
    while engine.has_work:
        for delta in engine.step():
            got.add(delta)
    return got


def test_a_right_prediction_is_followed_and_counted(ops: Kernels) -> None:
    """Predicted text is drafted from the first token on, under its own name; what it says wrongly is counted as refused."""
    plain = answer(make_engine(ring(), ops), [3, 4], None)
    right = answer(make_engine(ring(), ops, "suffix"), [3, 4], Speculation(prediction=tuple(plain.tokens)))
    assert right.tokens == plain.tokens
    assert right.stats["accepted_by_drafter"] == {"prediction": right.stats["accepted"]}
    assert right.stats["accepted"] >= 30
    assert right.stats["drafted"] == right.stats["accepted"]
    assert right.sources.count("prediction") == right.stats["accepted"]

    changed = list(plain.tokens)
    changed[10] = 0  # one word is another one
    near = answer(make_engine(ring(), ops, "suffix"), [3, 4], Speculation(prediction=tuple(changed)))
    assert near.tokens == plain.tokens
    assert near.stats["accepted_by_drafter"]["prediction"] >= 20
    assert near.stats["drafted_by_drafter"]["prediction"] > near.stats["accepted_by_drafter"]["prediction"]


def test_a_prediction_is_its_own_request_s(ops: Kernels) -> None:
    """The next request, without one, is drafted nothing from it."""
    engine = make_engine(ring(), ops, "suffix", max_nodes=4)
    tokens = tuple(range(5, 45))
    first = answer(engine, [3, 4], Speculation(prediction=tokens))
    engine.forget()
    second = answer(engine, [3, 4], None)
    assert first.stats["drafted"] > 0
    assert second.stats["drafted"] == 0
    assert not engine.drafter._predicted


def test_a_request_chooses_its_drafters(ops: Kernels) -> None:
    """None asks all, a list asks those, an empty one asks nobody; the tokens are the same."""
    prompt = [1, 2, 3, 1, 2, 3]
    params = PARAMS.replace(logit_bias={1: 100.0})
    for speculation, asked in (
        (None, {"ngram", "suffix"}),
        (Speculation(), {"ngram", "suffix"}),
        (Speculation(("ngram",)), {"ngram"}),
        (Speculation(("suffix",)), {"suffix"}),
        (Speculation(()), set()),
    ):
        got = answer(make_engine(ring(), ops, "ngram,suffix"), prompt, speculation, params)
        assert got.tokens == [1] * 40
        assert set(got.stats["asked_by_drafter"]) == asked
        assert (got.stats["drafted"] > 0) == bool(asked)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_request_limits_its_nodes(ops: Kernels, most: int) -> None:
    """No pass verifies more nodes than the request allows."""
    tokens = tuple(range(5, 45))
    got = answer(make_engine(ring(), ops, "suffix"), [3, 4], Speculation(max_tokens=most, prediction=tokens))
    assert len(got.stats["drafted_by_depth"]) == most
    assert got.tokens == list(tokens)


@pytest.mark.parametrize(
    ("engine", "speculation", "message"),
    [
        ("suffix", Speculation(("oracle",)), "unknown drafter 'oracle': this engine has suffix"),
        ("off", Speculation(("suffix",)), "unknown drafter 'suffix': this engine has no drafter"),
        ("suffix", Speculation(max_tokens=-1), "must be an integer >= 0, got -1"),
        ("suffix", Speculation(prediction=(V,)), "prediction token 64 is outside the vocabulary"),
        ("ngram", Speculation(prediction=(1,)), "looked up by the suffix drafter, which this request does not use"),
        ("ngram,suffix", Speculation(("ngram",), prediction=(1,)), "looked up by suffix, .* asks for ngram"),
    ],
)
def test_what_cannot_be_done_is_an_error(ops: Kernels, engine: str, speculation: Speculation, message: str) -> None:
    """A wish that would have no effect is refused, with what there is."""
    with pytest.raises(RequestError, match=message):
        make_engine(ring(), ops, engine).add([1], PARAMS, frozenset(), 0, speculation=speculation)
