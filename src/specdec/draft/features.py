"""What a drafter that reads hidden states holds of each sequence: the features of committed rows that it has not used yet.

The target's rows come in chunks of a prompt, then as the pending token and the accepted nodes of a draft; what was refused
leaves no trace. The feature of position i can be used once the token at i + 1 is known, which after every pass is so for
all rows that were committed in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.kernels.head_pass import States
from specdec.types import Forward, Sequence, Step, Verdict

Tip = tuple[States, int]
"""A state: where it is, and which of them."""

LOOSE = 512
"""Rows of others that passes may keep in memory for a sequence, if they are no more than its own, before its rows are copied
out of them."""


@dataclass(slots=True)
class Piece:
    """Rows of one pass that belong to one sequence, not yet copied out of it: most are joined to features once, when they
    are used, and those of a drafter that is not asked perhaps never."""

    taps: tuple[Tensor, ...]
    """Per tap [M, d], of all rows of the pass."""
    rows: list[int]
    n_others: int = 0
    """Rows of the pass that are none of these."""

    def join(self) -> Tensor:
        """[n, taps * d]"""
        parts = [tap[self._at] for tap in self.taps]
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

    @classmethod
    def merged(cls, pieces: Many[Piece]) -> Piece:
        """The rows of several, one behind the other, copied out of their passes."""
        taps = tuple(torch.cat([piece.taps[tap][piece._at] for piece in pieces]) for tap in range(len(pieces[0].taps)))
        return cls(taps, list(range(len(taps[0]))))

    @property
    def _at(self) -> slice | list[int]:
        """The rows as an index, which are increasing."""
        first, n = self.rows[0], len(self.rows)
        return slice(first, first + n) if self.rows[-1] == first + n - 1 else self.rows

    def addresses(self) -> list[int]:
        """Of the feature's vectors, row by row and tap by tap.

        Raises:
            ValueError: a tap is not contiguous float32 on the CPU.
        """
        starts: list[int] = []
        for tap in self.taps:
            if tap.dtype is not torch.float32 or not tap.is_contiguous() or not tap.is_cpu:
                raise ValueError(f"hidden states must be contiguous float32 on the CPU, got {tap.dtype} on {tap.device}")
            starts.append(tap.data_ptr())
        width = 4 * self.taps[0].shape[1]
        return [start + width * row for row in self.rows for start in starts]


@dataclass(slots=True)
class Track:
    """The rows of one sequence, numbered by position."""

    first: int
    """Rows before this one were not observed: another sequence may have left them, or nobody."""
    fed: int
    """Rows before this one have been used."""
    held: list[Piece] = field(default_factory=list)
    """The rows from there on."""
    n_held: int = 0
    n_loose: int = 0
    """Rows of others in the passes that these are held with."""
    tips: list[Tip] = field(default_factory=list)
    """What the drafter's modules gave for their last committed row; modules that had no row yet are missing."""

    @property
    def stop(self) -> int:
        """Rows before this one have been observed."""
        return self.fed + self.n_held

    def hold(self, piece: Piece) -> None:
        """Keep the next rows. None is copied twice: what has been copied out of its passes stays where it is."""
        self.held.append(piece)
        self.n_held += len(piece.rows)
        self.n_loose += piece.n_others
        if self.n_loose > max(LOOSE, self.n_held):
            first = next(i for i, one in enumerate(self.held) if one.n_others)
            self.held[first:], self.n_loose = [Piece.merged(self.held[first:])], 0

    def part(self) -> Piece:
        """Give away the last row held."""
        last = self.held.pop()
        self.n_held -= 1
        self.n_loose -= last.n_others
        if len(last.rows) > 1:
            self.held.append(Piece(last.taps, last.rows[:-1], last.n_others + 1))
            self.n_loose += last.n_others + 1
        return Piece(last.taps, last.rows[-1:], last.n_others + len(last.rows) - 1)

    def feed(self) -> None:
        """The rows that were held have been used."""
        self.fed = self.stop
        self.held, self.n_held, self.n_loose = [], 0, 0

    def addresses(self) -> list[int]:
        """Of the vectors that make the features of the rows held, in order."""
        return [address for piece in self.held for address in piece.addresses()]


class Features:
    """Collects the features of committed rows.

    Args:
        taps: layers whose outputs, side by side, are the feature.
        norm: applied to it.
    """

    def __init__(self, taps: Many[int], norm: Callable[[Tensor], Tensor] | None = None) -> None:
        self._taps = tuple(taps)
        self._norm = norm
        self._tracks: dict[int, Track] = {}

    def __len__(self) -> int:
        """Sequences that rows were taken of."""
        return len(self._tracks)

    def collect(self, step: Step, forward: Forward, verdicts: Many[Verdict | None]) -> list[tuple[Sequence, Track]]:
        """Take the committed rows of a pass; called after the commit.

        A sequence whose rows do not follow those seen before starts over: it was preempted and is read again.

        Returns:
            The sequences that rows were taken of.
        """
        taken: list[tuple[Sequence, Track]] = []
        taps = tuple([forward.taps[tap] for tap in self._taps])
        row, n_rows = 0, step.n_rows
        for span, verdict in zip(step, verdicts, strict=True):
            sequence, n = span.sequence, span.n_rows
            nodes = row + span.stop - span.start
            rows = list(range(row, nodes))
            if verdict:
                rows += [nodes + node for node in verdict.path]
            del rows[max(0, sequence.n_cached - span.start) :]  # a sequence may have ended before the end of the path
            row += n
            if not rows:
                continue
            track = self._tracks.get(sequence.id)
            if track is None or track.stop != span.start:
                track = self._tracks[sequence.id] = Track(span.start, span.start)
            track.hold(Piece(taps, rows, n_rows - len(rows)))
            taken.append((sequence, track))
        return taken

    def features(self, tracks: Many[Track]) -> Tensor:
        """Of all rows that tracks hold, one after the other: [N, taps * d]."""
        joined = [piece.join() for track in tracks for piece in track.held]
        features = torch.cat(joined) if len(joined) > 1 else joined[0].contiguous()
        return features if self._norm is None else self._norm(features)

    def ready(self, sequence: Sequence) -> Track | None:
        """The track of a sequence of which every row before the pending token is in the cache and was observed, if any."""
        track, n_cached = self._tracks.get(sequence.id), len(sequence.tokens) - 1
        if track is None or not track.first < track.stop == n_cached == sequence.n_cached:
            return None
        return track

    def release(self, sequence: Sequence) -> None:
        self._tracks.pop(sequence.id, None)

    def clear(self) -> None:
        self._tracks.clear()

    @property
    def n_bytes(self) -> int:
        """Memory of the passes whose rows are held."""
        tracks = self._tracks.values()
        passes = {id(tap): tap.nbytes for track in tracks for piece in track.held for tap in piece.taps}
        tips = {
            id(states): memoryview(states).nbytes if isinstance(states, array) else states.nbytes
            for track in tracks
            for states, _ in track.tips
        }
        return sum(passes.values()) + sum(tips.values())
