"""Where requests go, without any server: shared prefixes stay together, no replica is buried, and identities are kept apart."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.serve.scale.prefix import PIECE_BYTES, SLACK, Held, keys

SYSTEM = {"role": "system", "content": "You are a careful assistant. " * 20}


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    return {"messages": [SYSTEM, *({"role": "user", "content": text} for text in contents)], **more}


def common(a: list[bytes], b: list[bytes]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_longer_conversation_begins_with_a_shorter_one() -> None:
    short, long = keys(chat("one"), ""), keys(chat("one", "and then a second turn " * 9), "")
    assert common(short, long) >= len(short) - 1 > 5
    assert common(keys({"prompt": "a" * 640}, ""), keys({"prompt": "a" * 641}, "")) == 640 // PIECE_BYTES


def test_a_change_changes_every_later_key() -> None:
    a, b = "x" * 300, "x" * 100 + "y" + "x" * 199
    assert common(keys({"prompt": a}, ""), keys({"prompt": b}, "")) == 100 // PIECE_BYTES
    assert not set(keys({"prompt": a}, "")[1:]) & set(keys({"prompt": b}, "")[1:])


@pytest.mark.parametrize("other", [{"cache_salt": "s"}, {"chat_template_kwargs": {"x": 1}}])
def test_identities_share_nothing(other: dict[str, Any]) -> None:
    """Salts, keys and template variables part prompts that are otherwise equal; sampling parameters do not."""
    mine = keys(chat("one"), "a")
    assert not set(mine) & set(keys(chat("one", **other), "a"))
    assert not set(mine) & set(keys(chat("one"), "b"))
    assert mine == keys(chat("one", temperature=0.5, seed=3, stream=True), "a")


@pytest.mark.parametrize("body", [{}, {"prompt": ""}, {"prompt": []}, {"prompt": 5}, {"messages": "x"}, {"messages": []}])
def test_a_body_without_a_prompt_has_no_keys(body: dict[str, Any]) -> None:
    assert keys(body, "") == []


def test_any_shape_of_prompt_has_keys() -> None:
    for prompt in ("text", [1, 2, 3], ["one", "two"], [[1, 2], [3]], "\ud800"):
        assert len(keys({"prompt": prompt}, "")) == 1


@given(
    loads=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 40), min_size=1),
    matches=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9)),
    slack=st.integers(0, 8),
)
def test_the_choice_is_bounded_and_takes_the_longest_prefix(loads: dict[str, int], matches: dict[str, int], slack: int) -> None:
    """Never more than the slack above the least busy; nobody within that bound holds more."""
    held, wanted = Held(), [bytes([i]) for i in range(9)]
    for name, n in matches.items():
        held.note(name, wanted[:n])
    chosen = held.choose(loads, wanted, slack)
    assert loads[chosen] <= min(loads.values()) + slack
    for name, load in loads.items():
        if load <= min(loads.values()) + slack:
            assert matches.get(name, 0) <= matches.get(chosen, 0)
    assert chosen == held.choose(dict(reversed(loads.items())), wanted, slack)


def choices(held: Held, families: list[int], at_once: int) -> list[str]:
    """The replicas of four that get prompts of these families, while so many run at a time."""
    running: list[str] = []
    for turn, family in enumerate(families):
        wanted = keys({"prompt": f"{family} " * 200 + str(turn)}, "")
        busy = running[max(0, len(running) + 1 - at_once) :]
        running.append(held.choose({name: busy.count(name) for name in "0123"}, wanted))
        held.note(running[-1], wanted)
    return running


@pytest.mark.parametrize("at_once", [1, 4])
def test_families_of_prompts_stay_together_and_all_replicas_are_used(at_once: int) -> None:
    """Twelve families, shuffled: each stays with one of four replicas, and each replica has its share, even where no request
    comes before the one before it has ended."""
    families = [family for family in range(12) for _ in range(20)]
    random.Random(0).shuffle(families)
    chosen = choices(Held(), families, at_once)
    where = [{c for c, f in zip(chosen, families, strict=True) if f == family} for family in range(12)]
    assert all(len(replicas) == 1 for replicas in where)
    assert min(chosen.count(name) for name in "0123") >= len(chosen) / 8


def test_one_prefix_for_all_spreads_when_its_replica_is_busy() -> None:
    chosen = choices(Held(), [7] * 20, at_once=20)  # nothing ends
    counts = [chosen.count(name) for name in "0123"]
    assert max(counts) - min(counts) <= SLACK + 1


def test_what_is_held_is_bounded_and_forgotten() -> None:
    held = Held(most=8)
    first, second = keys({"prompt": "a" * 640}, ""), keys({"prompt": "b" * 320}, "")
    held.note("x", first)
    assert held.match("x", first) == 8
    held.note("x", second)
    assert (held.match("x", second), held.match("x", first)) == (5, 3)
    assert held.match("y", first) == 0
    held.forget("x")
    assert held.match("x", second) == 0
