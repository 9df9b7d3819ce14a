"""The walk of the target's own choices: where it stops, what it asks for, and that it repeats plain decoding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trees import trees

from specdec.config import SamplingParams
from specdec.history import History
from specdec.sampling import SamplingError, choose
from specdec.tree import chain, path_tokens
from specdec.types import ROOT, Tree, Verdict
from specdec.verify import follow


def count_up(node: int, tokens: tuple[int, ...]) -> int:
    """A target that says 1, 2, 3, ..."""
    return len(tokens) + 1


@pytest.mark.parametrize(
    ("drafted", "verdict"),
    [
        ([], Verdict((), 1)),
        ([1, 2, 3], Verdict((0, 1, 2), 4)),  # bonus
        ([1, 2, 9], Verdict((0, 1), 3)),  # corrected
        ([9, 2, 3], Verdict((), 1)),
    ],
)
def test_follow_a_chain(drafted: list[int], verdict: Verdict) -> None:
    assert follow(chain(drafted), count_up) == verdict


def test_follow_takes_the_branch_that_the_target_takes() -> None:
    tree = Tree(tokens=(8, 1, 7, 2, 3), parents=(ROOT, ROOT, 1, 1, 3))
    assert follow(tree, count_up) == Verdict((1, 3, 4), 4)


def test_follow_asks_only_along_the_emitted_path() -> None:
    """Rows that are not walked cost nothing, and each is judged by the tokens on its own path."""
    tree = Tree(tokens=(8, 1, 7, 2, 9), parents=(ROOT, ROOT, 1, 1, 3))
    asked: list[tuple[int, tuple[int, ...]]] = []

    def pick(node: int, tokens: tuple[int, ...]) -> int:
        asked.append((node, tokens))
        return count_up(node, tokens)

    assert follow(tree, pick) == Verdict((1, 3), 3)
    assert asked == [(ROOT, ()), (1, (1,)), (3, (1, 2))]


def test_follow_keeps_what_came_before_a_damaged_row() -> None:
    """Plain decoding emits those tokens too, and may end on one of them before it meets the error."""

    def pick_until(depth: int) -> Callable[[int, tuple[int, ...]], int]:
        def pick(node: int, tokens: tuple[int, ...]) -> int:
            if len(tokens) == depth:
                raise SamplingError("damaged")
            return count_up(node, tokens)

        return pick

    assert follow(chain([1, 2, 3]), pick_until(2)) == Verdict((0,), 2)
    assert follow(chain([1, 2, 3]), pick_until(1)) == Verdict((), 1)
    with pytest.raises(SamplingError):
        follow(chain([1, 2, 3]), pick_until(0))


V = 4
TABLE = torch.randn(256, V, generator=torch.Generator().manual_seed(0)) * 1.5


def logits_after(tokens: tuple[int, ...]) -> Tensor:
    """[V] a target whose law depends on its whole context."""
    return TABLE[hash(tokens) % len(TABLE)]


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 2, 3]),
    top_p=st.sampled_from([0.8, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    frequency_penalty=st.sampled_from([0.0, 0.9]),
    bad_words_ids=st.sampled_from([(), ((1, 2),)]),
    min_tokens=st.sampled_from([0, 5]),
)


@given(st.data(), params, st.integers(0, 2**63 - 1))
@settings(max_examples=80)
def test_coupled_speculation_repeats_plain_decoding(data: st.DataObject, params: SamplingParams, seed: int) -> None:
    """Whatever is drafted, burst after burst, the tokens are those of plain decoding with the same seed."""
    prompt, length, ends = (1, 2, 1), 12, {3}

    plain = list(prompt)
    while len(plain) < len(prompt) + length:
        history = History.of(plain, len(prompt))
        plain.append(choose(logits_after(tuple(plain)), params, history, (), seed, ends))

    tokens, history = list(prompt), History(prompt)
    while len(tokens) < len(plain):
        right = chain(plain[len(tokens) : len(tokens) + data.draw(st.integers(0, 4))])
        tree = data.draw(st.one_of(st.just(right), trees(max_nodes=6, vocab_size=V)))

        def pick(node: int, path: tuple[int, ...], tree: Tree = tree) -> int:
            assert path == path_tokens(tree, node)
            return choose(logits_after((*tokens, *path)), params, history, path, seed, ends)

        verdict = follow(tree, pick)
        for token in (*(tree.tokens[node] for node in verdict.path), verdict.token):
            tokens.append(token)
            history.append(token)
    assert tokens[: len(plain)] == plain
