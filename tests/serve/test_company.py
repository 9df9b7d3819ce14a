"""What one request asks for, drafts or leaves behind never shows in another's answer, whoever runs beside it or ran before."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from serving import Running, one_of, serving, wrong
from test_together import load, together

from specdec.llm import LLM


def solo(server: Running, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to requests sent one after the other."""
    return [one_of(server.ask(**body)) for body in bodies]


def body_of(prompt: str | list[int], **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}


def test_refused_drafts_are_never_reused(tiny_folder: Path, tiny_llm: LLM) -> None:
    """C16: answers of three blocks whose every draft was wrong, then prompt, answer and one more token as the next prompt:
    the cached blocks hold what was committed, so the answer is that of a server that never ran anything else."""
    rng = random.Random(16)
    firsts = [[rng.randrange(97, 123) for _ in range(rng.randint(5, 30))] for _ in range(6)]
    known: dict[tuple[int, ...], list[int]] = {}

    def truth(sequence: Any) -> list[int]:
        full = known.get(tuple(sequence.tokens[: sequence.n_prompt]), [])
        return full[len(sequence.tokens) :]

    with serving(load(tiny_folder, speculation="off", prefix_cache=False)) as server:
        answers = solo(server, [body_of(first, max_tokens=50) for first in firsts])
        seconds = [[*first, *answer["token_ids"], 97] for first, answer in zip(firsts, answers, strict=True)]
        expected = solo(server, [body_of(second) for second in seconds])
    for prompt, answer in zip([*firsts, *seconds], [*answers, *expected], strict=True):
        known[tuple(prompt)] = [*prompt, *answer["token_ids"]]
    with serving(wrong(load(tiny_folder), 4, truth)) as server:
        assert solo(server, [body_of(first, max_tokens=50) for first in firsts]) == answers
        for second, answer in zip(seconds, expected, strict=True):
            got = server.ask(**body_of(second))
            assert one_of(got) == answer
            assert got["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
        assert server.metrics()["specdec:spec_decode_num_draft_tokens_total"] > 0


def test_settings_do_not_move_to_a_neighbour(tiny_folder: Path) -> None:
    """C26: a bias, a least length and a stop for every second request, lengths that end in mixed order, new ones joining."""
    forced = 88
    plain = [body_of(f"tick tock {i}", max_tokens=8 + 5 * i, temperature=i % 2, seed=i) for i in range(8)]
    steered = [
        body_of("tick tock", max_tokens=6 + 7 * i, logit_bias={str(forced): 100}, min_tokens=i, stop=["zzz"]) for i in range(8)
    ]
    mixed = [body for pair in zip(plain, steered, strict=True) for body in pair]
    with serving(load(tiny_folder, max_sequences=5)) as server:
        alone = solo(server, plain)
        assert not any(forced in answer["token_ids"] for answer in alone)
        for _ in range(3):
            answers = [one_of(answer) for answer in together(server, mixed)]
            assert answers[::2] == alone
            assert all(set(answer["token_ids"]) == {forced} for answer in answers[1::2])
        server.settled()


def test_a_greedy_request_among_sampled_ones(tiny_folder: Path) -> None:
    """C34: it takes the argmax of its own row, whatever filters its neighbours ask for, with and without drafts."""
    greedy = body_of("tick tock tick tock tick", max_tokens=40)
    sampled = [body_of("tick tock", temperature=1, top_k=3, top_p=0.8, seed=i, max_tokens=40) for i in range(7)]
    with serving(load(tiny_folder)) as server:
        alone = solo(server, [greedy, *sampled])
        for turn in range(4):
            bodies = [*sampled[:turn], greedy, *sampled[turn:]]
            answers = [one_of(answer) for answer in together(server, bodies)]
            assert answers == [*alone[1 : turn + 1], alone[0], *alone[turn + 1 :]]


def test_look_up_begins_anew_with_each_request(tiny_folder: Path) -> None:
    """C35: on the only slot, a long text and then a shorter one: drafts come from the request's own text, which is read in
    full, and its answer is that of a fresh server."""
    long, short = body_of("pack my box " * 15), body_of("lazy dogs " * 6, stats=True)

    def drafted(server: Running) -> tuple[list[int], bool]:
        (choice,) = server.ask(**short)["choices"]
        return choice["token_ids"], choice["stats"]["proposed"] > 0

    with serving(load(tiny_folder, speculation="ngram", max_sequences=1, pass_seconds={1: 1.0, 64: 1.0})) as server:
        fresh = drafted(server)
    with serving(load(tiny_folder, speculation="ngram", max_sequences=1, pass_seconds={1: 1.0, 64: 1.0})) as server:
        server.ask(**long)
        assert drafted(server) == fresh
        assert fresh[1]


def test_many_with_a_common_beginning_and_look_up(tiny_folder: Path) -> None:
    """C40, its free half: sixteen at once that share sixty tokens, drafted for by look-up: all answered, each as alone."""
    beginning = ("tick tock the clock " * 3)[:60]
    bodies = [body_of(beginning + chr(97 + i), max_tokens=80, temperature=i % 2, seed=i) for i in range(16)]
    with serving(load(tiny_folder, speculation="off", prefix_cache=False)) as server:
        alone = solo(server, bodies)
    with serving(load(tiny_folder, speculation="ngram", max_sequences=16)) as server:
        assert [one_of(answer) for answer in together(server, bodies, clients=16)] == alone
        server.settled()
