"""Streams of random numbers: functions of seed, position and purpose that share nothing with each other or with the noise."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from specdec.chance import Stream
from specdec.kernels.base import gumbel


def numbers(seed: int, position: int, purpose="judging", n: int = 64) -> list[float]:
    stream = Stream(seed, position, purpose)
    return [stream.uniform() for _ in range(n)]


def test_a_stream_is_a_function_of_its_three_arguments() -> None:
    """For ever: a seed that somebody noted must give the same tokens with a later version of the generator."""
    assert numbers(7, 100) == numbers(7, 100)
    assert numbers(7, 100, n=3) == [0.08097465329826292, 0.9268206561938149, 0.271201247055221]


def test_streams_share_no_number() -> None:
    """Neighbouring positions and seeds, both purposes, extreme seeds: none is another one, shifted or not."""
    keys = itertools.product((0, 1, 2, 2**63 - 1), (0, 1, 2, 3, 2**20), ("judging", "drafting"))
    found = [set(numbers(*key)) for key in keys]
    assert all(len(one) == 64 for one in found)
    assert len(set().union(*found)) == 64 * len(found)


def test_streams_have_nothing_to_do_with_the_noise_of_plain_decoding() -> None:
    """At the same seed and positions: neither the same numbers nor correlated ones."""
    n = 2_000
    own = np.array([Stream(5, position, "judging").uniform() for position in range(n)])
    noise = np.array([float(gumbel(5, position, torch.tensor([0]))) for position in range(n)])
    uniform = np.exp(-np.exp(-noise))
    assert not np.isclose(own, uniform).any()
    assert abs(np.corrcoef(own, uniform)[0, 1]) < 4 / n**0.5


def test_numbers_are_uniform_over_positions() -> None:
    """The first number of each position is what most bursts use."""
    own = np.sort([Stream(3, position, "judging").uniform() for position in range(2_000)])
    assert own[0] >= 0
    assert own[-1] < 1
    assert np.abs(own - (np.arange(2_000) + 0.5) / 2_000).max() < 0.04  # Kolmogorov and Smirnov's bound is 0.044 at 0.1 %


def test_draws_have_the_given_law_and_never_take_what_has_no_mass() -> None:
    p = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0], dtype=torch.float64)
    stream = Stream(1, 1, "judging")
    counts = np.bincount([stream.draw(p) for _ in range(4_000)], minlength=6) / 4_000
    assert counts[[0, 2, 5]].sum() == 0
    assert np.abs(counts - p.numpy()).sum() / 2 < 0.03


def test_a_draw_at_the_ends_of_the_interval() -> None:
    """The smallest and the largest uniform take the first and the last token that is possible, however the sum is rounded."""
    stream = Stream(0, 0, "judging")
    for p in ([0.0, 0.1, 0.9, 0.0], [0.0, 1e-300, 1e-300, 0.0], [0.0, 1 + 2**-52, 3e-17, 0.0]):
        for uniform, token in ((0.0, 1), (1 - 2**-53, 2)):
            stream.uniform = lambda uniform=uniform: uniform  # type: ignore[method-assign]
            assert stream.draw(np.array(p)) in ({token} if p[2] > 1e-16 or not uniform else {1, 2})
