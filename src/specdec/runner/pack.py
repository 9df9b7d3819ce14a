"""From a step to the flat tensors of one pass.

The pending token and the nodes of a draft are rows like any other. A row's slot is its place in the sequence's block
table: committed tokens lie at their position, node i of a draft at the slot that follows them, plus i. What a row sees is
a list of slots in order of position, so the model and the attention need not know why a row exists.
"""

from __future__ import annotations

import numpy as np
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
    n, s, w = len(tokens), len(tables), len(wanted)
    # One array for each width of integer, and one copy to the device: a tensor made on its own costs as much as all of these.
    wide = torch.from_numpy(np.array(tokens + positions + lengths + wanted, np.int64)).to(device)
    entries: list[int] = owner + slot + prefix + [len(p) for p in path]
    for blocks in tables:
        entries += blocks
    if width:
        for p in path:
            entries += p
            entries += [-1] * (width - len(p))
    small = torch.from_numpy(np.array(entries, np.int32)).to(device)
    wides = torch.split(wide, [n, n, n, w])
    narrows = torch.split(small, [n, n, n, n, s * longest_table, n * width])
    batch = Batch(
        tokens=wides[0],
        positions=wides[1],
        lengths=wides[2],
        rows=Rows(
            sequence=narrows[0],
            slot=narrows[1],
            prefix=narrows[2],
            n_path=narrows[3],
            tables=narrows[4].view(s, longest_table),
            path=narrows[5].view(n, width),
        ),
        wanted=wides[3],
        longest=max(lengths),
    )
    return batch, tuple(verified), tuple(scoring)
