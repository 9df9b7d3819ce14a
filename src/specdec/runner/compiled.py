"""Small passes on an accelerator, recorded once and replayed: what a step costs is then the device's time, not Python's.

A recorded pass (a CUDA graph) launches the same work on the same addresses each time. So its rows are padded to one of a few
numbers, its inputs are written into tensors that stay where they are, and its block tables have one of a few widths. Padding
rows have no slot: they write nothing and see nothing, and since rows are independent of their company, the others do not
notice them. Longer passes, which are prompts, are launched kernel by kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.attention.base import Attention
from specdec.kernels.base import Rows
from specdec.models.base import Batch, Model, Result
from specdec.runner.pack import Lines
from specdec.runner.runner import Runner

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of recorded passes."""

LEAST_WIDTH = 32
"""Blocks of a recorded pass's tables: this or a power of two above it."""

Record = Callable[[Callable[[], Result]], tuple[Callable[[], None], Result]]
"""Runs and records a pass; gives what repeats it, and the tensors in which each repetition leaves its result."""


def make_runner(model: Model, attention: Attention, taps: Collection[int] = ()) -> Runner:
    """The runner that fits a model: recorded passes where they can be."""
    if model.capturable and model.device.type == "cuda":
        return RecordedRunner(model, attention, taps, CudaGraphs())
    return Runner(model, attention, taps)


class CudaGraphs:
    """Records passes as CUDA graphs that share their working memory: one runs at a time, and its result is copied at once."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()  # kernels are compiled and libraries set up, which cannot be recorded
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            result = work()
        return graph.replay, result


class RecordedRunner(Runner):
    """Replays passes of at most 64 rows."""

    def __init__(self, model: Model, attention: Attention, taps: Collection[int], record: Record) -> None:
        super().__init__(model, attention, taps)
        self._record = record
        self._passes: dict[tuple[int, int], _Pass] = {}

    @torch.inference_mode()
    def run(self, lines: Lines) -> Result:
        if len(lines) > ROWS[-1]:
            return super().run(lines)
        batch = Batch.of(lines.pack(), torch.device("cpu"))
        recorded = self._pass(len(lines), batch.rows.tables.shape[1])
        recorded.fill(batch)
        if recorded.replay is None:
            recorded.replay, recorded.result = self._record(
                lambda: self.model.forward(recorded.device.batch, self._attention, self._taps)
            )
        recorded.replay()
        logits, taps = recorded.result
        return logits[: len(batch.wanted)], {layer: x[: len(lines)].clone() for layer, x in taps.items()}

    def _pass(self, n_rows: int, width: int) -> _Pass:
        key = next(n for n in ROWS if n >= n_rows), max(LEAST_WIDTH, 1 << (width - 1).bit_length())
        if key not in self._passes:
            self._passes[key] = _Pass(*key, self.model.device)
        return self._passes[key]


class _Pass:
    """The tensors of a recorded pass, and what repeats it."""

    def __init__(self, n_rows: int, width: int, device: torch.device) -> None:
        self.host = _Inputs.make(n_rows, width, torch.device("cpu"), pinned=device.type == "cuda")
        self.device = _Inputs.make(n_rows, width, device)
        self.replay: Callable[[], None] | None = None
        self.result: Result = torch.empty(0), {}

    def fill(self, batch: Batch) -> None:
        """Write a pass's inputs, all rows past them being padding."""
        self.host.fill(batch)
        self.device.buffer.copy_(self.host.buffer)  # waits: the buffer is written again for the next pass


@dataclass(frozen=True, slots=True)
class _Inputs:
    """A batch whose tensors are views of one buffer, so that one copy moves them all."""

    buffer: Tensor
    """uint8"""
    batch: Batch

    @classmethod
    def make(cls, n: int, width: int, device: torch.device, *, pinned: bool = False) -> _Inputs:
        """n rows, each of which may be a sequence with ``width`` blocks; every row may be wanted and lie on a path of n."""
        shapes = [(n,)] * 4, [(n, width), (n,), (n,), (n,), (n, n), (n,)]  # int64, then int32
        sizes = [8 * math.prod(shape) for shape in shapes[0]] + [4 * math.prod(shape) for shape in shapes[1]]
        buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=device, pin_memory=pinned)
        pieces = iter(torch.split(buffer, sizes))
        tokens, positions, lengths, wanted = (next(pieces).view(torch.int64) for _ in shapes[0])
        rows = Rows(*(next(pieces).view(torch.int32).view(shape) for shape in shapes[1]))
        return cls(buffer, Batch(tokens, positions, lengths, rows, wanted))

    def fill(self, batch: Batch) -> None:
        self.buffer.zero_()
        mine, its, n = self.batch, batch, len(batch.tokens)
        mine.tokens[:n], mine.positions[:n], mine.lengths[:n] = its.tokens, its.positions, its.lengths
        mine.wanted[: len(its.wanted)] = its.wanted
        mine.rows.slot[n:] = -1
        mine.rows.tables[: len(its.rows.tables), : its.rows.tables.shape[1]] = its.rows.tables
        mine.rows.path[:n, : its.rows.path.shape[1]] = its.rows.path
        for name in ("sequence", "slot", "prefix", "n_path"):
            getattr(mine.rows, name)[:n] = getattr(its.rows, name)
