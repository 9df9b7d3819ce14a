"""What a pass costs by its number of rows: v(M).

How many drafted rows are worth their time depends on nothing else as much, and it differs widely: a GPU runs 64 rows for
the price of one, a CPU that is short of arithmetic pays for every row.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping

_RATE = 1 / 16
"""Weight of a new pass in the common factor."""

_STRIDE = 1.25
"""Most that one pass may differ from what is expected of it, up or down, in its effect on the factor."""


class Costs:
    """Seconds of a pass by its number of rows: straight lines between measured points, the last one going on.

    A common factor follows the passes that really ran: a busy machine or a long context makes all of them slower, and
    drafting does not become dearer with them.
    """

    def __init__(self, seconds: Mapping[int, float], *, fixed: bool = False) -> None:
        """``seconds`` by rows; a point below an earlier one is noise and is lifted to it. ``fixed``: follow nothing."""
        if not seconds or any(rows < 1 or not s > 0 for rows, s in seconds.items()):
            raise ValueError(f"costs need seconds > 0 for at least one number of rows >= 1, got {dict(seconds)}")
        self.points: dict[int, float] = {}
        for rows, s in sorted(seconds.items()):
            self.points[rows] = max(s, max(self.points.values(), default=0.0))
        self.factor = 1.0
        self._fixed = fixed
        self._rows = list(self.points)
        self._table = [self._interpolate(rows) for rows in range(1, self._rows[-1] + 1)]
        self._slope = 0.0
        if len(self._rows) > 1:
            a, b = self._rows[-2:]
            self._slope = (self.points[b] - self.points[a]) / (b - a)

    def _interpolate(self, rows: int) -> float:
        at = bisect_left(self._rows, rows)
        b = self._rows[at]
        if at == 0:
            return self.points[b]
        a = self._rows[at - 1]
        return self.points[a] + (self.points[b] - self.points[a]) * (rows - a) / (b - a)

    def seconds(self, rows: int) -> float:
        """Expected seconds of a pass of ``rows`` >= 1 rows."""
        over = rows - len(self._table)
        return self.factor * (self._table[rows - 1] if over <= 0 else self._table[-1] + over * self._slope)

    def rows(self, seconds: float) -> int:
        """The most rows whose pass is expected to take no longer than this; 0 where one row does."""
        seconds /= self.factor
        if seconds < self._table[-1]:
            return bisect_right(self._table, seconds)
        # Beyond the measurements the last line goes on; where it is level, a million rows stand for any number.
        over = (seconds - self._table[-1]) / self._slope if self._slope > 0 else 1e6
        return len(self._table) + int(min(over, 1e6))

    def follow(self, rows: int, seconds: float) -> None:
        """Take note of a pass that ran; one far slower or faster than expected counts as a little slower or faster."""
        if rows <= len(self._table) and not self._fixed:  # beyond lies no measurement to compare with
            ratio = min(_STRIDE, max(1 / _STRIDE, seconds / self.seconds(rows)))
            self.factor *= ratio**_RATE

    def relative(self) -> dict[int, float]:
        """v(M) at the measured points: cost of an M-row pass over that of the smallest one."""
        base = next(iter(self.points.values()))
        return {rows: s / base for rows, s in self.points.items()}
