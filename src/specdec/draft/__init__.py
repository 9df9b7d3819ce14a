"""Drafters: they propose, and cannot change a token."""

from __future__ import annotations

from collections.abc import Callable

from specdec.config import SpeculationConfig
from specdec.draft.base import Drafter, Target
from specdec.draft.merge import Merge
from specdec.draft.ngram import NgramDrafter
from specdec.draft.recycling import RecyclingDrafter
from specdec.draft.suffix import SuffixDrafter
from specdec.draft.trained import trained

_MAKERS: dict[str, Callable[[SpeculationConfig, Target], Drafter | None]] = {
    "ngram": lambda config, target: NgramDrafter(config),
    "suffix": lambda config, target: SuffixDrafter(config),
    "recycling": lambda config, target: RecyclingDrafter(config, target.model.shape.vocab_size, target.kernels.top),
    "trained": trained,
}
"""One line per drafter; the names are those of config.DRAFTERS."""


def build(config: SpeculationConfig, target: Target) -> Drafter | None:
    """The drafter that a configuration asks for: None for plain decoding, a merge where it names several."""
    made = [_MAKERS[name](config, target) for name in config.drafters]
    drafters = [drafter for drafter in made if drafter is not None]
    if len(drafters) > 1:
        return Merge(drafters)
    return drafters[0] if drafters else None
