"""Prompt lookup equals a search through the text, whatever came before."""

from __future__ import annotations

import random
import time

import pytest
from drafting import propose, run_pass, sequence
from hypothesis import given
from hypothesis import strategies as st

from specdec.config import SpeculationConfig
from specdec.draft.ngram import NgramDrafter
from specdec.types import ROOT

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def drafter(longest: int = 4, shortest: int = 2) -> NgramDrafter:
    return NgramDrafter(SpeculationConfig(ngram_max=longest, ngram_min=shortest))


def search(tokens: list[int], budget: int, longest: int, shortest: int) -> list[int]:
    """Scan backwards for the tail, longest first; then copy token by token, reading on into what was copied."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - 1, n - 1, -1):
            if tokens[start - n : start] == tokens[-n:]:
                text = list(tokens)
                for i in range(budget):
                    text.append(text[start + i])
                return text[len(tokens) :]
    return []


@given(texts, st.lists(st.integers(1, 5), max_size=8), st.integers(0, 9), st.integers(1, 4), st.integers(0, 3))
def test_equals_a_search_while_the_text_grows(text: list[int], steps: list[int], budget: int, shortest: int, more: int) -> None:
    ngram = drafter(shortest + more, shortest)
    row = sequence(text[:1])
    for stop in [1, *(1 + sum(steps[: i + 1]) for i in range(len(steps))), len(text)]:
        row.tokens += text[len(row.tokens) : stop]
        draft = propose(ngram, row, budget)
        assert list(draft.tree.tokens) == search(row.tokens, budget, shortest + more, shortest)
        assert draft.tree.parents == tuple(range(ROOT, len(draft) - 1))
        assert draft.sources == ("ngram",) * len(draft)


def test_the_latest_occurrence_of_the_longest_tail_wins() -> None:
    text = [1, 2, 3, 50, 9, 1, 2, 3, 51, 8, 2, 3, 52, 7, 1, 2, 3]
    assert propose(drafter(3, 2), sequence(text), 1).tree.tokens == (51,)
    assert propose(drafter(2, 2), sequence(text), 1).tree.tokens == (52,)


def test_a_tail_seen_once_does_not_match_itself() -> None:
    assert len(propose(drafter(3, 1), sequence([1, 2, 3, 4]), 8)) == 0


def test_a_loop_is_drafted_round_and_round() -> None:
    """A continuation that reaches the end of the text is not cut there."""
    assert propose(drafter(), sequence([9, 5, 6, 7, 5, 6, 7, 5, 6]), 7).tree.tokens == (7, 5, 6, 7, 5, 6, 7)


def test_nothing_is_drafted_after_an_end_token() -> None:
    text = [1, 2, 3, 0, 4, 5, 1, 2]
    assert propose(drafter(), sequence(text, end_tokens=[0]), 6).tree.tokens == (3, 0)
    assert propose(drafter(), sequence(text), 6).tree.tokens == (3, 0, 4, 5, 1, 2)


def test_no_budget_no_draft() -> None:
    assert len(propose(drafter(), sequence([1, 2, 3, 1, 2]), 0)) == 0


def test_a_copy_is_drafted_in_full() -> None:
    """Copying the prompt takes one pass per budget + 1 tokens as soon as the shortest tail is out."""
    ngram, prompt = drafter(), list(range(100, 140))
    row = sequence([*prompt, 7])
    wanted = [*prompt, 8]
    emitted = [run_pass(ngram, row, propose(ngram, row, 4), wanted[done : done + 5]) for done in (0, 1)]
    done = 2
    while done < len(wanted) - 5:
        emitted.append(run_pass(ngram, row, propose(ngram, row, 4), wanted[done : done + 5]))
        done += emitted[-1]
    assert emitted[:2] == [1, 1]
    assert set(emitted[2:]) == {5}


@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize(
    "second", [[4, 5, 6] * 20, [1, 2, 3] * 60, [1, 2, 3] * 10 + [4, 5, 6] * 40], ids=["shorter", "prefix", "other"]
)
def test_a_request_never_sees_the_text_of_an_earlier_one(second: list[int], released: bool) -> None:
    """An id may come back with other tokens, released in between or not; drafts are those of a fresh drafter."""
    ngram = drafter()
    first = sequence([1, 2, 3] * 100)
    propose(ngram, first, 8)
    if released:
        ngram.release(first)
    assert propose(ngram, sequence(second), 8) == propose(drafter(), sequence(second), 8)


def test_a_thousand_requests_leave_nothing_behind() -> None:
    ngram = drafter()
    held = 0
    for number in range(1000):
        row = sequence([number, *range(40), number], number=number)
        propose(ngram, row, 4)
        held = max(held, ngram.n_bytes)
        ngram.release(row)
        ngram.release(row)
    assert 0 < held < 100_000
    assert ngram.n_bytes == 0


def test_a_step_is_quick() -> None:
    """One step at 2,000 tokens takes tens of microseconds; the limit leaves room for a loaded machine."""
    ngram, row = drafter(), sequence(random.Random(0).choices(range(300), k=2000))
    propose(ngram, row, 8)
    seconds = []
    for token in range(100):
        row.tokens.append(token)
        start = time.perf_counter()
        propose(ngram, row, 8)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1e-3
