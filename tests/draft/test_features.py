"""Which rows of a pass are kept as features, for which sequence, and when one starts over."""

from __future__ import annotations

import pytest
import torch
from drafting import sequence

from specdec.draft.features import LOOSE, Features, Piece
from specdec.types import Draft, Forward, Span, Step, Tree, Verdict


def observe(features: Features, spans, verdicts):
    """A pass whose features are the numbers of its rows: 0, 1, ... from the first tap, 100, 101, ... from the second."""
    n = sum(span.n_rows for span in spans)
    row = torch.arange(float(n))[:, None]
    forward = Forward(torch.zeros(0, 1), (slice(0, 0),) * len(spans), (), {0: row, 5: row + 100})
    return features.collect(Step(tuple(spans)), forward, verdicts)


def held(features: Features, row) -> list[list[float]]:
    return features.features([features._tracks[row.id]]).tolist()


def chain(*tokens: int) -> Draft:
    return Draft(Tree(tokens, tuple(range(-1, len(tokens) - 1))), ("test",) * len(tokens))


def test_committed_rows_and_accepted_nodes_are_kept_and_refused_ones_are_not() -> None:
    features = Features((0, 5))
    prompt, decoding = sequence([1] * 9, number=1), sequence([1, 2], number=2)
    tree = Draft(Tree((3, 4, 5, 6), (-1, -1, 1, 2)), ("test",) * 4)
    spans = [Span(prompt, 0, 4), Span(decoding, 1, 2, tree)]
    prompt.n_cached = 4
    decoding.tokens += [4, 5, 9]
    decoding.n_cached = 4
    observe(features, spans, [None, Verdict((1, 2), 9)])
    assert held(features, prompt) == [[0, 100], [1, 101], [2, 102], [3, 103]]
    assert held(features, decoding) == [[4, 104], [6, 106], [7, 107]]  # pending token, then nodes 1 and 2 of the tree
    assert features._tracks[2].first == 1, "its first token was read before this drafter came"
    assert features.ready(decoding) is not None
    assert features.ready(prompt) is None, "its prompt goes on"


def test_a_path_that_ended_early_or_failed_leaves_only_what_was_committed() -> None:
    features = Features((0, 5))
    ended, failed = sequence([1, 2], number=1), sequence([1, 2], number=2)
    spans = [Span(ended, 1, 2, chain(3, 4, 5)), Span(failed, 1, 2, chain(3))]
    ended.tokens += [3, 4]  # the second drafted token ended it
    ended.n_cached, failed.n_cached = 3, 1
    observe(features, spans, [Verdict((0, 1, 2), 6), None])
    assert held(features, ended) == [[0, 100], [1, 101]]
    assert 2 not in features._tracks


def test_rows_that_do_not_follow_start_the_sequence_over() -> None:
    """A preempted sequence is read again from its start; one that was not watched for a while goes on from where it is."""
    features = Features((0, 5))
    row = sequence([1] * 40)
    row.n_cached = 6
    observe(features, [Span(row, 0, 6)], [None])
    row.n_cached = 3
    observe(features, [Span(row, 0, 3)], [None])
    assert (features._tracks[0].first, features._tracks[0].stop, len(held(features, row))) == (0, 3, 3)
    row.n_cached = 8
    observe(features, [Span(row, 3, 8)], [None])
    assert (features._tracks[0].first, features._tracks[0].stop) == (0, 8)
    row.n_cached = 12
    observe(features, [Span(row, 10, 12)], [None])
    assert (features._tracks[0].first, features._tracks[0].stop) == (10, 12)


def test_a_sequence_that_is_not_wholly_cached_or_observed_is_not_ready() -> None:
    features = Features((0, 5))
    row = sequence([1] * 5)
    row.n_cached = 4
    observe(features, [Span(row, 0, 4)], [None])
    assert features.ready(row) is not None
    row.n_cached = 0  # preempted; its track is that of the rows it had
    assert features.ready(row) is None
    row.n_cached, row.tokens = 5, [*row.tokens, 1]
    assert features.ready(row) is None, "a pass was missed"
    assert features.ready(sequence([1], number=9)) is None


def test_the_norm_is_applied_to_what_is_kept() -> None:
    features = Features((5,), lambda x: x * 2)
    row = sequence([1, 2, 3])
    row.n_cached = 2
    observe(features, [Span(row, 0, 2)], [None])
    assert held(features, row) == [[200], [202]]
    assert features.n_bytes == 8
    features.release(row)
    features.release(row)
    assert features.n_bytes == 0


def test_rows_that_nobody_uses_are_copied_out_of_their_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is not asked holds about its own rows, not all those that were refused or belong to others; and they
    are the right ones, in order, whenever the copies are made. None is copied twice: among many sequences that would be all
    day long."""
    features = Features((0, 5))
    copied: list[int] = []
    merged = Piece.merged
    monkeypatch.setattr(Piece, "merged", lambda pieces: copied.extend(len(p.rows) for p in pieces) or merged(pieces))
    row, other = sequence([1, 2]), sequence([1] * 4000, number=1)
    row.n_cached = 1
    expected = []
    for i in range(300):
        begin = i % 7  # the other sequence's rows come before
        spans = [*([Span(other, 0, begin)] if begin else []), Span(row, row.n_cached, row.n_cached + 1, chain(*range(40)))]
        accepted = i % 3
        row.tokens += range(accepted + 1)
        row.n_cached += accepted + 1
        other.n_cached = begin
        observe(features, spans, [*([None] if begin else []), Verdict(tuple(range(accepted)), 5)])
        expected += [[begin + k, 100 + begin + k] for k in range(accepted + 1)]
        own = features._tracks[row.id].n_held
        assert features.n_bytes <= 8 * (2 * own + LOOSE + 100), "as many again, some, and the last pass"
    assert held(features, row) == expected
    assert 0 < sum(copied) <= len(expected)
    track = features._tracks[row.id]
    last = track.part()
    assert (last.join().tolist(), track.n_held) == ([expected[-1]], len(expected) - 1)
    track.feed()
    track.hold(last)
    assert (held(features, row), track.stop) == ([expected[-1]], len(expected) + 1)
