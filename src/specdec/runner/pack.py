"""From a step to the flat rows of one pass.

The pending token and the nodes of a draft are rows like any other. A row's slot is its place in the sequence's block
table: committed tokens lie at their position, node i of a draft at the slot that follows them, plus i. What a row sees is
a list of slots in order of position, so the model and the attention need not know why a row exists.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Many

from specdec.kernels.base import PlainRows
from specdec.tree import ancestors
from specdec.types import Sequence, Step


class Lines:
    """The rows of a pass while they are gathered: plain lists with an entry for each row."""

    def __init__(self) -> None:
        self.tables: list[list[int]] = []
        """Block tables, one for each sequence."""
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.lengths: list[int] = []
        self.owner: list[int] = []
        """Which of the tables is the row's."""
        self.slot: list[int] = []
        self.prefix: list[int] = []
        self.path: list[list[int]] = []
        self.wanted: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def begin(self, sequence: Sequence) -> None:
        """What follows, until the next call, are rows of this sequence; some must."""
        self._sequence = sequence
        self.tables.append(sequence.table.blocks)

    def committed(self, start: int, stop: int) -> None:
        """Rows of committed tokens [start, stop)."""
        self.tokens += self._sequence.tokens[start:stop]
        self.positions += range(start, stop)
        self.slot += range(start, stop)
        self.prefix += range(start + 1, stop + 1)
        self.path += [[]] * (stop - start)
        self._done()

    def drafted(self, tokens: Iterable[int], paths: Iterable[Many[int]]) -> None:
        """Rows of drafted tokens.

        Args:
            paths: the slots that each sees past the committed tokens, root first: its ancestors' and the one that it goes to.
        """
        stop = len(self._sequence.tokens)
        self.tokens += tokens
        for path in paths:
            n, last = len(path), path[-1]
            self.positions.append(stop + n - 1)
            self.slot.append(last)
            in_line = last == stop + n - 1  # slots only grow along a path: these are all that follow the committed ones
            self.prefix.append(stop + n if in_line else stop)
            self.path.append([] if in_line else [*path])
        self._done()

    def _done(self) -> None:
        new = self.positions[len(self.lengths) :]
        self.lengths += [max(self._sequence.n_prompt, position + 1) for position in new]
        self.owner += [len(self.tables) - 1] * len(new)

    def pack(self) -> PlainRows:
        """The same, one after the other."""
        n_path, longest_table = list(map(len, self.path)), max(map(len, self.tables))
        entries = self.owner + self.slot + self.prefix + n_path
        for blocks in self.tables:
            entries += blocks
            entries += [0] * (longest_table - len(blocks))
        width = max(n_path)
        if width:
            for path in self.path:
                entries += path
                entries += [-1] * (width - len(path))
        return PlainRows(
            array("q", self.tokens + self.positions + self.lengths + self.wanted),
            array("i", entries),
            n_rows=len(self.tokens),
            n_wanted=len(self.wanted),
            n_tables=len(self.tables),
            table_width=longest_table,
            path_width=width,
            longest=max(self.lengths),
        )


def lay_out(step: Step) -> tuple[Lines, tuple[slice, ...], tuple[slice, ...]]:
    """The rows of a step.

    Returns:
        The lines, and for each span its rows among the wanted ones: those to verify, and those that score its prompt.
    """
    lines = Lines()
    verified: list[slice] = []
    scoring: list[slice] = []
    for span in step.spans:
        sequence, start, stop, tree = span.sequence, span.start, span.stop, span.draft.tree
        sequence.table.check_writable(start, stop + len(tree))
        first_row, scored = len(lines), len(lines.wanted)
        lines.wanted += [first_row + position - 1 - start for position in span.scored]
        first = len(lines.wanted)
        if span.complete:
            lines.wanted += range(first_row + stop - 1 - start, first_row + span.n_rows)
        scoring.append(slice(scored, first))
        verified.append(slice(first, len(lines.wanted)))
        lines.begin(sequence)
        lines.committed(start, stop)
        if tree.tokens:
            lines.drafted(tree.tokens, [[stop + node for node in nodes] for nodes in ancestors(tree)])
    return lines, tuple(verified), tuple(scoring)
