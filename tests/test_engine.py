"""The step loop on a model whose law is a table: limits, counts, ends and errors, each with drafts of known quality."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch
from harness import Answer, Request, make_engine, run, truth_of
from torch import Tensor

from specdec import kernels
from specdec.config import ConfigError, EngineConfig, SamplingParams, SpeculationConfig
from specdec.engine import Engine, RequestError
from specdec.kernels.base import Kernels
from specdec.testing import Adversary, Oracle, TableDrafter, TableModel, Thicket

GREEDY = SamplingParams(temperature=0, max_tokens=11)
V = 32


def ring(context: int = 64) -> TableModel:
    """Token t is followed by t + 1 with probability 0.9: greedy decoding counts upwards and is never in doubt."""
    logp = torch.full((V, V), math.log(0.1 / (V - 1)))
    for t in range(V):
        logp[t, (t + 1) % V] = math.log(0.9)
    return TableModel(logp, context)


@pytest.fixture(scope="module")
def ops() -> Kernels:
    return kernels.select(torch.device("cpu"))


def plain(model: TableModel, ops: Kernels, *requests: Request, **config) -> list[Answer]:
    return run(make_engine(model, ops, **config), requests)


def drafted(model: TableModel, ops: Kernels, kind: str, *requests: Request, **config) -> list[Answer]:
    """The same requests with an oracle, an adversary or a thicket of both."""
    truth = truth_of(requests, plain(model, ops, *requests, **{k: v for k, v in config.items() if k != "max_nodes"}))
    drafter = {
        "oracle": lambda: Oracle(truth),
        "adversary": lambda: Adversary(truth, V),
        "thicket": lambda: Thicket(truth, V, seed=1),
    }[kind]()
    return run(make_engine(model, ops, drafter=drafter, **config), requests)


KINDS = pytest.mark.parametrize("kind", ["oracle", "adversary", "thicket"])
WIDTHS = pytest.mark.parametrize("max_nodes", [1, 2, 4, 8])


def test_an_oracle_is_counted_exactly(ops: Kernels) -> None:
    """Eleven tokens with four always-right drafts a pass: 5 + 5 + 1, eight drafted and eight accepted, none over-counted."""
    (answer,) = drafted(ring(), ops, "oracle", Request((3,), GREEDY), max_nodes=4)
    assert answer.tokens == list(range(4, 15))
    stats = answer.stats
    assert (stats["target_passes"], stats["drafted"], stats["accepted"], stats["emitted"]) == (3, 8, 8, 11)
    assert stats["accepted_by_depth"] == stats["reached_by_depth"] == stats["drafted_by_depth"] == [2, 2, 2, 2]
    assert answer.sources == (["oracle"] * 4 + [None]) * 2 + [None]


def test_what_was_accepted_behind_an_end_is_not_counted(ops: Kernels) -> None:
    """The end stands in the middle of an accepted path: the rest of it was never emitted."""
    target = ring()
    table = TableDrafter(target._logp, None, 4, 1)
    made = make_engine(target, ops, drafter=table, max_nodes=4)
    (answer,) = run(made, [Request((3,), GREEDY, end_tokens=frozenset({6}))])
    assert (answer.tokens, answer.finish_reason) == ([4, 5, 6], "stop")
    assert (answer.stats["accepted"], answer.stats["emitted"]) == (3, 3)
    assert answer.sources == ["table"] * 3


@pytest.mark.parametrize("kind", ["off", "oracle", "adversary", "thicket"])
def test_no_end_token_comes_before_min_tokens(ops: Kernels, kind: str) -> None:
    """Neither the likeliest token nor a drawn one, neither in plain decoding nor on a path of a draft."""
    ends = frozenset({6, 20})
    greedy = Request((3,), GREEDY.replace(min_tokens=5), end_tokens=ends)
    drawn = SamplingParams(temperature=1.5, min_tokens=8, max_tokens=20)
    requests = [greedy, *(Request((3,), drawn, seed=seed, end_tokens=ends) for seed in range(40))]
    first, *others = (
        plain(ring(), ops, *requests, max_sequences=8)
        if kind == "off"
        else drafted(ring(), ops, kind, *requests, max_nodes=4, max_sequences=8)
    )
    assert first.tokens == [4, 5, 0, 1, 2, 3, 4, 5, 6]  # after the first 5, of all equally likely others the first
    assert all(ends.isdisjoint(answer.tokens[:8]) for answer in others)
    assert any(ends & {*answer.tokens[8:]} for answer in others), "they may end from then on"


@WIDTHS
def test_right_drafts_give_width_plus_one_tokens_a_pass(ops: Kernels, max_nodes: int) -> None:
    """τ of a drafter that equals the target is the burst width plus one: no row or slot is off by one."""
    n = 6 * (max_nodes + 1)
    (answer,) = drafted(ring(256), ops, "oracle", Request((3,), GREEDY.replace(max_tokens=n)), max_nodes=max_nodes)
    assert answer.stats["tokens_per_pass"] == max_nodes + 1


@WIDTHS
def test_wrong_drafts_change_nothing_but_speed(ops: Kernels, max_nodes: int) -> None:
    """Always refused: one token a pass, the same tokens as plain decoding."""
    (answer,) = drafted(ring(), ops, "adversary", Request((3,), GREEDY), max_nodes=max_nodes)
    assert answer.tokens == list(range(4, 15))
    assert answer.stats["accepted"] == 0
    assert answer.stats["tokens_per_pass"] == 1


def test_a_drafter_that_fails_is_asked_less_often_and_comes_back(ops: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes and asking take modelled time: a drafter that is never right falls silent, one that turns right is heard again."""
    now = itertools.count()  # every look at the clock is a millisecond later
    monkeypatch.setattr(time, "perf_counter", lambda: next(now) / 1000)
    request = Request((3,), GREEDY.replace(max_tokens=240))
    truth = truth_of([request], plain(ring(256), ops, request))

    class Late(Oracle):
        """Wrong for the first 120 tokens, right from then on."""

        asked: list[int] = []  # noqa: RUF012

        def _draft(self, sequence, truth):
            self.asked.append(sequence.n_output)
            return super()._draft(sequence, [(t + (sequence.n_output < 120)) % V for t in truth])

    costs = {1: 0.020, 9: 0.036}
    (answer,) = run(make_engine(ring(256), ops, drafter=Late(truth), max_nodes=4, pass_seconds=costs), [request])
    assert answer.tokens == [(4 + i) % V for i in range(240)]
    early = [n for n in Late.asked if 60 <= n < 120]
    assert 1 <= len(early) <= 20, "a millisecond of each twenty is too much to ask in vain every time"
    assert answer.stats["quiet_passes"] >= 60
    assert answer.stats["asked_by_drafter"] == {"oracle": len(Late.asked)}
    late = [n for n in Late.asked if n >= 200]
    assert late == list(range(late[0], 240, 5))[: len(late)], "every pass again, five tokens each"
    assert len(late) >= 7


@KINDS
@WIDTHS
def test_every_length_limit_is_met_exactly(ops: Kernels, kind: str, max_nodes: int) -> None:
    """Delivered tokens = tokens counted = max_tokens, for every limit: a burst never over- or under-delivers."""
    requests = [Request((3,), GREEDY.replace(max_tokens=n, logprobs=1, ignore_eos=True)) for n in range(1, 25)]
    for n, answer in enumerate(drafted(ring(), ops, kind, *requests, max_nodes=max_nodes), start=1):
        assert len(answer.tokens) == len(answer.logprobs) == len(answer.sources) == answer.stats["emitted"] == n
        assert answer.finish_reason == "length"
        assert 0 <= answer.stats["accepted"] <= answer.stats["drafted"]


@KINDS
@WIDTHS
def test_an_end_token_inside_a_burst_ends_there(ops: Kernels, kind: str, max_nodes: int) -> None:
    """Wherever in a burst the end token falls, nothing after it comes out, and the reason is ``stop``."""
    requests = [Request((3,), GREEDY, end_tokens=frozenset({3 + j})) for j in range(1, 12)]
    for j, answer in enumerate(drafted(ring(), ops, kind, *requests, max_nodes=max_nodes), start=1):
        assert answer.tokens == list(range(4, 4 + j))
        assert answer.finish_reason == "stop"
        assert answer.stats["emitted"] == j


class Countdown:
    """A stopper that ends a sequence at a token, as a stop string would."""

    def __init__(self, token: int) -> None:
        self.token, self.fed = token, []

    def feed(self, token: int) -> bool:
        self.fed.append(token)
        return token == self.token


@WIDTHS
def test_a_stopper_sees_each_token_and_none_after_its_own(ops: Kernels, max_nodes: int) -> None:
    """Stop strings are matched token by token, also in the middle of a burst; a stop within the limit wins over the limit."""
    request = Request((3,), GREEDY.replace(max_tokens=5))
    truth = truth_of([request], plain(ring(), ops, request))
    for stop, expected, reason in ((6, [4, 5, 6], "stop"), (10, [4, 5, 6, 7, 8], "length"), (8, [4, 5, 6, 7, 8], "stop")):
        engine, stopper, answer = (
            make_engine(ring(), ops, drafter=Oracle(truth), max_nodes=max_nodes),
            Countdown(stop),
            Answer(),
        )
        engine.add(list(request.prompt), request.params, frozenset(), 0, stopper)
        while engine.has_work:
            for delta in engine.step():
                answer.add(delta)
        assert (answer.tokens, answer.finish_reason) == (expected, reason)
        assert stopper.fed == expected


@KINDS
def test_the_context_limit_is_the_model_s_own(ops: Kernels, kind: str) -> None:
    """Prompts next to the limit are served to its last token, drafts do not enlarge or shrink it, longer ones are refused."""
    for n_prompt in range(55, 64):
        request = Request(tuple(t % V for t in range(n_prompt)), GREEDY.replace(max_tokens=100))
        (answer,) = drafted(ring(64), ops, kind, request, max_nodes=8)
        assert n_prompt + len(answer.tokens) == 64
        assert answer.finish_reason == "length"
    for n_prompt in (64, 65, 300):
        engine = make_engine(ring(64), ops)
        with pytest.raises(RequestError, match=f"the prompt has {n_prompt} tokens.*context of 64"):
            engine.add([1] * n_prompt, GREEDY, frozenset(), 0)
        assert not engine.has_work
        assert engine.allocator.n_used == 0


def test_first_token_out_of_the_prompt_pass_is_delivered_and_tested(ops: Kernels) -> None:
    """The token that the prompt's last row gives counts, may be the only one, and may end the sequence."""
    one, end = Request((3,), GREEDY.replace(max_tokens=1)), Request((3,), GREEDY, end_tokens=frozenset({4}))
    for kind in ("oracle", "adversary"):
        answers = drafted(ring(), ops, kind, one, end)
        assert [(a.tokens, a.finish_reason) for a in answers] == [([4], "length"), ([4], "stop")]


def test_logprobs_are_the_model_s_own(ops: Kernels) -> None:
    """Whatever the sampling parameters, reported values are log P of the model's row; never 0 for a drafted token."""
    table = torch.tensor([0.5, 0.3, 0.2]).log().repeat(3, 1)
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.1),
        SamplingParams(temperature=2),
        SamplingParams(top_p=0.4),
        SamplingParams(top_k=1),
    ):
        request = Request((0,), params.replace(max_tokens=12, logprobs=3), seed=5)
        model = TableModel(table, 64)
        truth = truth_of([request], plain(model, ops, request))
        (answer,) = run(make_engine(model, ops, drafter=Thicket(truth, 3, seed=0)), [request])
        assert answer.stats["drafted"] > 0
        for token, entry in zip(answer.tokens, answer.logprobs, strict=True):
            assert entry.token == token
            assert entry.logprob == pytest.approx(math.log([0.5, 0.3, 0.2][token]), abs=1e-5)
            assert [t for t, _ in entry.top] == [0, 1, 2]
            assert sum(math.exp(x) for _, x in entry.top) == pytest.approx(1, abs=1e-5)


def test_a_broken_row_ends_its_own_sequence_only(ops: Kernels) -> None:
    """NaN in the logits of one sequence is an error of that sequence, promptly; its neighbour's answer is unchanged."""
    model = ring()
    model._logp[7] = math.nan
    bad, good = Request((3,), GREEDY), Request((10,), GREEDY)
    for max_nodes in (1, 4):
        truth = truth_of([bad, good], [Answer(list(range(4, 15))), Answer(list(range(11, 22)))])
        first, second = run(make_engine(model, ops, drafter=Oracle(truth), max_nodes=max_nodes), [bad, good])
        assert first.finish_reason == "error"
        assert "nan" in (first.error or "")
        assert first.tokens == [4, 5, 6, 7][: len(first.tokens)]
        assert second.tokens == list(range(11, 22))


@pytest.mark.parametrize("max_nodes", [1, 4])
def test_logprobs_of_a_broken_row_are_an_error_of_their_sequence(ops: Kernels, max_nodes: int) -> None:
    """NaN at a banned token cannot be chosen but spoils the row's log-probabilities: the neighbour keeps its pass."""
    model = ring()
    model._logp[7, 31] = math.nan
    bad = Request((3,), GREEDY.replace(min_tokens=9, logprobs=0), end_tokens=frozenset({31}))
    good = Request((10,), GREEDY.replace(logprobs=0))
    truth = truth_of([bad, good], [Answer(list(range(4, 15))), Answer(list(range(11, 22)))])
    first, second = run(make_engine(model, ops, drafter=Oracle(truth), max_nodes=max_nodes), [bad, good])
    assert first.finish_reason == "error"
    assert len(first.tokens) == len(first.logprobs)
    assert second.tokens == list(range(11, 22))


def test_abort_frees_everything_at_once(ops: Kernels) -> None:
    """A client that goes away holds nothing, whether its prompt was being read, it was decoding, or it was waiting."""
    engine = make_engine(ring(), ops, "auto", max_sequences=2, prefill_rows=4)
    ids = [engine.add([1, 2, 3, 4, 5, 6], GREEDY, frozenset(), 0) for _ in range(4)]
    engine.step()
    for sequence_id in ids:
        engine.abort(sequence_id)
        engine.check()
    engine.abort(ids[0])  # once more: it may just have ended by itself
    assert not engine.has_work
    assert engine.allocator.n_used == 0
    assert engine.step() == []


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "prompt is empty"),
        ([V], GREEDY, "outside the vocabulary of 32"),
        ([-1], GREEDY, "outside the vocabulary"),
        ([1], GREEDY.replace(stop_token_ids=(V,)), "stop_token_ids must be a token id below the vocabulary size 32"),
        ([1], GREEDY.replace(logit_bias={10**6: 1.0}), "logit_bias must be a token id below"),
        ([1], GREEDY.replace(stop=("x",)), "stop strings need a stopper"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_taken(
    ops: Kernels, prompt: list[int], params: SamplingParams, message: str
) -> None:
    """The message names the parameter, nothing is allocated, and the next request is served."""
    engine = make_engine(ring(), ops)
    with pytest.raises(RequestError, match=message):
        engine.add(prompt, params, frozenset(), 0)
    assert engine.allocator.n_used == 0
    assert run(engine, [Request((3,), GREEDY)])[0].tokens == list(range(4, 15))


def test_a_pool_smaller_than_the_window_is_refused(ops: Kernels) -> None:
    """A sequence that could outgrow the pool would have nowhere to go: the engine does not start."""
    with pytest.raises(ConfigError, match=r"a pool of 48 tokens .* cannot hold a sequence of 64"):
        Engine(ring(64), ops, EngineConfig(kv_tokens=48, self_test=False))
    Engine(ring(64), ops, EngineConfig(kv_tokens=64, self_test=False))
    Engine(ring(33_001), ops, EngineConfig(self_test=False))  # no multiple of a block, and larger than the usual pool


def test_heads_that_a_format_of_keys_does_not_take_are_refused(ops: Kernels) -> None:
    """TableModel has heads of 8 entries: no group of codes has so few."""
    for kv_format in ("int8", "int4"):
        with pytest.raises(ConfigError, match=f"kv_format {kv_format} takes heads of a multiple of 16.*bf16"):
            Engine(ring(), ops, EngineConfig(kv_format=kv_format, self_test=False))
    assert Engine(ring(), ops, EngineConfig(kv_format="bf16", self_test=False)).pool.keys.dtype is torch.bfloat16
    assert Engine(ring(), ops, EngineConfig(self_test=False)).pool.keys.dtype is torch.float32


def law_of(model: TableModel, ops: Kernels, params: SamplingParams) -> Tensor:
    """[V] relative frequencies of 20,000 tokens sampled with drafts, right and wrong ones, in fifty sequences."""
    requests = [Request((0,), params.replace(max_tokens=400), seed=seed) for seed in range(50)]
    truth = truth_of(requests, plain(model, ops, *requests, max_sequences=50))
    answers = run(make_engine(model, ops, drafter=Thicket(truth, model.shape.vocab_size, seed=3), max_sequences=50), requests)
    tokens = [token for answer in answers for token in answer.tokens]
    assert sum(answer.stats["accepted"] for answer in answers) > len(tokens) / 10
    return torch.bincount(torch.tensor(tokens), minlength=model.shape.vocab_size) / len(tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("law", "params", "expected"),
    [
        ((0.5, 0.3, 0.2), SamplingParams(), (0.5, 0.3, 0.2)),
        ((0.5, 0.3, 0.2), SamplingParams(min_p=0.5), (0.625, 0.375, 0)),
        (
            (0.30, 0.22, 0.18, 0.12, 0.08, 0.05, 0.03, 0.02),
            SamplingParams(temperature=0.7, top_k=5, top_p=0.8),
            (0.4708, 0.3023, 0.2269, 0, 0, 0, 0, 0),
        ),
        ((0.9, 0.05, 0.05), SamplingParams(temperature=1e6, top_k=3), (1 / 3, 1 / 3, 1 / 3)),
        ((0.45, 0.35, 0.20), SamplingParams(top_k=2), (0.5625, 0.4375, 0)),
    ],
)
def test_speculation_keeps_the_law(ops: Kernels, law: tuple, params: SamplingParams, expected: tuple) -> None:
    """20,000 tokens sampled through accepted and refused drafts have the law that was asked for (noise alone: TV < 0.0151)."""
    v = len(law)
    seen = law_of(TableModel(torch.tensor(law).log().repeat(v, 1), 512), ops, params)
    assert (seen - torch.tensor(expected)).abs().sum() / 2 < 0.02
    assert not seen[torch.tensor(expected) == 0].any(), "a token of probability zero came out"


def test_prompts_beside_decoding_sequences_keep_a_pass_short(ops: Kernels) -> None:
    """By the costs of passes: a millisecond a row and ten milliseconds allowed are ten rows, of which decoding takes its own;
    where nobody waits for a token, or a block of rows takes longer than that, other limits hold."""
    costs = {1: 1e-3, 101: 101e-3}
    for seconds, beside in ((0.0405, 39), (0.0105, 16), (9.0, 100)):
        engine = make_engine(ring(1000), ops, prefill_rows=100, step_seconds=seconds, pass_seconds=costs)
        engine.add([1, 2], GREEDY.replace(max_tokens=100), frozenset(), 0)
        engine.step()
        engine.add([1] * 150, GREEDY, frozenset(), 0)
        engine.step()
        assert engine.stats.prompt_rows == 1 + beside
    engine = make_engine(ring(1000), ops, prefill_rows=100, step_seconds=0.0105, pass_seconds=costs)
    engine.add([1] * 150, GREEDY, frozenset(), 0)
    engine.step()
    assert engine.stats.prompt_rows == 100


def test_speculation_config_reaches_the_scheduler(ops: Kernels) -> None:
    """A burst is never wider than was asked for."""
    request = Request(tuple([1, 2, 3, 4] * 8), GREEDY.replace(max_tokens=30))
    engine = Engine(ring(), ops, EngineConfig(speculation=SpeculationConfig.parse("ngram", max_nodes=3), self_test=False))
    (answer,) = run(engine, [request])
    assert len(answer.stats["drafted_by_depth"]) <= 3
