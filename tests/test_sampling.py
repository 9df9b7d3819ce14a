"""The law that a request asks for, the noise that chooses from it, and the log-probabilities that are reported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec import sampling
from specdec.config import SamplingParams
from specdec.history import History
from specdec.kernels import select
from specdec.kernels.base import gumbel
from specdec.sampling import LOGPROB_FLOOR, SamplingError, choose, derive_seed, draw, greedy, logprob, warp

NOTHING = History([])


def row(*probabilities: float) -> Tensor:
    """Logits of a law."""
    return torch.tensor(probabilities).log()


def law(logits: Tensor, history: History = NOTHING, path: Sequence[int] = (), **settings: Any) -> list[float]:
    return warp(logits, SamplingParams(**settings), history, path).exp().tolist()


# The pipeline in plain Python: one token at a time, lists and floats, the node's whole list of tokens.


def plain_warp(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], ends: set[int]
) -> list[float]:
    """Log-probabilities as the documentation of SamplingParams defines them; temperature above 0."""
    z = list(logits)
    for v in set(prompt) | set(output):
        z[v] = z[v] * params.repetition_penalty if z[v] < 0 else z[v] / params.repetition_penalty
    for v in set(output):
        z[v] -= params.frequency_penalty * output.count(v) + params.presence_penalty
    for v, bias in params.logit_bias.items():
        z[v] += bias
    for word in params.bad_words_ids:
        if [*prompt, *output][len(prompt) + len(output) - len(word) + 1 :] == list(word[:-1]):
            z[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for v in ends | set(params.stop_token_ids):
            z[v] = -math.inf
    best = max(z)
    order = sorted(range(len(z)), key=lambda v: (-z[v], v))
    if params.top_k > 0:
        order = order[: params.top_k]
    weight = {v: math.exp((z[v] - best) / params.temperature) for v in order}
    total, before, nucleus = sum(weight.values()), 0.0, []
    for v in order:
        if params.top_p == 1 or before < params.top_p * total:
            nucleus.append(v)
        before += weight[v]
    kept = [v for v in nucleus if weight[v] >= params.min_p]
    norm = math.log(sum(weight[v] for v in kept))
    return [(z[v] - best) / params.temperature - norm if v in kept else -math.inf for v in range(len(z))]


V = 9
tokens = st.integers(0, V - 1)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.5, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, V, 50]),
    top_p=st.sampled_from([0.123, 0.4567, 0.81, 0.9731, 1.0]),
    min_p=st.sampled_from([0.0, 0.0712, 0.3141, 1.0]),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.3]),
    frequency_penalty=st.sampled_from([-1.7, 0.0, 0.6]),
    presence_penalty=st.sampled_from([-0.4, 0.0, 1.1]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 2.25]), max_size=2),
    bad_words_ids=st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(tokens, max_size=1),
)
logits_with_ties = st.lists(st.sampled_from([-1.5, -0.25, 0.0, 0.5, 0.75, 2.0]), min_size=V, max_size=V)


@given(logits_with_ties, params, st.lists(tokens, max_size=5), st.lists(tokens, max_size=4), st.lists(tokens, max_size=3))
@settings(max_examples=200)
def test_every_node_equals_the_plain_pipeline_over_its_whole_list_of_tokens(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], path: list[int]
) -> None:
    history = History.of([*prompt, *output], len(prompt))
    z = torch.tensor(logits)
    try:
        node = warp(z, params, history, path, {0})
    except SamplingError:
        banned = {0, *params.stop_token_ids, *(word[-1] for word in params.bad_words_ids)}
        assert len(banned) == V
        return
    expected = plain_warp(logits, params, prompt, output + path, {0})
    assert [p == -math.inf for p in node.tolist()] == [p == -math.inf for p in expected]
    np.testing.assert_allclose(node.numpy(), expected, rtol=0, atol=1e-12)
    assert node.exp().sum().item() == pytest.approx(1, abs=1e-12)

    # The same bits whether the path is drafted or committed: speculation must not move even a rounding error.
    committed = History.of([*prompt, *output, *path], len(prompt))
    assert torch.equal(node, warp(z, params, committed, (), {0}))
    most_likely = warp(z, params.replace(temperature=0.0), history, path, {0})
    assert greedy(z, params, history, path, {0}) == int(most_likely.argmax())
    assert most_likely.exp().sum() == 1


@pytest.mark.parametrize("width", [1, 3, 64, 100_000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_nucleus_is_the_same_however_much_is_sorted_at_first(monkeypatch: pytest.MonkeyPatch, width: int, top_p: float) -> None:
    z = (torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 8).round() / 4  # many ties
    chosen = SamplingParams(top_p=top_p, temperature=1.3)
    expected = warp(z, chosen, NOTHING)
    monkeypatch.setattr(sampling, "NUCLEUS_WIDTH", width)
    assert torch.equal(warp(z, chosen, NOTHING), expected)
    order = np.argsort(-z.numpy(), kind="stable")
    p = torch.softmax(z.double() / 1.3, 0).numpy()[order]
    kept = np.append(0.0, np.cumsum(p)[:-1]) < top_p
    assert np.array_equal(np.isfinite(expected.numpy()[order]), kept)


@pytest.mark.parametrize("k", [1, 2, 50, 4999])
def test_exactly_k_survive_and_ties_go_to_the_lowest_ids(k: int) -> None:
    z = torch.randint(0, 4, (5000,), generator=torch.Generator().manual_seed(k)).float()
    kept = np.flatnonzero(np.isfinite(warp(z, SamplingParams(top_k=k), NOTHING).numpy()))
    assert kept.tolist() == sorted(np.argsort(-z.numpy(), kind="stable")[:k].tolist())


@pytest.mark.parametrize("n", [3, 40_000, 130_000])
def test_greedy_takes_the_lowest_id_on_a_tie(n: int) -> None:
    z = torch.zeros(n)
    z[[n // 2, n - 1]] = 1.0
    assert greedy(z, SamplingParams(temperature=0), NOTHING) == n // 2


def test_filters_apply_in_order() -> None:
    """Temperature, then top-k, then top-p of what top-k left: any other order gives other numbers."""
    z = row(0.30, 0.22, 0.18, 0.12, 0.08, 0.05, 0.03, 0.02)
    assert law(z, temperature=0.7, top_k=5, top_p=0.8) == pytest.approx([0.4708, 0.3023, 0.2269, 0, 0, 0, 0, 0], abs=1e-4)


def test_min_p_is_relative_to_the_most_likely() -> None:
    assert law(row(0.5, 0.3, 0.2), min_p=0.5) == pytest.approx([0.625, 0.375, 0], abs=1e-7)
    assert law(row(0.5, 0.3, 0.2), min_p=1.0) == [1, 0, 0]


def test_huge_temperature_is_uniform_over_what_the_filters_leave() -> None:
    z = torch.tensor([0.9, 0.05, 0.05, *[math.exp(-30)] * 45]).log()
    assert law(z, temperature=1e6, top_k=3) == pytest.approx([1 / 3] * 3 + [0] * 45, abs=1e-5)
    assert law(z, temperature=1e6) == pytest.approx([1 / 48] * 48, abs=1e-5)


@pytest.mark.parametrize("temperature", [1e-4, 1e-300, 5e-324])
def test_tiny_temperature_is_greedy_without_overflow(temperature: float) -> None:
    z = torch.tensor([88.0, -3e38, 89.0, 3e38, -math.inf])
    assert law(z, temperature=temperature) == [0, 0, 0, 1, 0]
    assert law(z, temperature=temperature, top_k=4, top_p=0.9, min_p=0.1) == [0, 0, 0, 1, 0]


def test_removed_tokens_are_exactly_impossible_and_others_never_are() -> None:
    """A token that the filters keep stays possible however unlikely; -inf means removed."""
    z = torch.tensor([0.0, -2000.0, -3000.0])
    assert warp(z, SamplingParams(), NOTHING).tolist() == [0, -2000, -3000]
    assert warp(z, SamplingParams(top_k=2), NOTHING).tolist() == [0, -2000, -math.inf]


def test_temperature_zero_is_a_one_hot_law() -> None:
    assert law(torch.tensor([1.0, 3.0, 3.0]), temperature=0) == [0, 1, 0]
    assert law(torch.tensor([1.0, 3.0, 3.0]), temperature=0, logit_bias={0: 2.5}) == [1, 0, 0]


def test_bad_words_look_back_over_prompt_output_and_path() -> None:
    """A banned sequence must not be completed, wherever it began."""
    words = {"temperature": 0.0, "bad_words_ids": [[1, 2, 3]]}
    z = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert law(z, History([1, 2]), **words) == [0, 0, 1, 0]
    assert law(z, History.of([0, 1, 2], 2), **words) == [0, 0, 1, 0]
    assert law(z, History([1]), path=(2,), **words) == [0, 0, 1, 0]
    assert law(z, History([0]), path=(1, 2), **words) == [0, 0, 1, 0]
    for history, path in ((History([2]), ()), (History([1, 2, 0]), ()), (History([1, 2]), (2,)), (History([2, 1]), ())):
        assert law(z, history, path=path, **words) == [0, 0, 0, 1]
    assert law(z, temperature=0.0, bad_words_ids=[[3], [2]]) == [0, 1, 0, 0]


def test_end_tokens_wait_for_min_tokens() -> None:
    """End tokens and the request's stop tokens are banned until min_tokens are out, drafted ones counted."""
    z = torch.tensor([0.0, 1.0, 2.0])
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(1,))
    history = History.of([2, 2, 0], 2)  # one token is out
    assert greedy(z, params, history, (), {2}) == 0
    assert greedy(z, params, history, (0,), {2}) == 2
    history.append(0)
    assert greedy(z, params, history, (), {2}) == 2


def test_mask_removes_tokens_before_the_filters() -> None:
    mask = torch.tensor([False, True, True])
    logp = warp(row(0.5, 0.3, 0.2), SamplingParams(top_p=0.55), NOTHING, mask=mask)
    assert logp.exp().tolist() == pytest.approx([0, 1, 0])
    assert greedy(row(0.5, 0.3, 0.2), SamplingParams(temperature=0), NOTHING, mask=mask) == 1


def test_frequency_penalties_of_opposite_sign_choose_differently() -> None:
    """A penalty that is silently dropped under speculation is a known fault of other engines."""
    z = torch.tensor([1.0, 1.1])
    history = History.of([0, 0, 1], 1)
    chosen = [greedy(z, SamplingParams(temperature=0, frequency_penalty=f), history, (1,)) for f in (-1.7, 1.7)]
    assert chosen == [1, 0]


def test_penalties_of_the_output_leave_the_prompt_alone() -> None:
    z = torch.tensor([1.0, 0.5])
    assert greedy(z, SamplingParams(temperature=0, presence_penalty=2, frequency_penalty=2), History([0, 0, 0])) == 0
    assert greedy(z, SamplingParams(temperature=0, repetition_penalty=4), History([0])) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("logits", "settings", "cause"),
    [
        ([math.nan, 1.0], {}, "nan at position 3"),
        ([1.0, math.nan], {"top_k": 1, "presence_penalty": 1.0}, "nan at position 3"),
        ([1.0, math.inf], {}, "inf at position 3"),
        ([1.0, 2.0], {"bad_words_ids": [[0], [1]]}, "no token is left at position 3"),
        ([-math.inf, -math.inf], {}, "no token is left at position 3"),
    ],
)
def test_a_row_without_a_choice_is_an_error_that_names_the_cause(
    temperature: float, logits: list[float], settings: dict[str, Any], cause: str
) -> None:
    chosen = SamplingParams(temperature=temperature, **settings)
    with pytest.raises(SamplingError, match=cause):
        choose(torch.tensor(logits), chosen, History([1, 1]), (1,), seed=1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_parity_with_transformers(seed: int, temperature: float) -> None:
    """Same order and semantics as Hugging Face's processors, on rows without ties."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(2000, generator=generator) * 1.5
    context = torch.randint(0, 2000, (1, 300), generator=generator)
    theirs = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.2),
            TemperatureLogitsWarper(temperature),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ]
    )
    expected = torch.log_softmax(theirs(context, z.unsqueeze(0).clone())[0].double(), 0)
    params = SamplingParams(temperature=temperature, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.2)
    ours = warp(z, params, History(context[0].tolist()))
    assert torch.equal(ours.isfinite(), expected.isfinite())
    kept = ours.isfinite()
    assert kept.sum() > 1
    torch.testing.assert_close(ours[kept], expected[kept], rtol=0, atol=1e-5)


def test_history_is_incremental_and_untouched_by_paths() -> None:
    history = History([3, 1, 3])
    for token in (1, 4, 4):
        history.append(token)
    whole = History.of([3, 1, 3, 1, 4, 4], 3)
    for h in (history, whole):
        assert (len(h), h.n_output) == (6, 3)
        for _ in range(2):  # asking must not change the answer
            ids, counts = h.emitted((4, 9, 9))
            assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {1: 1, 4: 3, 9: 2}
            assert sorted(h.distinct((9, 1)).tolist()) == [1, 3, 4, 9]
        ids, counts = h.emitted(())
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {1: 1, 4: 2}
        assert [h.tail((8, 9), n) for n in (0, 1, 3, 99)] == [(), (9,), (4, 8, 9), (3, 1, 3, 1, 4, 4, 8, 9)]


# The noise: a pure function of (seed, position, token), and draws that follow the law.


def uniform_from_integers(seed: int, position: int, token: int) -> Fraction:
    """The uniform behind the noise, in unbounded integers and with splitmix64's published constants."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mix((seed + golden * (position + 1)) % 2**64)
    return (Fraction(mix((key + golden * (token + 1)) % 2**64) >> 11) + Fraction(1, 2)) / 2**53


@pytest.mark.parametrize("seed", [0, 1, 42, 2**63 - 1])
@pytest.mark.parametrize("position", [0, 7, 100_000])
def test_noise_equals_integer_arithmetic(seed: int, position: int) -> None:
    ids = [0, 1, 2, 511, 49_151, 262_143]
    expected = [-math.log(-math.log(uniform_from_integers(seed, position, token))) for token in ids]
    assert gumbel(seed, position, torch.tensor(ids)).tolist() == pytest.approx(expected, rel=1e-13)


def test_noise_is_pinned() -> None:
    """Outputs of a seed must not change between releases."""
    pinned = [0.8332657933414711, -1.518531642604578, 0.08172666638282342, 0.09519917302516052]
    assert gumbel(1234, 10, torch.arange(4)).tolist() == pytest.approx(pinned, rel=1e-12)
    drawn = [draw(row(0.4, 0.3, 0.2, 0.1).double(), 1234, position) for position in range(16)]
    assert drawn == [1, 0, 0, 2, 1, 3, 0, 2, 2, 0, 0, 2, 0, 2, 3, 1]


def test_noise_of_a_token_does_not_depend_on_the_others() -> None:
    """So a wider vocabulary, padding, or a filter leaves the race between the remaining tokens as it was."""
    everything = gumbel(5, 17, torch.arange(1000))
    assert torch.equal(gumbel(5, 17, torch.tensor([3, 999])), everything[[3, 999]])
    logp = torch.log_softmax(torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), 0)
    padded = torch.full((1000,), -math.inf, dtype=torch.float64)
    padded[:50] = logp
    for position in range(200):
        token = draw(logp, 5, position)
        assert draw(padded, 5, position) == token
        others = logp.clone()
        others[[v for v in range(50) if v not in (token, (token + 1) % 50)]] = -math.inf
        assert draw(others, 5, position) == token


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_draws_follow_the_law() -> None:
    """Over positions, over seeds, and independently at neighbouring positions and seeds.

    Seeds are fixed, so the test cannot flake; a correct generator stays below each bound with probability 1 - 1e-4.
    """
    p = np.array([0.4, 0.25, 0.2, 0.1, 0.05])
    logp = torch.from_numpy(np.append(np.log(p), -math.inf))
    n = 4000
    by_position = np.array([draw(logp, 7, t) for t in range(n)])
    by_seed = np.array([draw(logp, s, 7) for s in range(n)])
    for drawn in (by_position, by_seed):
        assert chi_square(np.bincount(drawn, minlength=5), n * p) < 23.6  # 4 degrees of freedom
        pairs = np.bincount(5 * drawn[:-1:2] + drawn[1::2], minlength=25)
        assert chi_square(pairs, n / 2 * np.outer(p, p).ravel()) < 58.9  # 24 degrees of freedom
    both = np.bincount(5 * by_position + by_seed, minlength=25)
    assert chi_square(both, n * np.outer(p, p).ravel()) < 58.9


def test_choose_draws_at_the_position_of_the_token() -> None:
    """The position is the number of tokens before the chosen one, drafted ones counted: never a row or a burst number."""
    z = torch.randn(40, generator=torch.Generator().manual_seed(3))
    params = SamplingParams(temperature=0.8, top_k=12)
    history = History.of([1, 2, 3, 4], 2)
    for path in ((), (5,), (5, 6)):
        assert choose(z, params, history, path, seed=9) == draw(warp(z, params, history, path), 9, 4 + len(path))
    assert choose(z, params.replace(temperature=0.0), history, (), seed=9) == int(z.argmax())
    assert len({choose(z, params, history, (), seed) for seed in range(40)}) > 3


def test_choose_asks_the_kernels_for_the_race() -> None:
    """Where every token stays possible they race on the logits as they are; after a filter, on the law that is left."""

    class Race:
        def race(self, z: Tensor, seed: int, position: int, temperature: float = 1.0) -> int:
            self.asked = (z, seed, position, temperature)
            return 2

        def race_among(self, *_: Any) -> None:
            return None

    kernels: Any = Race()
    logits = row(0.5, 0.3, 0.2)
    assert choose(logits, SamplingParams(temperature=0.6), History([0]), (1,), seed=4, kernels=kernels) == 2
    z, *rest = kernels.asked
    assert torch.equal(z, logits)
    assert rest == [4, 2, 0.6]
    assert choose(logits, SamplingParams(top_k=2), History([0]), (1,), seed=4, kernels=kernels) == 2
    law, *rest = kernels.asked
    assert law.exp().tolist() == pytest.approx([0.625, 0.375, 0])
    assert rest == [4, 2, 1.0]


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 1},
        {"top_k": 40},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"min_p": 0.05},
        {"top_k": 30, "top_p": 0.8, "min_p": 0.02},
        {"repetition_penalty": 1.3, "top_p": 0.7},
        {"logit_bias": {5: 4.0}, "top_k": 600},
    ],
)
@pytest.mark.parametrize("temperature", [1e-6, 0.4, 1.0, 1.7, 1e6])
def test_the_race_draws_what_the_definition_draws(filters: dict[str, Any], temperature: float) -> None:
    """With kernels and without: the same token at every position, also where logits are tied or ruled out."""
    params = SamplingParams(temperature=temperature, **filters)
    history, native = History([3, 5]), select(torch.device("cpu"))
    smooth = torch.randn(500, generator=torch.Generator().manual_seed(1)) * 3
    for logits in (smooth, smooth.round(), torch.where(smooth > 5, smooth, -torch.inf)):
        for seed in range(30):
            assert choose(logits, params, history, (), seed, kernels=native) == choose(logits, params, history, (), seed)


@given(
    st.lists(st.one_of(st.integers(-40, 40).map(lambda n: n / 4), st.just(-math.inf)), min_size=1, max_size=80),
    st.integers(0, 90),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.floats(0.05, 3),
)
@settings(max_examples=300)
def test_a_native_race_among_survivors_is_the_definition_or_says_nothing(
    values: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits, native = torch.tensor(values), select(torch.device("cpu"))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for z in (logits, logits.double()):
        token = native.race_among(z, 7, 3, temperature, top_k, top_p, min_p)
        if token is None:
            continue
        if max(values) == -math.inf:
            assert token == -1
        else:
            assert token == choose(logits, params, History([1, 2, 3]), (), 7)


def test_a_native_race_among_survivors_nearly_always_says_who_won() -> None:
    """A fall back to the definition costs a millisecond: rows like a model's must not need it."""
    native, dice = select(torch.device("cpu")), torch.Generator().manual_seed(0)
    silent = 0
    for i in range(200):
        row = torch.randn(49152, generator=dice) * 2 + 12 * torch.rand(49152, generator=dice) ** 60
        for top_k, top_p, min_p in ((0, 0.9, 0.0), (50, 0.95, 0.0), (0, 1.0, 0.1)):
            silent += native.race_among(row, i, 3, 0.8, top_k, top_p, min_p) is None
    assert silent <= 12


def test_derived_seeds_are_distinct_and_the_first_is_the_seed_itself() -> None:
    """The n samples of a request must not repeat each other, nor those of a request with the next seed."""
    for seed in (0, 1, 12345, 2**63 - 1):
        derived = [derive_seed(seed, index) for index in range(128)]
        assert derived[0] == seed
        assert all(0 <= s < 2**63 for s in derived)
    assert len({derive_seed(seed, index) for seed in range(50) for index in range(128)}) == 50 * 128
    assert derive_seed(0, 1) == 1517046713075839355  # pinned: samples must not change between releases


# Reported log-probabilities: the model's own.


@pytest.mark.parametrize("token", [0, 1, 2])
def test_logprob_is_the_models_own(token: int) -> None:
    found = logprob(row(0.3, 0.5, 0.2), token, 3)
    assert found.token == token
    assert found.logprob == pytest.approx(math.log([0.3, 0.5, 0.2][token]), abs=1e-6)
    assert [t for t, _ in found.top] == [1, 0, 2]
    assert [p for _, p in found.top] == pytest.approx([math.log(0.5), math.log(0.3), math.log(0.2)], abs=1e-6)


def test_logprob_top_is_sorted_with_the_lowest_id_first_on_a_tie() -> None:
    z = torch.tensor([0.0, 1.0, 2.0, 1.0, 2.0, 1.0])
    assert [t for t, _ in logprob(z, 0, 4).top] == [2, 4, 1, 3]
    assert [t for t, _ in logprob(z, 0, 20).top] == [2, 4, 1, 3, 5, 0]
    assert logprob(z, 0, 0).top == ()


def test_logprobs_are_finite() -> None:
    """JSON has no infinity: what the model rules out is reported at the floor."""
    found = logprob(torch.tensor([0.0, -math.inf, -1e30]), 1, 3)
    assert found.logprob == LOGPROB_FLOOR
    assert found.top == ((0, 0.0), (2, LOGPROB_FLOOR), (1, LOGPROB_FLOOR))
    for bad in ([math.nan, 0.0], [0.0, math.inf], [-math.inf, -math.inf]):
        with pytest.raises(SamplingError, match="no log-probabilities"):
            logprob(torch.tensor(bad), 0, 1)
