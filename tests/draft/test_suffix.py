"""Suffix drafts equal a naive count over the text, from the request's own tokens and from those of finished ones."""

from __future__ import annotations

import random
import time
from array import array

import pytest
from drafting import paths, propose, run_pass, sequence
from hypothesis import example, given
from hypothesis import strategies as st

from specdec import kernels
from specdec.config import SpeculationConfig
from specdec.draft.continuations import ENOUGH, GAP, OCCURRENCES, likeliest, make_search
from specdec.draft.suffix import Outputs, SuffixDrafter
from specdec.types import Sequence

texts = st.lists(st.integers(0, 2), min_size=1, max_size=80)
Tree = list[tuple[tuple[int, ...], float]]
"""Paths from the root with their estimates, in order of drafting."""


def occurrences(text: list[int], tail: list[int], depth: int) -> list[list[int]]:
    """Up to ``depth`` tokens after each place where ``tail`` stands and goes on, latest first."""
    n = len(tail)
    return [text[at + n : at + n + depth] for at in range(len(text) - n - 1, -1, -1) if text[at : at + n] == tail]


def count(followers: list[list[int]], path: tuple[int, ...]) -> int:
    return sum(tuple(after[: len(path)]) == path for after in followers)


def naive_tree(followers: list[list[int]], limit: int, min_probability: float, prior: float, end_tokens: set[int]) -> Tree:
    """Take the most probable path off the frontier again and again; every count is made anew over all followers."""
    tree: Tree = []
    frontier: Tree = [((), 1.0)]
    while frontier:
        path, probability = max(frontier, key=lambda item: item[1])
        frontier.remove((path, probability))
        if path:
            if len(tree) == limit:
                break
            tree.append((path, probability))
            if path[-1] in end_tokens:
                continue
        depth = len(path)
        tokens = [after[depth] for after in followers if tuple(after[:depth]) == path and len(after) > depth]
        total = sum(count(followers, (*path, token)) for token in set(tokens))
        for token in dict.fromkeys(tokens):
            p = probability * count(followers, (*path, token)) / (total + prior)
            if p >= min_probability:
                frontier.append(((*path, token), p))
    return tree


def naive_draft(
    texts: list[list[int]], context: list[int], shortest: int, budget: int, config: SpeculationConfig, end_tokens: set[int]
) -> Tree:
    """The best-scoring tree over all match lengths; of equal scores the longest match."""
    best: Tree = []
    for length in range(min(config.suffix_depth, len(context)), shortest - 1, -1):
        followers = [after for text in reversed(texts) for after in occurrences(text, context[-length:], config.suffix_depth)][
            :OCCURRENCES
        ]
        limit = min(budget, int(config.suffix_factor * length))
        if followers and sum(p for _, p in best) >= ENOUGH * limit:
            break
        tree = naive_tree(followers, limit, config.suffix_min_probability, config.suffix_prior / length, end_tokens)
        if sum(p for _, p in tree) > sum(p for _, p in best):
            best = tree
    return best


def drafted(drafter: SuffixDrafter, row: Sequence, budget: int) -> Tree:
    draft = propose(drafter, row, budget)
    assert draft.sources == ("suffix",) * len(draft)
    return list(zip(paths(draft.tree), draft.estimates, strict=True))


def finish(
    drafter: SuffixDrafter, output: list[int], prompt: tuple[int, ...] = (900,), number: int = 0, salt: str = ""
) -> None:
    row = sequence([*prompt, *output], len(prompt), number=number)
    row.salt = salt
    run_pass(drafter, row, propose(drafter, row, 0), [901])
    row.tokens.pop()
    row.status = "finished"
    drafter.release(row)


settings = st.builds(
    SpeculationConfig,
    suffix_depth=st.integers(4, 12),
    suffix_min_match=st.integers(1, 3),
    suffix_global_min_match=st.integers(1, 3),
    suffix_min_probability=st.sampled_from([0.05, 0.1, 0.25, 0.5]),
    suffix_factor=st.sampled_from([0.5, 1.0, 2.0]),
    suffix_prior=st.sampled_from([0.0, 1.0, 2.5]),
)


@given(texts, settings, st.integers(0, 8), st.sets(st.integers(0, 2), max_size=1), st.integers(1, 10))
@example([1] * 80, SpeculationConfig(), 8, set(), 40)
@example([0, 1] * 80, SpeculationConfig(suffix_depth=6), 8, {0}, 160)
@example([0, 1, 2, 1] * 40, SpeculationConfig(suffix_depth=6, suffix_min_probability=1e-65), 8, set(), 160)
def test_own_text_equals_a_naive_count(
    text: list[int], config: SpeculationConfig, budget: int, end_tokens: set[int], step: int
) -> None:
    """Trees and estimates, while the text grows; the examples have more occurrences than are counted."""
    suffix = SuffixDrafter(config)
    row = sequence(text[:1], end_tokens=list(end_tokens))
    for stop in [*range(1, len(text), step), len(text)]:
        row.tokens += text[len(row.tokens) : stop]
        expected = naive_draft([row.tokens], row.tokens, config.suffix_min_match, budget, config, end_tokens)
        assert drafted(suffix, row, budget) == expected


@pytest.mark.skipif(kernels.native_tails() is None, reason="the native library is not built")
@given(
    st.lists(st.integers(-1, 3), max_size=700),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    settings,
    st.integers(1, 80),
    st.sets(st.integers(0, 3), max_size=2),
    st.integers(0, 60),
)
@example([1] * 700, [1] * 12, SpeculationConfig(suffix_min_probability=1e-6), 8, set(), 0)
@example([0, 1, 2, 3, 1, 2] * 100, [1, 2], SpeculationConfig(suffix_min_probability=1e-6), 80, set(), 300)
def test_the_native_search_finds_what_the_stated_one_does(
    text: list[int], tail: list[int], config: SpeculationConfig, budget: int, end_tokens: set[int], start: int
) -> None:
    """To the last bit, in texts with gaps, beyond the most places and occurrences, from any start."""
    edge = [GAP] * max(config.suffix_depth, len(tail))
    whole = array("i", [*edge, *text, *edge])
    asked = array("i", tail), config.suffix_min_match, budget, frozenset(end_tokens), len(edge) + start
    assert make_search(config)(whole, *asked) == likeliest(config, whole, *asked)


@pytest.mark.skipif(kernels.native_tails() is None, reason="the native library is not built")
def test_a_single_place_is_found_wherever_it_lies_and_from_no_start_behind_it() -> None:
    """Also across the borders of the stretches in which the native search goes."""
    config = SpeculationConfig()
    edge = [GAP] * config.suffix_depth
    tail, search = array("i", [2, 3]), make_search(config)
    for at in range(140):
        text = [0] * 143
        text[at : at + 2] = 2, 3
        whole = array("i", [*edge, *text, *edge])
        behind = len(edge) + at + 2
        for start, found in ((0, True), (behind, True), (behind + 1, False)):
            asked = tail, 2, 4, frozenset[int](), start
            draft = search(whole, *asked)
            assert draft == likeliest(config, whole, *asked)
            assert bool(draft and draft[0]) == found, (at, start)


@given(
    st.lists(texts, min_size=1, max_size=4), st.lists(st.integers(0, 2), min_size=1, max_size=12), settings, st.integers(1, 8)
)
def test_past_outputs_equal_a_naive_count_and_the_higher_score_wins(
    outputs: list[list[int]], context: list[int], config: SpeculationConfig, budget: int
) -> None:
    suffix = SuffixDrafter(config)
    for output in outputs:
        finish(suffix, output)
    own = naive_draft([context], context, config.suffix_min_match, budget, config, set())
    past = naive_draft(outputs, context, config.suffix_global_min_match, budget, config, set())
    better = past if sum(p for _, p in past) > sum(p for _, p in own) else own
    assert drafted(suffix, sequence(context), budget) == better


@given(st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=12), st.integers(0, 25))
def test_the_newest_outputs_that_fit_are_kept(outputs: list[list[int]], capacity: int) -> None:
    """Each output takes its tokens and one gap; the oldest go first; of one that is too long the end is kept."""
    store = Outputs(capacity, 4)
    for output in outputs:
        store.add(output)
    kept: list[int] = []
    for output in reversed([output for output in outputs if output and capacity > 1]):
        piece = [*output[-(capacity - 1) :], -1]
        if len(piece) + len(kept) > capacity:
            break
        kept = piece + kept
    assert bool(store) == bool(kept)
    assert [token for token in store.array.tolist() if token != -1] == [token for token in kept if token != -1]
    if kept:
        assert store.array.tolist() == [-1] * 4 + kept + [-1] * 4


def test_an_output_that_was_evicted_and_comes_again_is_drafted_as_before() -> None:
    suffix = SuffixDrafter(SpeculationConfig(suffix_global_tokens=40))
    answer, context = list(range(10, 40)), list(range(15, 22))

    def draft() -> list[tuple[tuple[int, ...], float]]:
        row = sequence(context, number=99)
        found = drafted(suffix, row, 8)
        suffix.release(row)
        return found

    finish(suffix, answer)
    first = draft()
    assert [path[-1] for path, _ in first] == list(range(22, 30))
    finish(suffix, list(range(100, 130)))
    assert draft() == []
    finish(suffix, answer)
    assert draft() == first


def test_no_match_and_no_continuation_crosses_from_one_output_to_the_next() -> None:
    suffix = SuffixDrafter(SpeculationConfig(suffix_global_min_match=2, suffix_prior=0.0))
    finish(suffix, [1, 2, 3])
    finish(suffix, [4, 5, 6])
    assert drafted(suffix, sequence([1, 2], number=1), 8) == [((3,), 1.0)]
    assert drafted(suffix, sequence([3, 4], number=2), 8) == []


def test_prompts_of_others_are_not_remembered() -> None:
    suffix = SuffixDrafter(SpeculationConfig(suffix_global_min_match=2))
    finish(suffix, [7, 8, 9], prompt=(1, 2, 3, 4, 5))
    assert drafted(suffix, sequence([2, 3]), 8) == []
    assert drafted(suffix, sequence([7, 8]), 8) != []


def test_only_finished_sequences_are_remembered() -> None:
    suffix = SuffixDrafter(SpeculationConfig())
    row = sequence([1, *range(10, 30)], 1)
    propose(suffix, row, 4)
    suffix.release(row)
    assert suffix.n_bytes == SuffixDrafter(SpeculationConfig()).n_bytes
    finish(suffix, list(range(10, 30)))
    assert suffix.n_bytes > SuffixDrafter(SpeculationConfig()).n_bytes


def test_past_outputs_can_be_turned_off_and_cleared() -> None:
    off, on = SuffixDrafter(SpeculationConfig(suffix_global_tokens=0)), SuffixDrafter(SpeculationConfig())
    for suffix in (off, on):
        finish(suffix, list(range(20)))
    row = sequence([900, *range(8)], 1)
    assert drafted(off, row, 8) == []
    assert drafted(on, row, 8) != []
    on.clear()
    assert drafted(on, row, 8) == []


def test_nothing_is_drafted_after_an_end_token() -> None:
    text = [1, 2, 3, 0, 4, 5, 1, 2, 3]
    suffix = SuffixDrafter(SpeculationConfig())
    assert [path for path, _ in drafted(suffix, sequence(text, end_tokens=[0]), 8)] == [(0,)]
    assert [path for path, _ in drafted(suffix, sequence(text), 8)][:2] == [(0,), (0, 4)]


def test_a_fork_becomes_a_tree() -> None:
    """Two ways the text went on, equally often, are both drafted."""
    text = [1, 2, 3, 7, 8, 1, 2, 3, 9, 6, 1, 2, 3]
    found = drafted(SuffixDrafter(SpeculationConfig(suffix_prior=0.0)), sequence(text), 4)
    assert {path: p for path, p in found if len(path) == 1} == {(9,): 0.5, (7,): 0.5}


def test_a_copy_is_drafted_in_full() -> None:
    """Copying the prompt takes one pass per budget + 1 tokens as soon as the match is long enough for the budget."""
    suffix, prompt = SuffixDrafter(SpeculationConfig()), list(range(100, 180))
    row = sequence([*prompt, 7])
    wanted, done, bursts = [*prompt, 8], 0, []
    while done < len(wanted) - 5:
        bursts.append(run_pass(suffix, row, propose(suffix, row, 4), wanted[done : done + 5]))
        done += bursts[-1]
    assert bursts[0] == 1
    assert set(bursts[3:]) == {5}


@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize(
    "second", [[4, 5, 6] * 20, [1, 2, 3] * 60, [1, 2, 3] * 10 + [4, 5, 6] * 40], ids=["shorter", "prefix", "other"]
)
def test_a_request_never_sees_the_own_text_of_an_earlier_one(second: list[int], released: bool) -> None:
    """An id may come back with other tokens, released in between or not; drafts are those of a fresh drafter."""
    suffix = SuffixDrafter(SpeculationConfig())
    first = sequence([1, 2, 3] * 100)
    propose(suffix, first, 8)
    if released:
        suffix.release(first)
    fresh = SuffixDrafter(SpeculationConfig())
    assert propose(suffix, sequence(second), 8) == propose(fresh, sequence(second), 8)


def test_a_thousand_requests_take_bounded_memory() -> None:
    suffix = SuffixDrafter(SpeculationConfig(suffix_global_tokens=500))
    most = 4 * (500 + 2 * SpeculationConfig().suffix_depth)
    for number in range(1000):
        finish(suffix, [number, *range(number % 40)], number=number)
    assert 0 < suffix.n_bytes <= most
    for number in range(1000):
        finish(suffix, [number, *range(number % 40)], number=number, salt=str(number % 50))
    assert 0 < suffix.n_bytes <= 2 * most


def test_requests_of_another_salt_do_not_meet_past_outputs() -> None:
    """How fast an answer comes tells nobody what those of other salts were given."""
    suffix = SuffixDrafter(SpeculationConfig(suffix_global_min_match=2))
    finish(suffix, [1, 2, 3, 4], salt="a")
    lengths = []
    for salt in ("b", "", "a"):
        row = sequence([9, 1, 2])
        row.salt = salt
        lengths.append(len(propose(suffix, row, 4)))
    assert lengths == [0, 0, 2]


def test_reading_a_prompt_and_a_step_are_quick() -> None:
    """8,000 tokens are read in a millisecond, a step takes a tenth of one; the limits leave room for a loaded machine."""
    generator = random.Random(0)
    suffix = SuffixDrafter(SpeculationConfig(suffix_global_tokens=100_000))
    for number in range(100):
        finish(suffix, generator.choices(range(2000), k=900), number=number)
    seconds = []
    for number in range(100, 105):
        row = sequence(generator.choices(range(2000), k=8000), number=number)
        start = time.perf_counter()
        propose(suffix, row, 8)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05
    seconds.clear()
    for token in range(100):
        row.tokens.append(token)
        start = time.perf_counter()
        propose(suffix, row, 8)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 3e-3


def test_a_long_loop_is_drafted_in_full_and_at_a_bounded_cost() -> None:
    """In 20,000 equal tokens every place matches in full depth; only so many of them are compared."""
    suffix, row = SuffixDrafter(SpeculationConfig()), sequence([5] * 20_000)
    seconds = []
    for _ in range(20):
        row.tokens.append(5)
        start = time.perf_counter()
        assert propose(suffix, row, 8).tree.tokens == (5,) * 8
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 5e-3
