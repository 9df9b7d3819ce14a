"""What a drafter is: it proposes trees of tokens and learns from what became of them. It cannot change a token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

from specdec.kernels.base import Kernels
from specdec.models.base import Model
from specdec.types import Draft, Forward, Sequence, Siblings, Step, Verdict


@dataclass(frozen=True, slots=True)
class Target:
    """What drafters may use of the model that they draft for."""

    model: Model
    kernels: Kernels
    n_blocks: int
    """Blocks of its pool: a drafter that keeps keys and values keeps them under the same block numbers."""


class Drafter(ABC):
    """Proposes continuations of sequences.

    ``propose`` sees committed tokens only (the last one is the pending token). ``observe`` is called after every pass with
    the step that ran, what the pass returned, and one verdict per span (None where a prompt goes on in a later step),
    *after* the accepted tokens were committed to the sequences.

    The first row that is observed of a sequence need not be its first token's: leading blocks may come from the prefix cache
    (``sequence.n_cached`` says how far), and after a preemption a sequence is read again from wherever its blocks end, its
    own output included. A drafter that keeps keys and values under the pool's block numbers may use those of such blocks as
    they are: they hold what it wrote when rows of the same tokens, after the same tokens, ran there, and a block is not
    written again while it can be found. It may not assume that it wrote them all: passes of a sequence for which it was not
    asked may have filled some, and what depends on the token after a block's last one was computed for another token. What
    it lacks may make its drafts worse and must not make it fail.
    """

    name: str
    taps: tuple[int, ...] = ()
    """Layers whose hidden states ``observe`` needs."""
    card: Mapping[str, Any] | None = None
    """What is known of a trained drafter, for people; None for one that was not trained."""
    thrifty = False
    """May sequences and passes for which the drafter was not asked be left out of what it observes? It then learns from fewer
    of them, and gets no hidden states."""

    holds = False
    """Does it keep something of every row that it observes until it is asked? Sequences for which it does not pay are then left
    out of what it observes while many run; it is told to ``release`` them, and may begin with one in the middle.
    """

    draws: Siblings | None = None
    """How it draws the children of a node at random, above temperature 0, to say from which laws (``Draft.q``); None: what it
    drafts is a function of what it has seen."""

    prediction: str | None = None
    """Source of its nodes that come from a request's predicted text; None where it makes no use of that."""

    def unread(self, sequence: Sequence) -> int:
        """Rows of a sequence that ``read`` would take in."""
        return 0

    def read(self, sequences: Many[Sequence]) -> None:  # noqa: B027
        """Take in text of sequences that is new, where it is long (a prompt). Called before ``propose`` with those of its
        sequences of which something is unread: what this takes comes once, and is not counted as the price of asking."""

    def weigh(self, token: float, row: float) -> None:  # noqa: B027
        """Told before ``propose``: the seconds that a token saves if it is accepted, and those that a verified row costs. A
        drafter that takes time for every further token can stop where that does not pay."""

    @abstractmethod
    def propose(self, sequences: Many[Sequence], budgets: Many[int]) -> list[Draft]:
        """One draft per sequence, of at most ``budgets[i]`` nodes; an empty draft where there is nothing to say."""

    def observe(self, step: Step, forward: Forward, verdicts: Many[Verdict | None]) -> None:  # noqa: B027
        """Learn from a finished pass. ``forward.rows[i]`` are the logits rows of span i: its pending token, then each node."""

    def release(self, sequence: Sequence) -> None:  # noqa: B027
        """Forget a sequence that ended, or that it no longer observes; may be called for one never seen."""

    def clear(self) -> None:  # noqa: B027
        """Forget everything, also what was learned from past requests; only between requests."""

    @property
    def n_bytes(self) -> int:
        """Memory held, roughly."""
        return 0
