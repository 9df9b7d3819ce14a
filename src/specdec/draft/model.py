"""Drafting with a smaller language model of the same vocabulary (Leviathan, Kalman, Matias, arXiv 2211.17192).

The draft model keeps keys and values in a pool of its own under the target's block numbers, the row of a token in the slot
that the target has for it: what becomes of a sequence's blocks becomes of its rows here, and there is nothing to roll back.
Committed tokens are *read*: a prompt beside the target, chunk by chunk, and otherwise those that are missing when a draft is
asked for. So the token that the target chose itself is read before the next draft, and with it the last one of a path that
was accepted whole, which no draft had a use for. Drafted rows lie in the slots behind, which were reserved for the target's;
those that turn out to be committed close up, in the order of the text, before the next draft.

At a temperature above 0 candidates are ranked with the target's own noise, so that a draft model with the target's law drafts
the target's very tokens; or they are drawn, where drafts are judged by chance.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec import attention
from specdec.config import BLOCK_SIZE, SpeculationConfig
from specdec.draft.base import Drafter, Target
from specdec.draft.contents import Contents
from specdec.draft.drawing import Drawing, Drawings, add_children
from specdec.draft.expand import Growth
from specdec.kernels.base import WIDTH
from specdec.kv.pool import Pool
from specdec.models.decoder import Decoder
from specdec.runner.compiled import make_runner
from specdec.runner.pack import Lines
from specdec.runner.runner import to_host
from specdec.types import ROOT, Draft, Forward, Sequence, Siblings, Step, Verdict

READ_ROWS = 128
"""Most rows of a pass that reads committed tokens."""


@dataclass(slots=True)
class _Text:
    """Committed tokens [start, stop) to read."""

    sequence: Sequence
    start: int
    stop: int


@dataclass(slots=True)
class _Asked:
    """A sequence that a draft is made for."""

    sequence: Sequence
    stop: int
    """Its committed tokens, the pending one included."""
    depth: int
    budget: int
    growth: Growth | Drawing
    blocks: list[int]
    """Its table as it was, since the sequence may have given blocks up when the draft's rows are looked at again."""
    paths: dict[int, list[int]] = field(default_factory=dict)
    """Node that was fed -> slots of the nodes from the root's child down to it."""


class ModelDrafter(Drafter):
    """Drafts the best nodes of a tree that a draft model spans, a depth at a time, for all sequences in the same passes.

    Nothing is drafted for a text that the draft model cannot read: one longer than its context, or with a token past the end
    of its embedding.

    Args:
        model: the draft model, with the target's vocabulary (``models.vocabulary`` compares tokenizers). Where one of the two
            has more tokens than the other, these are padding, and are not drafted.
        target: the model that it drafts for.
        config: the ``trained_`` settings.
        name: what its nodes are called.
        vocabulary: int64 [n], the tokens that are drafted; None for all (FR-Spec, Zhao et al., arXiv 2502.14856). The output
            matrix is most of what a small draft model computes.
        draws: how siblings are drawn; None: candidates are ranked.
    """

    def __init__(
        self,
        model: Decoder,
        target: Target,
        config: SpeculationConfig,
        name: str,
        vocabulary: Tensor | None = None,
        draws: Siblings | None = None,
    ) -> None:
        shape = model.shape
        if vocabulary is not None:
            model = model.with_outputs(vocabulary)
        self.name = name
        self._model = model
        self._pool = Pool(shape.n_layers, target.n_blocks, shape.n_kv_heads, shape.head_dim, model.kv_dtype, model.device)
        self._runner = make_runner(model, attention.select(self._pool, target.kernels))
        self._contents = Contents(target.n_blocks)
        self._drafted: dict[int, _Asked] = {}
        """Drafts of which rows may have become committed ones, by sequence."""
        self._vocab_size = min(shape.vocab_size, target.model.shape.vocab_size)
        self._kernels = target.kernels
        self._depth, self._nodes = config.trained_depth, config.trained_nodes
        self._vocabulary = None if vocabulary is None else vocabulary.cpu().numpy()
        self._n_outputs = self._vocab_size if vocabulary is None else len(vocabulary)
        self._width, self._children = config.trained_width, min(config.trained_width, self._n_outputs, WIDTH)
        self._least = config.trained_min_probability
        self.draws = draws
        self._drawings = Drawings(draws, config, target.model.shape.vocab_size, self._vocabulary)

    def unread(self, sequence: Sequence) -> int:
        text = self._missing(sequence, len(sequence.tokens) - 1)
        n_rows = text.stop - text.start
        return n_rows if n_rows > BLOCK_SIZE else 0

    def read(self, sequences: Many[Sequence]) -> None:
        self._settle()
        self._read([self._missing(sequence, len(sequence.tokens) - 1) for sequence in sequences])

    def propose(self, sequences: Many[Sequence], budgets: Many[int]) -> list[Draft]:
        self._settle()
        drafts = [Draft()] * len(sequences)
        asked: dict[int, _Asked] = {}
        texts: list[_Text] = []
        for i, (sequence, budget) in enumerate(zip(sequences, budgets, strict=True)):
            stop = len(sequence.tokens)
            text = self._missing(sequence, stop)
            if budget <= 0 or text.stop < stop:
                continue
            depth = min(self._depth, self._model.shape.context + 1 - stop)
            growth = self._drawings.start(sequence, budget) or Growth(
                self._width, min(budget, self._nodes), self._least, sequence.end_tokens
            )
            asked[i] = _Asked(sequence, stop, depth, budget, growth, list(sequence.table.blocks))
            texts.append(_Text(sequence, min(text.start, stop - 1), stop))  # the pending token's row gives the first children
        if (logits := self._read(texts)) is not None:
            self._grow(list(asked.values()), logits)
        for i, one in asked.items():
            self._drafted[one.sequence.id] = one
            drafts[i] = one.growth.draft(self.name)
        return drafts

    def observe(self, step: Step, forward: Forward, verdicts: Many[Verdict | None]) -> None:
        """Read what the target has just read of prompts that go on, so that a long one keeps nobody waiting at its end."""
        spans = [span for span, verdict in zip(step, verdicts, strict=True) if verdict is None]
        if spans:
            self._settle()
            self._read([self._missing(span.sequence, span.stop) for span in spans])

    def release(self, sequence: Sequence) -> None:
        self._drafted.pop(sequence.id, None)
        self._contents.release(sequence)

    def clear(self) -> None:
        self._drafted = {}
        self._contents = Contents(self._pool.n_blocks)

    @property
    def n_bytes(self) -> int:
        """Of the draft model and of its keys and values, an output matrix of fewer tokens counted beside the whole one."""
        return self._model.n_bytes + self._pool.n_bytes

    def _settle(self) -> None:
        """Make drafted rows committed ones where their tokens were committed; nobody has written to the pool in between."""
        for one in self._drafted.values():
            growth = one.growth
            nodes = {(parent, token): i for i, (parent, token) in enumerate(zip(growth.parents, growth.tokens, strict=True))}
            node, slots = ROOT, list[int]()
            for token in one.sequence.tokens[one.stop :]:
                node = nodes.get((node, token), ROOT)
                if node not in one.paths:
                    break
                slots = one.paths[node]
            if slots:
                stop = one.stop + len(slots)
                self._pool.move(one.blocks, slots, range(one.stop, stop))
                self._contents.write(one.sequence, one.blocks, one.stop, stop, stop)
        self._drafted = {}

    def _missing(self, sequence: Sequence, stop: int) -> _Text:
        """What is still to be read of the first ``stop`` tokens, as far as the draft model can."""
        start = min(self._contents.rows(sequence), stop)
        stop = min(stop, max(start, self._model.shape.context))
        size = self._model.shape.vocab_size
        return _Text(sequence, start, next((i for i in range(start, stop) if sequence.tokens[i] >= size), stop))

    def _read(self, texts: list[_Text]) -> Tensor | None:
        """Feed committed tokens, a bounded number of rows at a time.

        Returns:
            [n, V] the logits after the last token of each text, where that is the pending one; None where there is none.
        """
        rows: list[Tensor] = []
        while texts := [text for text in texts if text.start < text.stop]:
            lines, ends = Lines(), list[int]()
            for text in texts:
                if len(lines) == READ_ROWS:
                    break
                end = min(text.stop, text.start + READ_ROWS - len(lines))
                lines.begin(text.sequence)
                lines.committed(text.start, end)
                if end == len(text.sequence.tokens):
                    lines.wanted.append(len(lines) - 1)
                self._contents.write(text.sequence, text.sequence.table.blocks, text.start, text.start, end)
                ends.append(end)
            logits, _ = self._runner.run(lines)
            for text, end in zip(texts, ends, strict=False):
                self._contents.write(text.sequence, text.sequence.table.blocks, text.start, end, end)
                text.start = end
            if lines.wanted:
                rows.append(to_host(logits))
        return torch.cat(rows) if rows else None

    def _grow(self, asked: list[_Asked], logits: Tensor) -> None:
        """Grow one tree for each sequence, from the logits [n, V] of their pending tokens."""
        leaves = [(one, ROOT) for one in asked]
        for depth in range(1, self._depth + 1):
            self._add_children(leaves, depth, logits)
            lines = Lines()
            leaves = []
            for one in asked:
                nodes = one.growth.next()[: one.budget - len(one.paths)] if depth < one.depth else []
                if not nodes:
                    continue
                for node in nodes:
                    one.paths[node] = [*one.paths.get(one.growth.parents[node], ()), one.stop + len(one.paths)]
                    leaves.append((one, node))
                lines.begin(one.sequence)
                lines.drafted([one.growth.tokens[node] for node in nodes], [one.paths[node] for node in nodes])
                self._contents.write(one.sequence, one.blocks, one.stop, one.stop, one.stop + len(one.paths))
            if not leaves:
                return
            lines.wanted = list(range(len(lines)))
            logits = to_host(self._runner.run(lines)[0])

    def _add_children(self, leaves: list[tuple[_Asked, int]], depth: int, logits: Tensor) -> None:
        """Give every leaf its children, which are of the given depth; logits [leaves, V]."""
        add_children(
            [(one.growth, node, one.sequence, one.stop - 1 + depth) for one, node in leaves],
            logits[:, : self._n_outputs].contiguous(),
            self._children,
            self._kernels,
            self._vocabulary,
        )
