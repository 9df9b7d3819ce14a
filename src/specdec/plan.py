"""The arithmetic of speculation: what a pass emits, what it costs, and when drafting pays. Pure functions over numbers.

*Acceptance* is α by depth: how often the drafted token of depth d is right where those before it were. A pass over a chain of
k drafted tokens emits the target's own token and, on average, the chance of each drafted one: τ = 1 + α₁ + α₁α₂ + … With one
α for all depths that is (1 - α^(k+1)) / (1 - α), and with free rows the speed-up is τ / (kc + 1) (Leviathan, Kalman, Matias,
arXiv 2211.17192). Rows are not free on every machine, so a pass of M rows costs v(M) here, and what a step spends beside its
pass is counted too. A *plain step* emits one token for each sequence of the batch and drafts none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Cost = Callable[[int], float]
"""Cost of a pass by its number of rows, in any unit."""


def free(rows: int) -> float:
    """Every pass costs the same, however many rows it has: the textbook's machine."""
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What drafting and verifying cost on a machine; times are in units of the plain step of one sequence.

    Raises:
        ValueError: a price below 0, or a host's share that leaves nothing to the pass.
    """

    draft: float = 0.0
    """c: a pass of the drafter over a pass of the target for as many sequences; it has one for each token of a chain."""
    ask: float = 0.0
    """Drafting for a sequence at all, however far: what drafters that look text up take."""
    host: float = 0.0
    """What a plain step spends on a sequence beside its pass: choosing tokens, bookkeeping."""
    cost: Cost = free

    def __post_init__(self) -> None:
        if min(self.draft, self.ask) < 0 or not 0 <= self.host < 1:
            raise ValueError(
                f"prices need draft >= 0, ask >= 0 and 0 <= host < 1, got {self.draft}, {self.ask} and {self.host}"
            )

    def step(self, depth: int, nodes: int, batch: int = 1) -> float:
        """A step that drafts to a depth and verifies so many nodes for each of ``batch`` sequences; (0, 0) is a plain one."""
        one = self.cost(1)
        passes = self.cost(batch * (1 + nodes)) + depth * self.draft * self.cost(batch)
        return batch * (self.host + (self.ask if depth else 0.0)) + (1 - self.host) * passes / one

    def ratio(self, depth: int, nodes: int, batch: int = 1) -> float:
        """The same over the plain step of as many sequences."""
        return self.step(depth, nodes, batch) / self.step(0, 0, batch)


@dataclass(frozen=True, slots=True)
class Chain:
    """What to expect of drafting so many tokens, one after the other."""

    depth: int
    tokens: float
    """τ: tokens that a pass emits for a sequence."""
    ratio: float
    """Time of a step over that of a plain one."""

    @property
    def speedup(self) -> float:
        return self.tokens / self.ratio


def reach(acceptance: Iterable[float]) -> list[float]:
    """By depth, the chance that the drafted token is emitted: the product of the acceptances down to it.

    Raises:
        ValueError: an acceptance outside [0, 1].
    """
    chances: list[float] = []
    for alpha in acceptance:
        if not 0 <= alpha <= 1:
            raise ValueError(f"acceptance must be in [0, 1], got {alpha}")
        chances.append(alpha * (chances[-1] if chances else 1.0))
    return chances


def chains(acceptance: Sequence[float], prices: Prices, batch: int = 1) -> list[Chain]:
    """Chains of no token, of one, and so on to the last depth whose acceptance is given.

    Args:
        batch: sequences in a pass; all draft the same number of tokens.
    """
    found = [Chain(0, 1.0, 1.0)]
    for depth, chance in enumerate(reach(acceptance), start=1):
        found.append(Chain(depth, found[-1].tokens + chance, prices.ratio(depth, depth, batch)))
    return found


def best(found: Iterable[Chain]) -> Chain:
    """The fastest; the shortest of several."""
    return max(found, key=lambda chain: (chain.speedup, -chain.depth))


def least(prices: Prices, batch: int = 1) -> float:
    """The acceptance from which drafting one token pays; above 1 where none does."""
    return prices.ratio(1, 1, batch) - 1


@dataclass(frozen=True, slots=True)
class Mix:
    """Passes as they ran, some with long drafts and some with none: by depth, shares of all passes.

    A pass whose draft is a tree counts at a depth as often as it has nodes there, so shares of drafted nodes may exceed 1.
    """

    drafted: Sequence[float]
    """Nodes of that depth, per pass."""
    accepted: Sequence[float]
    """Nodes of that depth that were emitted, per pass."""

    @property
    def tokens(self) -> float:
        """τ"""
        return 1.0 + sum(self.accepted)

    def rows(self, cost: Cost) -> float:
        """Mean cost of these passes over that of one row: a draft of k tokens costs one row more than one of k - 1."""
        more = sum(share * (cost(depth + 1) - cost(depth)) for depth, share in enumerate(self.drafted, start=1))
        return 1.0 + more / cost(1)

    def speedup(self, prices: Prices, beside: float) -> float:
        """Expected of these passes, one sequence at a time.

        Args:
            beside: what a step did beside its pass, on average, in plain steps: it takes the place of the prices of drafting.
        """
        return self.tokens / (beside + (1 - prices.host) * self.rows(prices.cost))
