"""Many requests and choices at once: each has the answer of its solo run, whole or streamed, and sees nothing of others."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from checkpoints import chain
from serving import ROUTES, Running, along, asking, copy, joined, one_of, serving, words_llm, wrong

from specdec import SamplingParams
from specdec.llm import LLM

SPECULATIONS = ("off", "auto", "ngram,recycling")


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), precision="fp32", self_test=False, **settings)


def together(server: Running, bodies: list[dict[str, Any]], route: str = ROUTES[0], clients: int = 8) -> list[dict[str, Any]]:
    """The answers to requests sent at once."""
    limits = httpx.Limits(max_connections=clients)
    with (
        httpx.Client(base_url=server.url, timeout=30, limits=limits, verify=False) as http,
        ThreadPoolExecutor(clients) as pool,
    ):
        return list(pool.map(lambda body: http.post(route, json=body).raise_for_status().json(), bodies))


@pytest.mark.parametrize("speculation", SPECULATIONS)
@pytest.mark.parametrize("rows", [4, 16])
def test_alone_or_among_others(tiny_folder: Path, speculation: str, rows: int) -> None:
    """C85: the same ids and the same log-probabilities, to the last bit, however prompts are cut into chunks."""
    with serving(load(tiny_folder, speculation=speculation, prefill_rows=rows)) as server:
        rng = random.Random(rows)
        bodies = [
            {"prompt": [rng.randrange(256) for _ in range(n)], "max_tokens": 24, "temperature": t, "seed": 1, "logprobs": 2,
             "return_token_ids": True}
            for n, t in zip((1, 3, 7, 16, 17, 30, 33, 40), itertools.cycle((0, 0.8)))
        ]  # fmt: skip
        alone = [one_of(server.ask(**body)) for body in bodies]
        assert [one_of(answer) for answer in together(server, bodies)] == alone
        server.settled()


def test_settings_stay_with_their_request(tiny_folder: Path) -> None:
    """C62: greedy and sampled, with and without a penalty, in all orders of arrival: the answers of the solo runs."""
    base = {"prompt": "tick tock tick tock", "seed": 4, "return_token_ids": True}
    bodies = [
        {**base, "temperature": t, "repetition_penalty": p, "max_tokens": n}
        for (t, p), n in zip(itertools.product((0, 0.9), (1, 2.0)), (9, 14, 19, 24), strict=True)
    ]
    for speculation in ("off", "auto"):
        with serving(load(tiny_folder, speculation=speculation)) as server:
            alone = [one_of(server.ask(**body)) for body in bodies]
            assert len({str(answer["token_ids"][:9]) for answer in alone}) == 4
            for order in itertools.permutations(range(4)):
                assert [one_of(answer) for answer in together(server, [bodies[i] for i in order])] == [alone[i] for i in order]


def test_no_text_of_others(tmp_path: Path, tiny_folder: Path) -> None:
    """C76: a pool that holds two conversations, twelve prompts in turns: no foreign marker, no foreign cache."""
    words = [f" {a}{i}" for i in range(12) for a in "abc"]
    law = torch.zeros(36, 36, dtype=torch.float64)
    for i in range(12):
        for a in range(3):
            law[3 * i + a, 3 * i + (a + 1) % 3] = 1  # each prompt has a circle of its own
    chain(tmp_path, law, words, context=64)
    with serving(load(tmp_path, kv_tokens=96, max_len=48, max_sequences=4)) as server:
        bodies = [{"prompt": words[3 * i], "max_tokens": 40, "temperature": 0} for _ in range(4) for i in range(12)]
        for body, answer in zip(bodies, together(server, bodies, clients=4), strict=True):
            text = answer["choices"][0]["text"]
            mine = body["prompt"][2:]
            assert {word[1:] for word in text.split()} == {mine}
    with serving(load(tiny_folder, kv_tokens=96, max_len=48, max_sequences=4)) as server:
        bodies = [
            {"prompt": [i] * 10, "max_tokens": 36, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            for i in range(12)
        ]
        alone = [one_of(server.ask(**body)) for body in bodies]
        for _ in range(3):
            assert [one_of(answer) for answer in together(server, bodies, clients=4)] == alone
        assert server.settled()["specdec:num_preemptions_total"] > 0


def test_salts_share_nothing(tiny_folder: Path) -> None:
    """C83: keys and salts are identities, each in its own place; nothing is shared across them, and answers do not differ."""
    with serving(load(tiny_folder), api_keys=["one", "two", "a|b"]) as server:
        prompt = [97 + i % 7 for i in range(70)]

        def cached(key: str, salt: str | None) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "cache_salt": salt}
            answer = server.http.post(ROUTES[0], json=body, headers=headers).json()
            texts.add(answer["choices"][0]["text"])
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        texts: set[str] = set()
        for identity in [
            ("one", None),
            ("two", None),
            ("one", "x"),
            ("two", "x"),
            ("one", ""),
            ("a|b", None),
            ("a|b", "x"),
            ("one", "two"),
        ]:
            assert cached(*identity) == 0
            assert cached(*identity) == 64
        assert len(texts) == 1


def test_prompt_logprobs_do_not_depend_on_the_cache(tiny_folder: Path, tiny_llm: LLM) -> None:
    """C53: around block borders, sent twice in two orders: always the values of a run with nothing cached."""
    with serving(load(tiny_folder)) as server:
        lengths = (15, 16, 17, 31, 32, 33)
        prompts = {n: [(i * 7) % 250 for i in range(n)] for n in lengths}
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
        truth = {n: tiny_llm.generate([prompts[n]], params)[0].prompt_logprobs for n in lengths}
        for order in (lengths, lengths, lengths[::-1], lengths[::-1]):
            for n in order:
                body = {
                    "prompt": prompts[n],
                    "max_tokens": 1,
                    "temperature": 0,
                    "prompt_logprobs": 2,
                    "echo": True,
                    "logprobs": 1,
                }
                (choice,) = server.ask(**body)["choices"]
                assert choice["prompt_logprobs"][0] is None
                for entry, token, given in zip(truth[n], prompts[n][1:], choice["prompt_logprobs"][1:], strict=True):
                    assert given[str(token)]["logprob"] == entry.logprob
                    assert set(given) == {str(token)} | {str(other) for other, _ in entry.top}
                assert choice["logprobs"]["token_logprobs"][1:n] == [entry.logprob for entry in truth[n]]


def test_choices_end_one_by_one(tmp_path: Path) -> None:
    """C56: each choice of a stream goes on until its own end; usage comes once, after the last, and is the sum."""
    law = torch.tensor([[0.5, 0.3, 0.2]] * 3, dtype=torch.float64)
    chain(tmp_path, law, ["a", "b", "<end>"], eos=2)
    with serving(load(tmp_path)) as server:
        for seed in range(20):
            for route in ROUTES:
                body = asking(route, "a", n=4, seed=seed, max_tokens=30, return_token_ids=True)
                frames = server.stream(route, **body, stream_options={"include_usage": True})
                choices = joined(frames)
                assert sorted(choices) == [0, 1, 2, 3]
                usages = [frame["usage"] for frame in frames if frame.get("usage")]
                assert len(usages) == 1
                assert frames[-1]["choices"] == []
                assert usages[0]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices.values())
                whole = server.ask(route, **body)
                assert usages[0] == whole["usage"]
                for choice in whole["choices"]:
                    assert choices[choice["index"]]["text"] == (
                        choice.get("text") or (choice.get("message") or {}).get("content", "")
                    )
        assert (
            len({joined(server.stream(prompt="a", n=8, seed=1, ignore_eos=True, max_tokens=12))[i]["text"] for i in range(8)})
            == 8
        )


def test_many_prompts_in_one_request(tiny_server: Running) -> None:
    """Indices go through prompts first, then through choices, and each is what its prompt alone gives."""
    prompts = ["ab", "cd", "ef"]
    body = {"max_tokens": 8, "temperature": 0.9, "seed": 3, "n": 2}
    many = tiny_server.ask(prompt=prompts, **body)
    assert [choice["index"] for choice in many["choices"]] == list(range(6))
    for i, prompt in enumerate(prompts):
        alone = tiny_server.ask(prompt=prompt, **body)
        assert [c["text"] for c in many["choices"][2 * i : 2 * i + 2]] == [c["text"] for c in alone["choices"]]
    assert many["usage"]["prompt_tokens"] == 6
    assert tiny_server.ask(prompt=[[97, 98], [99]], max_tokens=1)["usage"]["prompt_tokens"] == 3


@pytest.fixture(scope="module", params=["copy", "off", "wrong", "ngram"])
def counting(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """CHAIN that counts in a circle, drafted for well, not at all, badly, by lookup; at most 4 tokens a pass."""
    llm = words_llm(tmp_path_factory.mktemp("circle"), [f" {i}" for i in range(12)], speculation="ngram")
    truth = along(12)
    kinds = {"copy": lambda: copy(llm, 4, truth), "wrong": lambda: wrong(llm, 4, truth), "ngram": lambda: llm}
    with serving(kinds.get(request.param, llm.without_speculation)()) as running:
        yield running


def test_delivered_is_counted(counting: Running) -> None:
    """C07: tokens delivered, in usage, with log-probabilities, and in the metrics are the same number for every limit."""
    for limit in range(1, 25):
        before = counting.metrics()["specdec:generation_tokens_total"]
        body = {
            "prompt": " 3 4 5",
            "max_tokens": limit,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = counting.ask(**body)
        choice = one_of(answer)
        assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"] == limit
        assert counting.metrics()["specdec:generation_tokens_total"] - before == limit
        frames = counting.stream(**body, stream_options={"include_usage": True})
        assert joined(frames)[0] == choice
        assert frames[-1]["usage"] == answer["usage"]


def test_drafted_and_accepted_are_counted(tmp_path: Path) -> None:
    """C19: nothing before the first request; right drafts of 4 for 11 tokens: 8 drafted, 8 accepted; never more accepted."""
    llm = words_llm(tmp_path, [f" {i}" for i in range(11)] + ["<end>"], eos=True)
    names = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "target_passes", "generation_tokens")

    def counts(server: Running) -> tuple[float, ...]:
        now = server.metrics()
        assert all(value == value for value in now.values()), "NaN"
        found = tuple(now[f"specdec:{name}_total"] for name in names)
        assert 0 <= found[1] <= found[0] <= 4 * found[2]
        return found

    with serving(copy(llm, 4, along(12))) as server:
        assert counts(server) == (0, 0, 0, 0)
        server.ask(prompt=" 0", max_tokens=11, temperature=0, ignore_eos=True)
        drafted, accepted, passes, emitted = counts(server)
        assert (drafted, accepted, passes, emitted) == (8, 8, 3, 11)
        answer = server.ask(prompt=" 7", temperature=0)
        assert answer["choices"][0]["text"] == " 8 9 10"
        assert counts(server)[3] - emitted == answer["usage"]["completion_tokens"] == 4
    with serving(wrong(llm, 4, along(12))) as server:
        server.ask(prompt=" 0", max_tokens=11, temperature=0, ignore_eos=True)
        drafted, accepted, passes, emitted = counts(server)
        assert (accepted, passes, emitted) == (0, 11, 11)
        assert drafted > 0


@pytest.mark.parametrize("speculation", ["off", "auto", "ngram"])
def test_an_end_token_anywhere_ends_there(tiny_folder: Path, speculation: str) -> None:
    """C04: whichever token is declared the end, the answer ends at its first occurrence, within a burst too."""
    with serving(load(tiny_folder, speculation=speculation)) as server:
        body = {"prompt": "tick tock tick tock", "max_tokens": 32, "temperature": 0, "return_token_ids": True}
        for _ in range(2):  # the second time, drafters know the answer
            ids = one_of(server.ask(**body))["token_ids"]
            assert len(ids) == 32
            for end in ids[1:17]:
                answer = one_of(server.ask(**body, stop_token_ids=[end]))
                assert answer["token_ids"] == ids[: ids.index(end) + 1]
                assert answer["finish_reason"] == "stop"
                assert joined(server.stream(**body, stop_token_ids=[end]))[0] == answer


def test_speculation_can_be_chosen(counting: Running) -> None:
    """Per request: off, fewer tokens, a drafter by its name; the answer is the same each time, and the sources tell which."""
    body = {"prompt": " 3 4 5 6 7 8 9 10 11 0 1 2 3 4", "max_tokens": 30, "temperature": 0, "stats": True}
    plain = one_of(counting.ask(**body, speculation="off"))
    assert set(plain["token_sources"]) == {None}
    drafters = counting.http.get("/v1/models").json()["data"][0]["drafters"]
    for choice in ("auto", None, {"max_tokens": 1}, {"max_tokens": 0}):
        answer = counting.ask(**body, speculation=choice)
        assert one_of(answer)["text"] == plain["text"]
        stats = answer["choices"][0]["stats"]
        most = choice.get("max_tokens", 4) if isinstance(choice, dict) else 64
        assert stats["drafted"] <= most * stats["target_passes"]
        assert sum(source is not None for source in one_of(answer)["token_sources"]) == stats["accepted"]
        assert "".join(one_of(answer)["token_texts"]) == one_of(answer)["text"]
        assert len(one_of(answer)["token_texts"]) == answer["usage"]["completion_tokens"]
    if drafters == ["ngram"] and counting.llm.engine.drafter and counting.llm.engine.drafter.name == "ngram":
        answer = one_of(counting.ask(**body, speculation={"drafter": "ngram"}))
        assert "ngram" in answer["token_sources"]


def test_a_request_names_the_drafters_that_really_run(tiny_folder: Path) -> None:
    """Not what the configuration calls them: a trained drafter goes by its kind, in what is listed, asked for and reported."""
    llm = LLM(str(tiny_folder), precision="fp32", self_test=False, speculation="trained,suffix", drafter=str(tiny_folder))
    names = [drafter.name for drafter in llm.engine.drafters]
    with serving(llm) as server:
        assert server.http.get("/v1/models").json()["data"][0]["drafters"] == names
        for name in names:
            body = {"prompt": "tick tock tick tock", "max_tokens": 24, "temperature": 0, "stats": True}
            stats = server.ask(**body, speculation={"drafter": name})["choices"][0]["stats"]
            assert set(stats["asked_by_drafter"]) == {name}
        assert "there are: " + ", ".join(names) in server.refused(**body, speculation={"drafter": "trained"})["message"]


def test_predicted_outputs(tiny_folder: Path) -> None:
    """A prediction changes no token; usage tells how much of it came true and how much was refused."""
    with serving(load(tiny_folder)) as server:
        body = asking(ROUTES[1], "tick tock", max_tokens=40, temperature=0.9, seed=2, return_token_ids=True)
        plain = server.ask(ROUTES[1], **body, speculation="off")
        text = one_of(plain)["text"]
        true = server.ask(ROUTES[1], **body, prediction={"type": "content", "content": text}, speculation={"drafter": "suffix"})
        parts = [{"type": "text", "text": text[:10] + "###"}, {"type": "text", "text": text[13:]}]
        false = server.ask(ROUTES[1], **body, prediction={"type": "content", "content": parts})
        for answer in (true, false):
            assert one_of(answer) == one_of(plain)
        details = true["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 0
        assert details["rejected_prediction_tokens"] >= 0
        assert plain["usage"]["completion_tokens_details"] == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


def offsets_point_at_tokens(text: str, logprobs: dict[str, Any], end: int) -> None:
    """Each token stands in the text where its offset says."""
    for token, offset in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[:end]:
        if not token.startswith("bytes:"):
            assert text[offset:].startswith(token)


def test_echo_counts_the_prompt(words: LLM) -> None:
    """C65: entries for the prompt's tokens too, the first one's empty, and offsets that point at the tokens."""
    with serving(words.without_speculation()) as server:
        body = {"prompt": [0, 1, 2, 3, 4, 5], "echo": True, "logprobs": 1, "max_tokens": 4, "temperature": 0}
        answer = server.ask(**body)
        (choice,) = answer["choices"]
        logprobs = choice["logprobs"]
        assert all(len(column) == 10 for column in logprobs.values())
        assert choice["text"] == "".join(logprobs["tokens"]) == " one two three four five six seven eight nine ten"
        assert logprobs["text_offset"][0] == 0
        offsets_point_at_tokens(choice["text"], logprobs, 10)
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:] == pytest.approx([0] * 9, abs=1e-3)
        assert answer["usage"]["completion_tokens"] == 4
        assert server.ask(**{**body, "logprobs": None})["choices"][0]["text"] == choice["text"]


@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_offsets_of_a_streamed_echo(tiny_folder: Path, speculation: str) -> None:
    """C77: the same as unstreamed, after a prompt with a character of several bytes."""
    with serving(load(tiny_folder, speculation=speculation)) as server:
        for prompt in ("hello wörld", "tick tock €"):
            body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 6, "temperature": 0}
            for _ in range(2):
                whole = one_of(server.ask(**body))
                assert joined(server.stream(**body))[0] == whole
                offsets_point_at_tokens(whole["text"], whole["logprobs"], len(whole["logprobs"]["tokens"]))
                n = len(prompt.encode())
                assert whole["logprobs"]["text_offset"][n] == len(prompt)


def test_a_prompt_that_ends_within_a_character(tmp_path: Path) -> None:
    """C79: deltas hold generated text only, and the stream is the whole."""
    pieces = ["Price: ", "<0xE2>", "<0x82>", "<0xAC>", " ok"]
    law = torch.zeros(5, 5, dtype=torch.float64)
    for i in range(5):
        law[i, (i + 1) % 5] = 1
    chain(tmp_path, law, pieces)
    with serving(load(tmp_path)) as server:
        body = {"prompt": [0, 1, 2], "max_tokens": 2, "temperature": 0}
        whole = one_of(server.ask(**body))
        frames = server.stream(**body)
        assert "Price" not in "".join(choice["text"] for frame in frames for choice in frame["choices"])
        assert joined(frames)[0] == whole
        assert whole["text"].endswith(" ok")
        echoed = {**body, "echo": True}
        assert joined(server.stream(**echoed))[0] == one_of(server.ask(**echoed))
