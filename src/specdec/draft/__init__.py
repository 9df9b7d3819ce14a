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
from specdec.types import Siblings

_MAKERS: dict[str, Callable[[SpeculationConfig, Target, Siblings | None], Drafter | None]] = {
    "ngram": lambda config, target, draws: NgramDrafter(config),
    "suffix": lambda config, target, draws: SuffixDrafter(config),
    "recycling": lambda config, target, draws: RecyclingDrafter(config, target.model.shape.vocab_size, target.kernels.top),
    "trained": trained,
}
"""One line per drafter; the names are those of config.DRAFTERS."""


def build(config: SpeculationConfig, target: Target, draws: Siblings | None = None) -> Drafter | None:
    """The drafter that a configuration asks for: None for plain decoding, a merge where it names several.

    Args:
        draws: how those draw their nodes that can; None has all of them put their best forward.
    """
    made = [_MAKERS[name](config, target, draws) for name in config.drafters]
    drafters = [drafter for drafter in made if drafter is not None]
    if len(drafters) > 1:
        return Merge(drafters)
    return drafters[0] if drafters else None
