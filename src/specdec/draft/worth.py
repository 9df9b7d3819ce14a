"""What a token and a row are worth: seconds, by what passes cost and by what else runs in them."""

from __future__ import annotations

from specdec.draft.gates import blend
from specdec.runner.cost import Costs
from specdec.types import Step

_RIDING_MEMORY = 32
"""Passes over which it is seen how many read prompts."""

_MOST_RIDING = 0.9
"""Of the time of a pass, as much is at most put down to prompts. A stream's own pace is worth something, too: where rows cost
next to nothing, drafts that cost no others' time are still verified."""


class Worth:
    """Prices of tokens and rows. ``costs`` are those of a pass; whoever runs passes lets them follow."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.host = 0.0
        """Seconds of a step beside its pass and its drafting, running mean."""
        self._riding = 0.0
        """Share of the passes with decoding sequences that read prompts too, running mean."""

    def ran(self, step: Step) -> None:
        """Take note of a pass that ran."""
        widths = {span.stop - span.start for span in step.spans}
        if 1 in widths:
            self._riding += (float(len(widths) > 1) - self._riding) / _RIDING_MEMORY

    def follow(self, host: float) -> None:
        """Take note of the seconds of a step beside its pass and its drafting."""
        self.host = blend(self.host, host)

    def row(self, n: int, rows: int) -> float:
        """Seconds of a row among the first few that are added to a pass of so many rows for n sequences."""
        few = 2 * max(1, n)
        return (self._costs.seconds(rows + few) - self._costs.seconds(rows)) / few

    def token(self, n: int, rows: int) -> float:
        """Seconds that a token takes in plain decoding of n sequences.

        Where passes read prompts anyway a token costs its row, and fewer passes would not help: weights are read for the
        prompts. A server under load is always there, so its drafts must pay by rows alone.
        """
        n = max(1, n)
        alone = self._costs.seconds(n)
        rows_alone = min(alone, n * self.row(n, rows))
        return (self.host + rows_alone + (1 - _MOST_RIDING * self._riding) * (alone - rows_alone)) / n
