"""From a step to the flat tensors of one pass.

The pending token and the nodes of a draft are rows like any other. A row's slot is its place in the sequence's block
table: committed tokens lie at their position, node i of a draft at the slot that follows them, plus i. What a row sees is
a list of slots in order of position, so the model and the attention need not know why a row exists.
"""

from __future__ import annotations

import torch

from specdec.kernels.base import Rows
from specdec.models.base import Batch
from specdec.tree import ancestors
from specdec.types import Step


def pack(step: Step, device: torch.device) -> tuple[Batch, tuple[slice, ...], tuple[slice, ...]]:
    """Flatten a step.

    Returns:
        The batch, and for each span its rows among the wanted ones: those to verify, and those that score its prompt.
    """
    tokens: list[int] = []
    positions: list[int] = []
    lengths: list[int] = []
    owner: list[int] = []
    slot: list[int] = []
    prefix: list[int] = []
    path: list[list[int]] = []
    wanted: list[int] = []
    verified: list[slice] = []
    scoring: list[slice] = []

    for index, span in enumerate(step):
        sequence, start, stop = span.sequence, span.start, span.stop
        sequence.table.check_writable(start, stop + len(span.draft))
        scored = len(wanted)
        wanted += [len(tokens) + position - 1 - start for position in span.scored]
        first = len(wanted)
        if span.complete:
            wanted += range(len(tokens) + stop - 1 - start, len(tokens) + span.n_rows)
        scoring.append(slice(scored, first))
        verified.append(slice(first, len(wanted)))

        tokens += sequence.tokens[start:stop]
        positions += range(start, stop)
        slot += range(start, stop)
        prefix += range(start + 1, stop + 1)
        path += [[]] * (stop - start)
        tokens += span.draft.tree.tokens
        for node, nodes in enumerate(ancestors(span.draft.tree)):
            positions.append(stop + len(nodes) - 1)
            slot.append(stop + node)
            in_line = node == len(nodes) - 1  # its ancestors are all the nodes before it
            prefix.append(stop + len(nodes) if in_line else stop)
            path.append([] if in_line else [stop + ancestor for ancestor in nodes])
        lengths += [max(sequence.n_prompt, position + 1) for position in positions[len(lengths) :]]
        owner += [index] * span.n_rows

    width = max(map(len, path))
    longest_table = max(len(span.sequence.table.blocks) for span in step)
    tables = [blocks + [0] * (longest_table - len(blocks)) for blocks in (span.sequence.table.blocks for span in step)]
    int32, int64 = torch.int32, torch.int64
    batch = Batch(
        tokens=torch.tensor(tokens, dtype=int64, device=device),
        positions=torch.tensor(positions, dtype=int64, device=device),
        lengths=torch.tensor(lengths, dtype=int64, device=device),
        rows=Rows(
            tables=torch.tensor(tables, dtype=int32, device=device),
            sequence=torch.tensor(owner, dtype=int32, device=device),
            slot=torch.tensor(slot, dtype=int32, device=device),
            prefix=torch.tensor(prefix, dtype=int32, device=device),
            path=torch.tensor([p + [-1] * (width - len(p)) for p in path], dtype=int32, device=device).reshape(
                len(path), width
            ),
            n_path=torch.tensor([len(p) for p in path], dtype=int32, device=device),
        ),
        wanted=torch.tensor(wanted, dtype=int64, device=device),
    )
    return batch, tuple(verified), tuple(scoring)
