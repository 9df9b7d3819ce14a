"""Row invariance by width: are a row's logits the same bits whether it runs alone or among so many others?

The start-up self-test asks this once; here every width that the engine can meet is tried, in the two forms in which rows
share a pass: bursts of several sequences side by side, and a prompt read in one piece. The reference is the same text read one
row at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.audit.report import Check
from specdec.config import BLOCK_SIZE, EngineConfig
from specdec.kernels.base import Kernels
from specdec.kv.blocks import blocks_for
from specdec.models.base import Model
from specdec.runner.invariance import Invariance, check_invariance
from specdec.runner.probe import Probe, probe_text
from specdec.tree import chain
from specdec.types import Draft, Span

PREFIX = 13
"""Committed tokens before a burst, so that it crosses the border of a block."""

BURST = 17
"""Rows of a burst, at most; a wider pass has several."""


@dataclass(frozen=True, slots=True)
class Width:
    """What became of the rows of a pass of this width."""

    rows: int
    form: str
    compared: int
    """Rows whose logits were compared with those of the same row alone."""
    differing: int
    largest: float
    """Largest difference of a logit."""


def widths(config: EngineConfig, context: int) -> list[int]:
    """The numbers of rows to try: small ones, borders of vectors and tiles, and the widest that the engine may run."""
    burst = 1 + config.speculation.max_nodes
    widest = max(config.max_sequences * burst, config.prefill_rows)
    tried = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, burst, config.prefill_rows, widest}
    return sorted(n for n in tried if n <= min(widest, max(BURST, context - PREFIX) * config.max_sequences))


def check_rows(model: Model, kernels: Kernels, config: EngineConfig, enough: Callable[[float], bool]) -> Iterator[Check]:
    """The self-test, then each width, narrow ones first.

    Args:
        enough: is the time for this up? Widths that are then still to come are left out, and told so.
    """
    started = time.perf_counter()
    found = check_invariance(model, kernels)
    yield _self_test(found, time.perf_counter() - started)
    wanted = widths(config, model.shape.context)
    reference = _Reference(model, kernels, max(wanted))
    for rows in wanted:
        if enough(0.0):
            left = [n for n in wanted if n >= rows]
            yield Check("rows", f"{left[0]} to {left[-1]} rows", "left out", f"no time was left for {len(left)} widths")
            return
        started = time.perf_counter()
        yield _told(rows, reference.widths(rows), time.perf_counter() - started)


def _self_test(found: Invariance, seconds: float) -> Check:
    details = {"differences": found.differences}
    return Check("rows", "self-test", "passed" if found.exact else "failed", found.describe(), seconds, details)


def _told(rows: int, forms: list[Width], seconds: float) -> Check:
    differing = sum(form.differing for form in forms)
    compared = sum(form.compared for form in forms)
    largest = max(form.largest for form in forms)
    summary = (
        f"{compared} rows bitwise equal to the same rows alone"
        if not differing
        else f"{differing} of {compared} rows differ from the same rows alone, by up to {largest:.1e}"
    )
    details = {
        "rows": rows,
        "forms": [{"form": f.form, "compared": f.compared, "differing": f.differing, "largest": f.largest} for f in forms],
    }
    return Check("rows", f"{rows} rows", "failed" if differing else "passed", summary, seconds, details)


class _Reference:
    """A text, and the logits of its rows when each of them runs alone."""

    def __init__(self, model: Model, kernels: Kernels, widest: int) -> None:
        self._room = blocks_for(PREFIX + BURST) * BLOCK_SIZE
        n = min(max(PREFIX + BURST, widest), model.shape.context - 1)
        self._text = probe_text(n, model.shape.vocab_size)
        beside = max(-(-widest // BURST) * self._room, blocks_for(n) * BLOCK_SIZE)
        self._probe = Probe(model, kernels, blocks_for(n) * BLOCK_SIZE + beside)
        self._rows: list[Tensor] = []
        """[V] by position, as far as they have been needed."""
        self._alone = self._probe.sequence([], len(self._text))

    def rows(self, start: int, stop: int) -> Tensor:
        """[stop - start, V] logits of these rows, each computed alone."""
        for i in range(len(self._rows), stop):
            self._alone.tokens.append(self._text[i])
            (row,) = self._probe.run(Span(self._alone, i, i + 1))
            self._rows.append(row[-1].clone())
        return torch.stack(self._rows[start:stop])

    def widths(self, rows: int) -> list[Width]:
        forms = [self._bursts(rows)]
        if 1 < rows <= len(self._text):
            forms.append(self._prompt(rows))
        return forms

    def _bursts(self, rows: int) -> Width:
        """So many rows in bursts of several sequences with the same text, each in blocks of its own."""
        sizes = [BURST] * (rows // BURST) + [rows % BURST] * (rows % BURST > 0)
        sizes = [min(size, len(self._text) - PREFIX) for size in sizes]
        sequences = [self._probe.sequence(self._text[: PREFIX + 1], self._room) for _ in sizes]
        for sequence in sequences:
            self._probe.run(Span(sequence, 0, PREFIX))
        drafts = [chain(self._text[PREFIX + 1 : PREFIX + size]) for size in sizes]
        spans = [
            Span(sequence, PREFIX, PREFIX + 1, Draft(tree, ("audit",) * len(tree)))
            for sequence, tree in zip(sequences, drafts, strict=True)
        ]
        found = self._probe.run(*spans)
        for sequence in sequences:
            sequence.table.truncate(0)
        return _compared(sum(sizes), "bursts", found, [self.rows(PREFIX, PREFIX + size) for size in sizes])

    def _prompt(self, rows: int) -> Width:
        found = self._probe.read_all(self._text[:rows])
        return _compared(rows, "prompt", [found], [self.rows(0, rows)])


def _compared(rows: int, form: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> Width:
    differing, largest = 0, 0.0
    for ours, alone in zip(found, expected, strict=True):
        wrong = (ours != alone).any(-1)
        differing += int(wrong.sum())
        if wrong.any():
            largest = max(largest, float((ours - alone).abs().max()))
    return Width(rows, form, sum(len(ours) for ours in found), differing, largest)
