"""Many requests at once: whatever comes when, ends when, is cancelled, preempted or found in the prefix cache, each
request gets exactly the tokens of its solo run, and the engine is empty afterwards.

Freed blocks are poisoned (``harness``), so that whoever reads another request's rows, or rows that no pass wrote, gets NaN.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from checkpoints import tiny
from harness import Answer, Request, make_engine, run, truth_of
from test_identity import BUILT_IN, FAKES, drafter_of, mixed, plain

from specdec import kernels
from specdec.config import BLOCK_SIZE, SamplingParams
from specdec.engine import Engine
from specdec.kv.codec import DTYPES
from specdec.models.load import load_model
from specdec.models.source import resolve

N_REQUESTS = 16


@pytest.fixture(scope="module", params=["bf16", "int8"])
def model(request, tmp_path_factory):
    """TINY, with its keys and values in either format."""
    folder = str(tiny(tmp_path_factory.mktemp("tiny")))
    model = load_model(resolve(folder), "q8", kernels.select(torch.device("cpu")), torch.device("cpu"))
    return model.holding(DTYPES[request.param])


def ops():
    return kernels.select(torch.device("cpu"))


@pytest.fixture(scope="module")
def expected(model) -> tuple[list[Request], list[Answer]]:
    """Requests of all kinds, half of them with one of two common beginnings, and the answer of each alone."""
    rng = random.Random(0)
    beginnings = [tuple(rng.randint(97, 122) for _ in range(n)) for n in (40, 70)]
    requests = [
        replace(r, prompt=(*beginnings[i % 4 - 2], *r.prompt) if i % 4 >= 2 else r.prompt)
        for i, r in enumerate([*mixed(0.0, 8, seed=0), *mixed(1.0, 8, seed=1)])
    ]
    return requests, plain(model, requests)


def engine_for(kind: str, model, requests: list[Request], answers: list[Answer], **config) -> Engine:
    if kind in FAKES:
        # A fake knows the truth by the id of a sequence; here ids follow the order of arrival, so it goes by the prompt.
        by_prompt = {(r.prompt, r.seed): [*r.prompt, *a.tokens] for r, a in zip(requests, answers, strict=True)}

        def truth(sequence):
            full = by_prompt[tuple(sequence.tokens[: sequence.n_prompt]), sequence.seed]
            return full[len(sequence.tokens) :]

        return make_engine(model, ops(), drafter=drafter_of(kind, model, truth), **config)
    return make_engine(model, ops(), kind, **config)


def play(engine: Engine, requests: list[Request], seed: int, cancels: float = 0.2) -> dict[int, Answer]:
    """Let requests arrive and be cancelled at random; returns the answers by index, cancelled ones as far as they came."""
    rng = random.Random(seed)
    order = list(range(len(requests)))
    rng.shuffle(order)
    answers: dict[int, Answer] = {}
    ids: dict[int, int] = {}
    doomed = {i: rng.randint(0, 12) for i in order if rng.random() < cancels}
    for _ in range(5000):
        while order and rng.random() < 0.5:
            i = order.pop()
            r = requests[i]
            ids[engine.add(list(r.prompt), r.params, r.end_tokens, r.seed)] = i
            answers[i] = Answer()
        for delta in engine.step():
            answers[ids[delta.sequence_id]].add(delta)
        for sequence_id, i in ids.items():
            if i in doomed and len(answers[i].tokens) >= doomed[i] and not answers[i].finish_reason:
                engine.abort(sequence_id)
                del doomed[i]
                break
        engine.check()
        if not order and not engine.has_work:
            return answers
    raise AssertionError("requests did not end")


@pytest.mark.parametrize("config", [
    {},
    {"max_sequences": 16, "prefill_rows": 24},
    {"max_sequences": 5, "kv_tokens": 256, "max_len": 200},
    {"max_sequences": 4, "kv_tokens": 176, "max_len": 170, "prefill_rows": 7},
    {"prefix_cache": False, "max_sequences": 6, "kv_tokens": 208, "max_len": 200},
])  # fmt: skip
@pytest.mark.parametrize("kind", ["off", *BUILT_IN, *FAKES])
def test_any_schedule_gives_each_request_its_own_answer(model, expected, kind: str, config: dict) -> None:
    """Random arrivals, cancels, tiny pools: tokens, log-probabilities and reasons are those of each request alone."""
    requests, answers = expected
    engine = engine_for(kind, model, requests, answers, **config)
    for seed in range(3):  # the second and third time prefixes, outputs and statistics of the first are there
        for i, got in play(engine, requests, seed).items():
            if got.finish_reason:
                assert got.same == answers[i].same
            else:
                assert got.tokens == answers[i].tokens[: len(got.tokens)], "a cancelled request had wrong tokens"
        assert engine.allocator.n_used == 0
        assert not engine._sequences
        if engine.budget:
            assert not len(engine.budget._chances)
            assert not engine.budget._plans
    if config.get("prefix_cache", True):
        assert engine.stats.cached_tokens > 0
    if "kv_tokens" in config:
        assert engine.stats.preemptions > 0, "the pool was meant to run short"


@pytest.mark.parametrize("kind", ["off", *BUILT_IN, "thicket"])
def test_a_second_turn_goes_on_from_the_first(model, kind: str) -> None:
    """Prompt, answer and one more token as the next prompt: the blocks of both are found, drafted and refused rows never."""
    engine = make_engine(model, ops(), "off" if kind == "thicket" else kind)
    for n_prompt in (5, 15, 16, 17, 40):
        first = Request(
            tuple(range(97, 97 + n_prompt % 26)) * (1 + n_prompt // 26), SamplingParams(temperature=0, max_tokens=50)
        )
        (answer,) = plain(model, [first])
        if kind == "thicket":
            engine = make_engine(model, ops(), drafter=drafter_of(kind, model, truth_of([first], [answer])))
            assert run(engine, [first])[0].same == answer.same
            engine.budget = None  # the fake knows nothing of the second request
        else:
            assert run(engine, [first])[0].same == answer.same
        second = Request((*first.prompt, *answer.tokens, 97), SamplingParams(temperature=1, max_tokens=30), seed=3)
        (warm,) = run(engine, [second])
        assert warm.same == plain(model, [second])[0].same
        known = len(first.prompt) + len(answer.tokens) - 1
        assert warm.stats["cached_tokens"] == known // BLOCK_SIZE * BLOCK_SIZE
        assert warm.stats["prompt_rows"] == len(second.prompt) - 1 - warm.stats["cached_tokens"]


@pytest.mark.parametrize(
    ("family", "layers"),
    [("mistral", {}), ("qwen2", {"use_sliding_window": True, "max_window_layers": 1})],
    ids=["all layers", "every second"],
)
@pytest.mark.parametrize("kind", ["off", "auto", "thicket"])
def test_prefixes_are_found_again_under_a_sliding_window(tmp_path, kind: str, family: str, layers: dict) -> None:
    """Turns that share less and less with the first, over windows much shorter than a block: the answers of cold engines."""
    source = resolve(str(tiny(tmp_path, family, sliding_window=8, **layers)))
    windowed = load_model(source, "fp32", ops(), torch.device("cpu"))
    rng = random.Random(5)
    first = tuple(rng.randint(97, 122) for _ in range(52))
    cuts = (52, 48, 47, 33, 32, 20, 5, 0)
    requests = [
        Request((*first[:n], 48 + i, 65), SamplingParams(temperature=i % 2, max_tokens=30), seed=i) for i, n in enumerate(cuts)
    ]
    answers = plain(windowed, requests)
    assert len({tuple(answer.tokens) for answer in answers}) == len(cuts)
    engine = engine_for(kind, windowed, requests, answers)
    for request, answer in [*zip(requests, answers, strict=True)] * 2:  # the second time, all of a prompt's blocks are there
        (got,) = run(engine, [request])
        assert got.same == answer.same
    assert engine.stats.cached_tokens >= 16 * (3 + 2 + 2 + 2 + 1), "prefixes were meant to be found"


def test_of_many_with_the_same_beginning_one_reads_it(model) -> None:
    """Eight requests that arrive together: the rows of their common beginning run once, and answers are as without cache."""
    beginning = tuple(random.Random(1).randint(97, 122) for _ in range(96))
    requests = [Request((*beginning, 97 + i), SamplingParams(temperature=0, max_tokens=8)) for i in range(8)]
    for rows in (128, 16, 10):
        engine = make_engine(model, ops(), max_sequences=8, prefill_rows=rows)
        answers = run(engine, requests)
        assert [a.same for a in answers] == [a.same for a in plain(model, requests)]
        assert [a.stats["cached_tokens"] for a in answers] == [0] + [96] * 7
        assert engine.stats.prompt_rows == 96
        cold = make_engine(model, ops(), max_sequences=8, prefill_rows=rows, prefix_cache=False)
        assert [a.same for a in run(cold, requests)] == [a.same for a in answers]
        assert cold.stats.prompt_rows == 8 * 96


def test_salts_share_nothing(model) -> None:
    """The same prompt under another salt is read anew, under its own it is found."""
    engine = make_engine(model, ops())
    prompt = list(range(97, 97 + 26)) * 2
    for salt, cached in (("a", 0), ("b", 0), ("", 0), ("a", 48), ("b", 48)):
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=1), frozenset(), 0, salt=salt)
        (delta,) = engine.step()
        assert delta.stats.cached_tokens == cached


def test_a_preempted_sequence_finds_its_own_blocks(model) -> None:
    """Reading again after a preemption costs only what had to make room."""
    requests = [Request((n, *range(97, 97 + n)), SamplingParams(temperature=0, max_tokens=60)) for n in (20, 21)]
    config = {"kv_tokens": 9 * BLOCK_SIZE, "max_len": 100, "max_sequences": 2}
    rows = []
    for cached in (True, False):
        engine = make_engine(model, ops(), prefix_cache=cached, **config)
        answers = run(engine, requests)
        assert [a.same for a in answers] == [a.same for a in plain(model, requests)]
        assert engine.stats.preemptions > 0
        assert all(a.stats["cached_tokens"] == 0 for a in answers), "what a request had computed itself is no saving"
        rows.append(engine.stats.prompt_rows)
    assert rows[0] < rows[1] - BLOCK_SIZE


def test_prompt_logprobs_are_computed_though_the_prefix_is_known(model) -> None:
    """They come from the rows of the prompt, so nothing is reused, and they are those of a cold engine."""
    request = Request(tuple(range(97, 97 + 26)) * 2, SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1))
    engine = make_engine(model, ops())
    cold, warm = run(engine, [request])[0], run(engine, [request])[0]
    assert warm.same == cold.same
    assert warm.stats["cached_tokens"] == 0
    assert len(warm.prompt_logprobs) == 51


def test_forgetting_makes_the_engine_cold(model) -> None:
    """Measurements must not find the prompts of the turn before."""
    request = Request(tuple(range(97, 97 + 26)) * 2, SamplingParams(temperature=0, max_tokens=4))
    engine = make_engine(model, ops())
    for _ in range(2):
        assert run(engine, [request])[0].stats["cached_tokens"] == 0
        engine.forget()
        assert engine.allocator.n_idle == 0


@pytest.mark.parametrize("kind", ["off", "auto"])
def test_cancelling_all_brings_everything_to_rest(model, kind: str) -> None:
    """Gauges are right at once, without another step: nothing runs, waits or is held, what may be reused is still there."""
    engine = make_engine(model, ops(), kind, max_sequences=4)
    ids = [engine.add([97 + i] * 40, SamplingParams(max_tokens=100), frozenset(), i) for i in range(8)]
    for _ in range(5):
        engine.step()
    busy = engine.counts()
    assert (busy.running, busy.waiting) == (4, 4)
    assert busy.blocks_used >= 4 * 2
    for sequence_id in ids:
        engine.abort(sequence_id)
    rest = engine.counts()
    assert (rest.running, rest.waiting, rest.blocks_used) == (0, 0, 0)
    assert 0 < rest.blocks_cached <= rest.blocks
    assert not engine.has_work
    engine.check()
