"""Drafters: they propose, and cannot change a token."""

from __future__ import annotations

from collections.abc import Callable

from specdec.config import SpeculationConfig
from specdec.draft.base import Drafter
from specdec.draft.merge import Merge
from specdec.draft.ngram import NgramDrafter
from specdec.draft.recycling import RecyclingDrafter, Top
from specdec.draft.suffix import SuffixDrafter

_MAKERS: dict[str, Callable[[SpeculationConfig, int, Top], Drafter]] = {
    "ngram": lambda config, vocab_size, top: NgramDrafter(config),
    "suffix": lambda config, vocab_size, top: SuffixDrafter(config),
    "recycling": RecyclingDrafter,
}
"""One line per drafter; the names are those of config.DRAFTERS."""


def build(config: SpeculationConfig, *, vocab_size: int, top: Top) -> Drafter | None:
    """The drafter that a configuration asks for: None for plain decoding, a merge where it names several.

    ``top`` gives the k largest of each row of logits [W, V]: (values, ids), both [W, k], best first.
    """
    drafters = [_MAKERS[name](config, vocab_size, top) for name in config.drafters]
    if len(drafters) > 1:
        return Merge(drafters)
    return drafters[0] if drafters else None
