"""The decoder layers of a recurrent head at work: rows in, states out, keys and values in a paged pool of their own."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specdec import attention
from specdec.kernels.base import Kernels, Rows
from specdec.kernels.fused import DecoderWeights, FusedDecoder, LayerWeights
from specdec.kv.pool import Pool
from specdec.models.decoder import Decoder
from specdec.models.heads import RecurrentHead
from specdec.models.layers import Rope, RotaryTable
from specdec.models.packed_heads import PackedEmbedding, PackedLinear, PackedNorm
from specdec.quant.linear import Embedding, Linear
from specdec.types import Sequence


@dataclass(slots=True)
class RowList:
    """Rows of one pass of a module, in plain integers (see ``kernels.base.Rows``)."""

    tokens: list[int] = field(default_factory=list)
    """The token whose embedding a row takes."""
    owners: list[int] = field(default_factory=list)
    """Which of the pass's sequences a row belongs to."""
    slots: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)

    def add(self, token: int, owner: int, slot: int, prefix: int, path: list[int]) -> None:
        self.tokens.append(token)
        self.owners.append(owner)
        self.slots.append(slot)
        self.prefixes.append(prefix)
        self.paths.append(path)

    def add_committed(self, tokens: Many[int], owner: int, first: int) -> None:
        """Rows from ``first`` on, each after all those before it."""
        n = len(tokens)
        self.tokens += tokens
        self.owners += [owner] * n
        self.slots += range(first, first + n)
        self.prefixes += range(first + 1, first + n + 1)
        self.paths += [[]] * n

    def __len__(self) -> int:
        return len(self.tokens)


class Layers:
    """The layers of a head, the output matrix behind them, and the keys and values of their rows.

    Args:
        head: packed, on the model's device.
        output: the output matrix over the head's vocabulary.
        model: whose embedding is used, unless the head has one.
        n_blocks: of the model's pool.
    """

    def __init__(self, head: RecurrentHead, output: Linear, model: Decoder, kernels: Kernels, n_blocks: int) -> None:
        c = self._config = head.config
        self.pool = Pool(c.n_modules, n_blocks, c.n_kv_heads, c.head_dim, model.kv_dtype, model.device)
        # Rows that nobody wrote, before the first of a sequence that was observed, are read: they must be numbers.
        self.pool.keys.zero_()
        self.pool.values.zero_()
        self._head = head
        self._output = output
        self._embedding = head.embedding.embedding if isinstance(head.embedding, PackedEmbedding) else model.embedding
        self._attention = attention.select(self.pool, kernels)
        self._kernels = kernels
        self._device = model.device
        rope = Rope(kind="default", dim=c.head_dim, theta=c.rope_theta, context=model.shape.context)
        self._rotary = RotaryTable(rope, model.device)
        self._scale = c.head_dim**-0.5
        weights = _fusable(head, output, self._embedding) if self._attention.native_pool else None
        self._fused: FusedDecoder | None = kernels.fuse(weights) if weights else None

    def tables(self, sequences: Many[Sequence]) -> Tensor:
        """int32 [S, B] the block tables of the sequences of a pass."""
        longest = max(len(sequence.table.blocks) for sequence in sequences)
        tables = np.zeros((len(sequences), longest), np.int32)
        for row, sequence in zip(tables, sequences, strict=True):
            row[: len(sequence.table.blocks)] = sequence.table.blocks
        return torch.from_numpy(tables).to(self._device)

    def logits(self, states: Tensor, module: int) -> Tensor:
        """States [M, d] that a module gave -> what the head says after each, [M, Vd]."""
        return self._output(self._head.ready(states, module))

    def run(self, module: int, states: Tensor, rows: RowList, tables: Tensor, wanted: Many[int] = ()) -> tuple[Tensor, Tensor]:
        """One pass of a module.

        Args:
            states: [M, d], of what lies before each row.
            tables: as from ``tables``.
            wanted: rows whose logits are wanted, increasing.

        Returns:
            New states [M, d], and logits [wanted, Vd].
        """
        n, width = len(rows), max(map(len, rows.paths))
        n_path = [len(path) for path in rows.paths]
        positions = [prefix + n - 1 for prefix, n in zip(rows.prefixes, n_path, strict=True)]
        wide = torch.from_numpy(np.array([*rows.tokens, *positions, *wanted], np.int64)).to(self._device)
        entries = [*rows.owners, *rows.slots, *rows.prefixes, *n_path]
        if width:
            for path in rows.paths:
                entries += path
                entries += [-1] * (width - len(path))
        narrow = torch.from_numpy(np.array(entries, np.int32)).to(self._device)
        owners, slots, prefixes, n_paths, paths = torch.split(narrow, [n, n, n, n, n * width])
        tokens, places, chosen = torch.split(wide, [n, n, len(wanted)])
        packed = Rows(tables=tables, sequence=owners, slot=slots, prefix=prefixes, path=paths.view(n, width), n_path=n_paths)
        cos, sin, angles = self._rotary.tables(places, places, max(positions) + 1)
        if self._fused:
            keys, values = self.pool.keys, self.pool.values
            logits, new = self._fused(tokens, cos, sin, angles, packed, chosen, keys, values, (0,), states.contiguous())
            return new[0], logits
        cos, sin = cos[angles], sin[angles]
        n_q, n_qk = self._config.n_heads, self._config.n_heads + self._config.n_kv_heads

        def attend(qkv: Tensor) -> Tensor:
            """[M, (H + 2 KV) * hd] -> [M, H * hd]"""
            heads = qkv.view(n, -1, self._config.head_dim)
            self._kernels.rope(heads[:, :n_qk], cos, sin)  # queries and keys lie side by side
            q, k, v = heads[:, :n_q], heads[:, n_q:n_qk], heads[:, n_qk:]
            return self._attention(module, q, k, v, packed, self._scale, 0)

        after: Tensor = self._head(self._embedding(tokens), states, attend, module)
        chosen_states = after if len(wanted) == n else after[chosen]
        return after, self.logits(chosen_states, module) if wanted else chosen_states.new_empty(0, self._output.n)


def _fusable(head: RecurrentHead, output: Linear, embedding: Embedding) -> DecoderWeights | None:
    """What a pass in one native call takes; None where the head is of another kind or not packed for the CPU."""
    c = head.config
    if c.kind != "eagle3" or c.normed_residual:
        return None
    layer, norms = head.layers[0], (head.embedding_norms[0], head.state_norms[0], head.layers[0].ffn_norm, head.norms[0])
    products = [m.linear.matrix() for m in (layer.qkv, layer.out, layer.gate_up, layer.down) if isinstance(m, PackedLinear)]
    qkv, out, gate_up, down, last, table = *products, output.matrix(), embedding.weight.matrix()
    if not (qkv and out and gate_up and down and last and table):
        return None
    embedding_norm, state_norm, ffn_norm, norm = (n.weight for n in norms if isinstance(n, PackedNorm))
    return DecoderWeights(
        layers=[
            LayerWeights(
                attention_norm=state_norm, qkv=qkv, q_norm=None, k_norm=None, out=out, ffn_norm=ffn_norm, gate_up=gate_up,
                down=down, window=0,
            )
        ],
        heads=c.n_heads,
        kv_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        eps=c.rms_eps,
        scale=c.head_dim**-0.5,
        norm=norm,
        head=last,
        embedding=table,
        embedding_norm=embedding_norm,
    )  # fmt: skip
