"""Worlds in which the audit holds rules to their law: they must show every fault, whatever the model is like."""

from __future__ import annotations

import itertools

import pytest
import torch

from specdec.audit.law import _distances
from specdec.audit.world import DEEP, WIDE, World
from specdec.verify import RULES
from specdec.verify.broken import BROKEN, CAUGHT


def worlds(sharp: float) -> list[World]:
    """Two, of a model that is more or less sure of itself."""
    generator = torch.Generator().manual_seed(int(10 * sharp))
    paths = [path for n in range(DEEP + 1) for path in itertools.product(range(WIDE), repeat=n)]
    made = []
    for _ in range(2):
        rows = torch.randn(len(paths), WIDE, generator=generator, dtype=torch.float64)
        laws = (sharp * rows).softmax(1).sort(1, descending=True).values
        made.append(World((1,), dict(zip(paths, laws, strict=True)), {path: [0, 1, 2] for path in paths}))
    return made


@pytest.mark.parametrize("sharp", [0.5, 2.0, 4.0, 8.0])
def test_every_fault_shows_however_sure_the_model_is(sharp: float) -> None:
    """Where nearly all mass lies on one token, refusing a draft leaves nothing to choose wrongly from unless drafts are such
    that it does."""
    made = worlds(sharp)
    for name, broken in BROKEN.items():
        assert any(far > CAUGHT for far in _distances(broken.rule.judge, broken.rule.siblings, made)), name
    for name, rule in RULES.items():
        if rule.keeps != "lossy" and name != "greedy":
            assert max(_distances(rule.judge, rule.siblings, made)) <= CAUGHT, name
