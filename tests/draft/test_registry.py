"""Names in the configuration become drafters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from drafting import paths, propose, run_pass, sequence

from specdec.config import DRAFTERS, SpeculationConfig
from specdec.draft import build
from specdec.draft.base import Target
from specdec.draft.merge import Merge


def top(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = logits.topk(k)
    return values, ids


TARGET = Target(SimpleNamespace(shape=SimpleNamespace(vocab_size=50)), SimpleNamespace(top=top), 0)
"""All that drafters without weights ask of it."""


def test_no_drafter_is_plain_decoding() -> None:
    assert build(SpeculationConfig.parse("off"), TARGET) is None


@pytest.mark.parametrize("name", sorted(set(DRAFTERS) - {"trained"}))
def test_every_name_is_known_and_alone_it_stays_alone(name: str) -> None:
    drafter = build(SpeculationConfig.parse(name), TARGET)
    assert drafter is not None
    assert drafter.name == name


def test_several_are_merged_in_the_order_of_the_configuration() -> None:
    drafter = build(SpeculationConfig.parse("recycling,ngram,suffix"), TARGET)
    assert isinstance(drafter, Merge)
    assert [part.name for part in drafter.drafters] == ["recycling", "ngram", "suffix"]


def test_together_they_copy_by_suffix_and_add_what_the_target_thought() -> None:
    """The suffix drafter's path comes first; recycling adds the target's own second guess beside it."""
    config = SpeculationConfig(drafters=("suffix", "recycling"), recycling_min_probability=0.05)
    drafter = build(config, TARGET)
    assert drafter is not None
    row = sequence([10, 11, 12, 13, 14, 15, 10])
    logits = torch.zeros(1, 50)
    logits[0, 11], logits[0, 20] = 2.0, 1.0
    run_pass(drafter, row, propose(drafter, row, 0), [11], logits)
    row.tokens += [12, 13, 14, 15, 10]
    draft = propose(drafter, row, 8)
    found = dict(zip(paths(draft.tree), draft.sources, strict=True))
    assert found[(11,)] == found[(11, 12)] == "suffix"
    assert found[(20,)] == "recycling"
