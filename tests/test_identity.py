"""Speculation changes nothing but the speed: the same tokens as plain decoding, bit for bit the same logits.

The main regression test: every drafter × burst width × mixed batch × sampling parameters × temperature × precision on
TINY, which has real attention and so notices any fault of cache, position or list of ancestors.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import tiny
from forward import attention_of, batch_of
from harness import Answer, Request, make_engine, run, truth_of
from reference import decode

from specdec import kernels
from specdec.config import SamplingParams
from specdec.kernels.portable import PortableKernels
from specdec.kv.codec import DTYPES
from specdec.models.load import load_model
from specdec.models.source import resolve
from specdec.runner.invariance import check_invariance
from specdec.testing import Adversary, Oracle, Thicket

N_TOKENS = 40
TEMPERATURES = (0.0, 0.7, 1.3)
PARAMETERS = {
    "plain": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8, "top_k": 40},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.3},
    "frequency+": {"frequency_penalty": 1.7},
    "frequency-": {"frequency_penalty": -1.7, "top_k": 20},
    "presence": {"presence_penalty": 1.5, "top_p": 0.9},
    "bias": {"logit_bias": {101: 4.0, 32: -100.0}},
    "bad words": {"bad_words_ids": ((101,), (116, 104)), "top_k": 10},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": tuple(range(97, 110))},
    "stop ids": {"stop_token_ids": (120, 81, 49)},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {257: 5.0}},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"logprobs": 1, "prompt_logprobs": 2},
    "all": {
        "top_k": 30, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1, "presence_penalty": 0.3,
        "frequency_penalty": 0.2, "logit_bias": {97: 1.5}, "min_tokens": 5, "stop_token_ids": (122,), "logprobs": 1,
    },
}  # fmt: skip
BUILT_IN = ("ngram", "suffix", "recycling", "auto", "ngram,suffix,recycling")
FAKES = ("oracle", "adversary", "thicket")
PRECISIONS = ("fp32", "bf16", "q8", "q4", "q8 int8", "bf16 int4")
"""Of the weights, and the format of keys and values where it is not the one that goes with them."""


@functools.lru_cache(maxsize=1)
def ops():
    return kernels.select(torch.device("cpu"))


@pytest.fixture(scope="module", params=PRECISIONS)
def model(request, tmp_path_factory):
    return load(tmp_path_factory.mktemp("tiny"), request.param)


def load(folder: Path, precision: str, **overrides):
    precision, _, kv_format = precision.partition(" ")
    model = load_model(resolve(str(tiny(folder, **overrides))), precision, ops(), torch.device("cpu"))
    return model.holding(DTYPES[kv_format]) if kv_format else model


def prompts(n: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Printable bytes that repeat themselves here and there, of lengths 1 to 40."""
    rng = random.Random(seed)
    out = []
    for _ in range(n):
        phrase = [rng.randint(97, 122) for _ in range(rng.randint(1, 9))]
        out.append(tuple((phrase * 6)[: rng.randint(1, 40)]))
    return out


def mixed(temperature: float, n: int = 8, seed: int = 0) -> list[Request]:
    """n requests with different parameters, prompts and lengths at one temperature."""
    sets = list(PARAMETERS.values())
    return [
        Request(
            prompt,
            SamplingParams(temperature=temperature, max_tokens=N_TOKENS - 3 * (i % 4), **sets[(seed * n + i) % len(sets)]),
            seed=1000 * seed + i,
            end_tokens=frozenset({257}),
        )
        for i, prompt in enumerate(prompts(n, seed))
    ]


def plain(model, requests: list[Request]) -> list[Answer]:
    """Each request alone, without drafts."""
    return [run(make_engine(model, ops()), [request])[0] for request in requests]


def drafter_of(kind: str, model, truth):
    v = model.shape.vocab_size
    return {
        "oracle": lambda: Oracle(truth),
        "adversary": lambda: Adversary(truth, v),
        "thicket": lambda: Thicket(truth, v, seed=7),
    }[kind]()


@pytest.fixture(scope="module")
def expected(model):
    """The plain answers to the mixed requests, computed once per precision."""

    @functools.cache
    def of(temperature: float, seed: int) -> tuple[list[Request], list[Answer]]:
        requests = mixed(temperature, seed=seed)
        return requests, plain(model, requests)

    return of


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("seed", [0, 1])
def test_plain_decoding_is_the_naive_reference(model, expected, temperature: float, seed: int) -> None:
    """The engine without drafts equals a decoder that recomputes everything and samples in plain numpy."""
    for request, answer in zip(*expected(temperature, seed), strict=True):
        tokens, reason = decode(
            functools.partial(last_logits, model),
            request.prompt,
            request.params,
            request.end_tokens,
            request.seed,
            model.shape.context,
        )
        assert answer.tokens == tokens
        assert answer.finish_reason == reason


def last_logits(model, tokens):
    """[V] of the last token, the whole context in one pass through a fresh cache, without the engine."""
    logits, _ = model.forward(batch_of(list(tokens), wanted=[len(tokens) - 1]), attention_of(model))
    return logits[-1]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("max_nodes", [1, 4, 8])
@pytest.mark.parametrize("kind", BUILT_IN + FAKES)
def test_no_drafter_or_width_changes_a_token(model, expected, kind: str, max_nodes: int, temperature: float) -> None:
    """Eight mixed requests in one batch with drafts equal each of them alone without."""
    for seed in (0, 1):
        requests, answers = expected(temperature, seed)
        if kind in FAKES:
            engine = make_engine(
                model, ops(), drafter=drafter_of(kind, model, truth_of(requests, answers)), max_nodes=max_nodes
            )
        else:
            engine = make_engine(model, ops(), kind, max_nodes=max_nodes)
        got = run(engine, requests)
        assert [a.same for a in got] == [a.same for a in answers]
        if kind == "oracle":
            assert all(a.stats["accepted"] == a.stats["drafted"] for a in got)


@pytest.mark.parametrize("config", [
    {"max_sequences": 1},
    {"max_sequences": 3, "prefill_rows": 1},
    {"prefill_rows": 7},
    {"prefill_rows": 16, "kv_tokens": 256},
    {"kv_tokens": 96, "max_len": 90},
])  # fmt: skip
@pytest.mark.parametrize("kind", ["off", "auto", "thicket"])
def test_no_batch_chunk_or_preemption_changes_a_token(model, expected, kind: str, config: dict) -> None:
    """Batch size, prompt chunks and a pool so small that sequences are preempted and recomputed change nothing."""
    for temperature in (0.0, 1.3):
        requests, answers = expected(temperature, 1)
        if kind == "thicket":
            engine = make_engine(model, ops(), drafter=drafter_of(kind, model, truth_of(requests, answers)), **config)
        else:
            engine = make_engine(model, ops(), kind, **config)
        assert [a.same for a in run(engine, requests)] == [a.same for a in answers]
        if config.get("max_len") == 90:
            assert engine.stats.preemptions > 0, "the pool was meant to run short"


def test_prompt_logprobs_are_those_of_plain_rows(model) -> None:
    """Every prompt token but the first has one, whatever chunks, drafter and pool: the log-softmax of the row before it."""
    for n_prompt in (1, 2, 15, 16, 17, 33):
        prompt = prompts(1, n_prompt)[0] * 40
        request = Request(prompt[:n_prompt], SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=2))
        expected = [last_logits(model, request.prompt[:i]).double().log_softmax(-1) for i in range(1, n_prompt)]
        other = Request(prompts(1, 7)[0], SamplingParams(temperature=1, max_tokens=30))
        for config in ({}, {"prefill_rows": 5}, {"kv_tokens": 64, "max_len": 64, "prefill_rows": 9}):
            answer = run(make_engine(model, ops(), "auto", **config), [other, request])[1]
            assert [entry.token for entry in answer.prompt_logprobs] == list(request.prompt[1:])
            for entry, row in zip(answer.prompt_logprobs, expected, strict=True):
                assert entry.logprob == pytest.approx(row[entry.token].item(), abs=1e-9)
                assert [token for token, _ in entry.top] == row.topk(2).indices.tolist()


@pytest.mark.parametrize("pass_seconds", [
    {1: 1e-4, 64: 1e-4},  # rows for nothing, but passes so fast that asking hardly pays
    {1: 1e-9, 64: 1e3},  # rows beyond price
    {1: 1e9, 2: 1e-9, 64: 1e9},  # a dip that cannot be
    {3: 1e-3, 5: 2e-3, 6: 9e-3},  # a cliff
    {1: 1e-3, 9: 1.1e-3},
])  # fmt: skip
@pytest.mark.parametrize("kind", ["auto", "oracle", "thicket"])
def test_no_cost_changes_a_token(model, expected, kind: str, pass_seconds: dict[int, float]) -> None:
    """Whatever passes are said to cost, and so whatever the budget cuts and whenever it is silent, the tokens are the same."""
    requests, answers = expected(1.3, 0)
    drafter = drafter_of(kind, model, truth_of(requests, answers)) if kind in FAKES else None
    engine = make_engine(model, ops(), "off" if drafter else kind, drafter=drafter, pass_seconds=pass_seconds)
    assert [a.same for a in run(engine, requests)] == [a.same for a in answers]


def test_order_of_arrival_does_not_matter(model) -> None:
    """Four requests, greedy and sampled, with and without a penalty: each answer is its own in all 24 orders."""
    requests = [
        Request((116, 105, 99, 107), SamplingParams(temperature=t, repetition_penalty=r, max_tokens=n), seed=n)
        for t, r, n in ((0, 1, 9), (0, 2, 12), (1, 1, 7), (1, 2, 14))
    ]
    alone = plain(model, requests)
    for order in itertools.permutations(range(4)):
        answers = run(make_engine(model, ops(), "auto"), [requests[i] for i in order])
        assert [answer.same for answer in answers] == [alone[i].same for i in order]


@pytest.mark.parametrize(("precision", "kv_format"), [("fp32", "fp32"), ("q8", "bf16"), ("q8", "int8")])
def test_portable_kernels_keep_the_promise(tmp_path, precision: str, kv_format: str) -> None:
    """Where nothing was compiled the PyTorch kernels serve, and speculation changes no token there either."""
    portable = PortableKernels()
    model = load_model(resolve(str(tiny(tmp_path))), precision, portable, torch.device("cpu")).holding(DTYPES[kv_format])
    assert check_invariance(model, portable).exact
    for temperature in (0.0, 0.7):
        requests = [replace(r, params=r.params.replace(max_tokens=12, min_tokens=0)) for r in mixed(temperature, 4)]
        alone = [run(make_engine(model, portable), [request])[0] for request in requests]
        drafter = drafter_of("thicket", model, truth_of(requests, alone))
        for engine in (make_engine(model, portable, "auto"), make_engine(model, portable, drafter=drafter, prefill_rows=9)):
            assert [a.same for a in run(engine, requests)] == [a.same for a in alone]


def test_opposite_penalties_give_different_text(model) -> None:
    """Penalties are applied and not merely accepted: opposite signs differ, with a drafter as without."""
    for name in ("frequency_penalty", "presence_penalty"):
        texts = []
        for value in (-1.7, 1.7):
            request = Request(tuple(b"tick tock tick tock"), SamplingParams(temperature=0, max_tokens=24, **{name: value}))
            answers = [run(make_engine(model, ops(), kind), [request])[0].tokens for kind in ("off", "auto")]
            assert answers[0] == answers[1]
            texts.append(answers[0])
        assert texts[0] != texts[1]


def test_acceptance_patterns(model) -> None:
    """Drafts that agree for exactly 0, 1, … K tokens and then fail leave cache and positions right for what follows."""
    request = Request(prompts(1, 5)[0], SamplingParams(temperature=0, max_tokens=60))
    (answer,) = plain(model, [request])
    truth, v = truth_of([request], [answer]), model.shape.vocab_size

    class Agreeing(Oracle):
        def __init__(self, n: int) -> None:
            super().__init__(truth)
            self._n = n

        def _draft(self, sequence, truth):
            return super()._draft(sequence, [t if i < self._n else (t + 1) % v for i, t in enumerate(truth)])

    for n in range(7):
        (got,) = run(make_engine(model, ops(), drafter=Agreeing(n), max_nodes=6), [request])
        assert got.same == answer.same
        assert len(got.stats["accepted_by_depth"]) == n, "no draft was right any deeper"
        assert got.stats["accepted"] >= n * (got.stats["target_passes"] - 2), "every pass but the last ones accepted n"


def test_windows_and_drafts(tmp_path) -> None:
    """A sliding window smaller than a burst hides the same keys from a drafted row as from a committed one."""
    model = load(tmp_path, "fp32", family="mistral", sliding_window=8)
    for n_prompt in (5, 7, 8, 9, 20):
        request = Request(tuple(range(97, 97 + n_prompt)), SamplingParams(temperature=0, max_tokens=40))
        (answer,) = plain(model, [request])
        assert (
            answer.tokens
            == decode(
                functools.partial(last_logits, model), request.prompt, request.params, frozenset(), 0, model.shape.context
            )[0]
        )
        for kind, max_nodes in itertools.product(("thicket", "oracle", "adversary"), (1, 3, 4, 7, 12)):
            drafter = drafter_of(kind, model, truth_of([request], [answer]))
            (got,) = run(make_engine(model, ops(), drafter=drafter, max_nodes=max_nodes), [request])
            assert got.same == answer.same


def test_one_slot_carries_nothing_over(model) -> None:
    """A second, unrelated request on the same engine gets the drafts and the answer of a fresh engine."""
    first = Request(tuple(b"phrase a repeated " * 8), SamplingParams(temperature=0, max_tokens=20))
    second = Request(tuple(b"another b " * 4), SamplingParams(temperature=0, max_tokens=20))
    for kind in ("ngram", "suffix"):
        fresh = run(make_engine(model, ops(), kind), [second])[0]
        engine = make_engine(model, ops(), kind)
        run(engine, [first])
        used = run(engine, [second])[0]
        assert used.same == fresh.same
        if kind == "ngram":
            assert (used.stats["drafted"], used.stats["accepted"]) == (fresh.stats["drafted"], fresh.stats["accepted"])


def test_many_requests_leave_no_trace(model) -> None:
    """Drafter state is released with its sequence, also of one that was aborted: memory does not grow with requests."""
    request = Request(tuple(b"abc abc abc"), SamplingParams(temperature=0, max_tokens=16))
    for kind, state in (("ngram", "_indexes"), ("suffix", "_local")):
        engine = make_engine(model, ops(), kind)
        for _ in range(5):
            assert run(engine, [request])[0].stats["drafted"] > 0
        engine.add(list(request.prompt), request.params, frozenset(), 0)
        engine.step()
        engine.step()
        assert len(getattr(engine.drafter, state)) == 1
        engine.abort(5)
        assert not getattr(engine.drafter, state)
