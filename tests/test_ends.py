"""Every way to end an answer beside every kind of drafter: what is asked of the target must not reach, or stop, a drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import tiny
from published_heads import N_LAYERS, eagle1, eagle3, medusa, write

from specdec import LLM, Result, SamplingParams

PROMPT = "tick tock tick tock"
HEADS = {"eagle": eagle1, "eagle3": eagle3, "medusa": medusa}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("target"), num_hidden_layers=N_LAYERS)


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return LLM(str(folder), precision="fp32", self_test=False, speculation="off")


@pytest.fixture(scope="module", params=["ngram", "suffix", "recycling", "copy", "stranger", *HEADS])
def drafted(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """With one drafter: a look-up, the target itself, a model that knows nothing of it, or a published head."""
    kind, place = request.param, tmp_path_factory.mktemp("drafter")
    if kind in HEADS:
        write(place, *HEADS[kind]())
    elif kind == "stranger":
        tiny(place, seed=1)
    trained = str(folder if kind == "copy" else place)
    how = {"speculation": "trained", "drafter": trained} if kind in (*HEADS, "copy", "stranger") else {"speculation": kind}
    return LLM(str(folder), precision="fp32", self_test=False, **how)


def same(result: Result) -> tuple:
    return result.tokens, result.text, result.finish_reason, result.usage, result.logprobs


def test_every_end_is_that_of_plain_decoding(plain: LLM, drafted: LLM) -> None:
    """Limits, stop strings and tokens in the first, the second and later tokens, with and without a least length."""
    for sampled in ({"temperature": 0}, {"temperature": 0.8, "seed": 3}):
        free = SamplingParams(max_tokens=32, ignore_eos=True, logprobs=1, **sampled)
        (whole,) = plain.generate(PROMPT, free)
        text = whole.text
        ends = [
            free,
            *(free.replace(max_tokens=n) for n in (1, 2, 3, 7)),
            *(free.replace(stop_token_ids=[whole.tokens[at]]) for at in (0, 1, 5, 6, 7, 8, 16)),
            *(free.replace(stop=text[at : at + n]) for at, n in ((0, 1), (1, 2), (4, 3), (9, 2))),
            free.replace(stop_token_ids=[whole.tokens[1]], min_tokens=9),
            free.replace(stop=text[3:5], min_tokens=6),
            free.replace(ignore_eos=False, logit_bias={257: 4.0}),
        ]
        for params in ends:
            (expected,), (found,) = plain.generate(PROMPT, params), drafted.generate(PROMPT, params)
            assert same(found) == same(expected), params
    assert drafted.engine.stats.drafted > 0
    drafted.engine.check()
    assert drafted.engine.allocator.n_used == 0
