"""Parameters at the ends of their ranges: what is accepted runs, on every kernel, and nobody beside it notices."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from harness import FLAT, Request, make_engine, run

from specdec import kernels
from specdec.config import ConfigError, SamplingParams
from specdec.kernels.portable import PortableKernels
from specdec.request import RequestError
from specdec.testing import TableModel

V = 16
HUGE = 10**30
"""More than any machine integer holds."""

EXTREMES: list[dict[str, Any]] = [
    {name: value}
    for name, values in {
        "temperature": (5e-324, 1e-300, 1e-40, 1e-30, 1e30, 1e40, 1.7e308),
        "top_k": (2**31, 2**32 + 1, 2**63 - 1, HUGE),
        "top_p": (5e-324, 1e-40, 1 - 1e-16),
        "min_p": (5e-324, 1e-40, 1 - 1e-16, 1),
        "repetition_penalty": (1e-3, 1e3),
        "frequency_penalty": (-2, 2, 5e-324),
        "presence_penalty": (-2, 2, 5e-324),
        "logit_bias": ({0: -100, 1: 100}, {0: 5e-324}, {HUGE: 1}),
        "max_tokens": (2**63, HUGE),
        "min_tokens": (2**63, HUGE),
        "seed": (2**63 - 1, HUGE),
        "stop_token_ids": ((2**63,), (HUGE,)),
        "bad_words_ids": (((2**63,),), ((HUGE, 1),)),
        "logprobs": (HUGE,),
        "prompt_logprobs": (HUGE,),
        "n": (HUGE,),
    }.items()
    for value in values
]


def test_every_number_is_among_them() -> None:
    """A setting that is added later is tried as well; those that are left out are no numbers."""
    no_numbers = {"ignore_eos", "stop", "bad_words"}
    assert {name for extreme in EXTREMES for name in extreme} == {f.name for f in fields(SamplingParams)} - no_numbers


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("extreme", EXTREMES, ids=str)
def test_what_is_accepted_runs(extreme: dict[str, Any], native: bool) -> None:
    """It is refused by name, or it runs to its end, the same with drafts and without; the request beside it never notices."""
    ops = kernels.select(torch.device("cpu")) if native else PortableKernels()
    model = TableModel(torch.randn(V, V, generator=torch.Generator().manual_seed(0)), 64)
    beside = Request((2, 3, 2, 3), SamplingParams(temperature=0.7, max_tokens=8), seed=1)
    usual = {"temperature": 0.7, "max_tokens": None if "min_tokens" in extreme else 8}
    seen = []
    for speculation in ("off", "suffix"):
        engine = make_engine(model, ops, speculation, pass_seconds=FLAT)
        (alone,) = run(engine, [beside])
        try:
            params = SamplingParams(**{**usual, **extreme})
            odd, neighbour = run(engine, [Request((4, 5, 4, 5), params, seed=3), beside])
        except (ConfigError, RequestError) as error:
            assert next(iter(extreme)) in str(error)  # noqa: PT017 - either it raises, or it runs
            return
        assert neighbour.same == alone.same
        assert odd.error is None
        seen.append(odd.same)
    assert seen[0] == seen[1]
