"""Stops, limits and log-probabilities where one pass emits many tokens: as in plain decoding, on both routes, in both modes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from checkpoints import NEVER, chain
from conftest import WORDS  # type: ignore[import-not-found]
from serving import ROUTES, Running, along, asking, copy, error_of, joined, one_of, serving, words_llm, wrong

from specdec.llm import LLM

N = len(WORDS)


@pytest.fixture(scope="module", params=[0, 1, 4, 8], ids=lambda k: f"k{k}")
def server(request, words: LLM) -> Iterator[Running]:
    """CHAIN whose drafts are always right, of K tokens; 0 is plain decoding."""
    llm = copy(words, request.param, along(N)) if request.param else words.without_speculation()
    with serving(llm) as running:
        yield running


def both_modes(server: Running, route: str, **body: object) -> dict:
    """The choice, which must come the same whole and streamed."""
    whole = server.ask(route, **body)
    frames = server.stream(route, stream_options={"include_usage": True}, **body)
    streamed = joined(frames)[0]
    assert streamed.pop("stats", None) is None
    assert streamed == one_of(whole)
    assert frames[-1]["usage"] == whole["usage"]
    return {**one_of(whole), "usage": whole["usage"]}


@pytest.mark.parametrize("route", ROUTES)
def test_a_stop_near_the_start_of_a_burst_ends_it(server: Running, route: str) -> None:
    """C01, C02: nothing after the match, and text, ids, log-probabilities and usage speak of the same tokens."""
    logprobs = {"logprobs": 2} if route == "/v1/completions" else {"logprobs": True, "top_logprobs": 2}
    body = asking(route, WORDS[-1], stop=[" two"], temperature=0, max_tokens=20, return_token_ids=True, **logprobs)
    answer = both_modes(server, route, **body)
    assert (answer["text"], answer["finish_reason"]) == (" one", "stop")
    assert answer["token_ids"] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 2
    tokens = (
        answer["logprobs"]["tokens"] if "tokens" in answer["logprobs"] else [e["token"] for e in answer["logprobs"]["content"]]
    )
    assert tokens == [" one", " two"]
    assert "".join(tokens).startswith(answer["text"])


@pytest.mark.parametrize(("stop", "text", "reason"), [(" three", " one two", "stop"), (" seven", "".join(WORDS[:5]), "length")])
@pytest.mark.parametrize("route", ROUTES)
def test_a_stop_within_the_limit_goes_before_it(server: Running, route: str, stop: str, text: str, reason: str) -> None:
    """C08: a burst that crosses the token limit after a stop has matched ends by the stop."""
    answer = both_modes(server, route, **asking(route, WORDS[-1], stop=stop, temperature=0, max_tokens=5))
    assert (answer["text"], answer["finish_reason"]) == (text, reason)


@pytest.mark.parametrize("route", ROUTES)
def test_the_first_token_counts(server: Running, route: str) -> None:
    """C68: the token that the prompt's own pass gives is emitted, counted, and tested for stops."""
    answer = both_modes(server, route, **asking(route, WORDS[-1], temperature=0, max_tokens=1))
    assert (answer["text"], answer["finish_reason"]) == (" one", "length")
    for end in ({"stop": [" one"]}, {"stop_token_ids": [0]}):
        answer = both_modes(server, route, **asking(route, WORDS[-1], temperature=0, max_tokens=9, **end))
        assert answer["finish_reason"] == "stop"
        assert answer["text"] == ("" if "stop" in end else " one")  # a stop token is no special token here: its text stays


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stop", ["", [""], [], None, ["x", ""]], ids=repr)
def test_empty_stops_are_no_stops(server: Running, route: str, stop: object) -> None:
    """C98: an empty stop string matches nothing."""
    answer = both_modes(server, route, **asking(route, WORDS[-1], temperature=0, max_tokens=3, stop=stop))
    assert (answer["text"], answer["finish_reason"]) == (" one two three", "length")


@pytest.mark.parametrize("stop", [["s"] * 40, "s" * 5000], ids=["many", "long"])
def test_too_many_or_too_long_stops_are_refused(server: Running, stop: object) -> None:
    """C98: with a message that names the field."""
    for route in ROUTES:
        assert server.refused(route, **asking(route, " one", stop=stop))["param"] == "stop"


CUTS = {
    "one": [" old", " pa", "per lan", "tern", " glows"],
    "two": [" old", " paper", " lantern", " glows"],
    "three": [" old", " pap", "er ", "lantern", " glows"],
}


@pytest.mark.parametrize("pieces", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("k", [0, 4])
def test_a_stop_string_split_over_tokens(tmp_path, pieces: list[str], k: int) -> None:
    """C20: it is seen, and its first half is never sent."""
    llm = words_llm(tmp_path, pieces)
    llm = copy(llm, k, along(len(pieces))) if k else llm.without_speculation()
    with serving(llm) as server:
        for route in ROUTES:
            answer = both_modes(server, route, **asking(route, pieces[-1], stop=["per lan"], temperature=0, max_tokens=8))
            assert (answer["text"], answer["finish_reason"]) == (" old pa", "stop")


@pytest.mark.parametrize("k", [0, 4])
def test_what_looked_like_a_stop_is_given_out_at_the_end(tmp_path, k: int) -> None:
    """C47: text held back for a stop that never came is not lost, however the answer ends."""
    pieces = [" ein", " zwei", " drei", "<end>"]
    llm = words_llm(tmp_path, pieces, eos=True)
    llm = copy(llm, k, along(4)) if k else llm.without_speculation()
    with serving(llm) as server:
        for route in ROUTES:
            for limit, reason in ((9, "stop"), (3, "length")):
                body = asking(route, " ein", stop=[" drei\nZZZZ"], temperature=0, max_tokens=limit)
                body |= {"prompt": [3]} if route == "/v1/completions" else {"max_tokens": limit - 1}
                answer = both_modes(server, route, **body)
                whole = route == "/v1/completions"
                assert answer["text"] == (" ein zwei drei" if whole else " zwei drei")
                assert answer["finish_reason"] == reason


LAW = torch.tensor([[0.5, 0.3, 0.2]] * 3, dtype=torch.float64)


@pytest.mark.parametrize("draft", ["off", "right", "wrong", "ngram"])
def test_logprobs_are_the_models_own(tmp_path, draft: str) -> None:
    """C10, C70: log P of accepted, corrected and bonus tokens alike, whatever temperature and filters do to the choice."""
    chain(tmp_path, LAW, ["a", "b", "c"])
    llm = LLM(str(tmp_path), precision="fp32", self_test=False, speculation="ngram" if draft == "ngram" else "off")
    if draft in ("right", "wrong"):
        llm = (copy if draft == "right" else wrong)(llm, 4, lambda sequence: [0] * min(4, sequence.room))
    law = dict(zip("abc", LAW[0].log().tolist(), strict=True))
    settings = [
        {"temperature": 0},
        {"temperature": 1, "seed": 5},
        {"temperature": 2, "seed": 5},
        {"temperature": 0.1, "seed": 5},
        {"temperature": 1, "seed": 5, "top_p": 0.4},
        {"temperature": 1, "seed": 5, "top_k": 1},
    ]
    with serving(llm) as server:
        for how in settings:
            body = asking("/v1/chat/completions", "a", max_tokens=24, logprobs=True, top_logprobs=3, **how)
            answer = both_modes(server, "/v1/chat/completions", **body)
            entries = answer["logprobs"]["content"]
            assert len(entries) == 24
            for entry in entries:
                assert entry["logprob"] == pytest.approx(law[entry["token"]], abs=1e-3)
                assert entry["bytes"] == list(entry["token"].encode())
                assert [best["token"] for best in entry["top_logprobs"]] == ["a", "b", "c"]
                assert [best["logprob"] for best in entry["top_logprobs"]] == pytest.approx(list(law.values()), abs=1e-3)
                assert sum(math.exp(best["logprob"]) for best in entry["top_logprobs"]) <= 1 + 1e-6
            body = asking("/v1/completions", "a", max_tokens=24, logprobs=3, **how)
            columns = both_modes(server, "/v1/completions", **body)["logprobs"]
            assert columns["tokens"] == [entry["token"] for entry in entries]
            assert columns["token_logprobs"] == [entry["logprob"] for entry in entries]


def test_logprobs_are_finite(tmp_path) -> None:
    """C41: what can never come out has a finite log-probability too, on every route and in every mode."""
    law = torch.tensor([[1.0, 0, 0]] * 3, dtype=torch.float64)
    chain(tmp_path, law, ["a", "b", "c"])
    with serving(LLM(str(tmp_path), precision="fp32", self_test=False)) as server:
        body = {"max_tokens": 4, "top_k": 1}
        answer = both_modes(server, "/v1/completions", prompt="abc", echo=True, logprobs=3, **body)
        assert min(v for v in answer["logprobs"]["top_logprobs"][1].values()) == pytest.approx(NEVER, abs=1e-3)
        chat = asking("/v1/chat/completions", "abc", logprobs=True, top_logprobs=3, **body)
        assert both_modes(server, "/v1/chat/completions", **chat)["logprobs"]["content"][0]["logprob"] == pytest.approx(
            0, abs=1e-3
        )


@pytest.mark.parametrize(
    ("how", "law"),
    [
        ({"min_p": 0.5}, [0.625, 0.375, 0]),
        ({"top_k": 2}, [0.625, 0.375, 0]),
        ({"top_p": 0.7}, [0.625, 0.375, 0]),
        ({"logit_bias": {"0": -100}}, [0, 0.6, 0.4]),
        ({"bad_words": ["a"]}, [0, 0.6, 0.4]),
        ({"frequency_penalty": 2.0}, None),
        ({"presence_penalty": 2.0}, None),
        ({"repetition_penalty": 2.0}, None),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_sampling_settings_hold_with_a_drafter(abc_servers: dict[str, Running], how: dict, law: list[float] | None) -> None:
    """C59: applied exactly, as without a drafter; none is dropped."""
    free = {"prompt": "a", "max_tokens": 250, "seed": 3, "n": 4}
    body = {**free, **how}
    plain, drafted = (abc_servers[name].ask(**body) for name in ("off", "on"))
    assert [c["text"] for c in plain["choices"]] == [c["text"] for c in drafted["choices"]]
    text = "".join(c["text"] for c in drafted["choices"])
    assert not text.startswith(abc_servers["on"].ask(**{**free, "n": 1})["choices"][0]["text"])
    if law:
        shares = [text.count(token) / len(text) for token in "abc"]
        assert shares == pytest.approx(law, abs=0.07)  # 1,000 draws: 4.4 standard deviations
        assert all(share == 0 for share, p in zip(shares, law, strict=True) if p == 0)


@pytest.fixture(scope="module")
def abc_servers(tmp_path_factory) -> Iterator[dict[str, Running]]:
    folder = tmp_path_factory.mktemp("abc")
    chain(folder, LAW, ["a", "b", "c"], context=512)
    llm = LLM(str(folder), precision="fp32", self_test=False, speculation="ngram")
    with serving(llm.without_speculation()) as off, serving(llm) as on:
        yield {"off": off, "on": on}


def test_top_logprobs_need_logprobs(server: Running) -> None:
    """A setting that would have no effect is an error."""
    response = server.post(ROUTES[1], **asking(ROUTES[1], " one", top_logprobs=2))
    assert response.status_code == 400
    assert error_of(response)["param"] == "top_logprobs"
