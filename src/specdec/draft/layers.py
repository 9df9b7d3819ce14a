"""The decoder layers of a recurrent head at work: rows in, states out, keys and values in a paged pool of their own."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from specdec import attention
from specdec.config import BLOCK_SIZE
from specdec.draft.candidates import Ids, candidates
from specdec.draft.features import Features, Tip, Track
from specdec.kernels.base import Kernels, Rows
from specdec.kernels.fused import DecoderWeights, LayerWeights
from specdec.kernels.head_pass import HeadPass, Inputs, Races, RowList, Said, States
from specdec.kv.pool import Pool
from specdec.models.decoder import Decoder
from specdec.models.heads import RecurrentHead
from specdec.models.layers import Rope, RotaryTable
from specdec.models.packed_heads import PackedEmbedding, PackedLinear, PackedNorm
from specdec.quant.linear import Embedding, Linear
from specdec.types import Sequence

_NOBODY = torch.empty(0, dtype=torch.int64)
Tables = Tensor | list[list[int]]
"""The block tables of a pass: int32 [S, B], or each sequence's blocks."""


class Layers:
    """The layers of a head, the output matrix behind them, and the keys and values of their rows.

    Args:
        head: packed, on the model's device.
        output: the output matrix over the head's vocabulary.
        model: whose embedding is used, unless the head has one.
        n_blocks: of the model's pool.
        names: int64 [Vd] the target's id of each token that the head can draft; None where they are the same.
        best: candidates of a row, at most 32 and Vd.
    """

    def __init__(
        self, head: RecurrentHead, output: Linear, model: Decoder, kernels: Kernels, n_blocks: int, names: Ids | None, best: int
    ) -> None:
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
        self._names, self._best = names, best
        rope = Rope(kind="default", dim=c.head_dim, theta=c.rope_theta, context=model.shape.context)
        self._rotary = RotaryTable(rope, model.device)
        self._scale = c.head_dim**-0.5
        weights = _fusable(head, output, self._embedding) if self._attention.native_pool else None
        ids = None if names is None else torch.from_numpy(names)
        pool = self.pool.keys, self.pool.values
        self._native: HeadPass | None = kernels.fuse_head(weights, *pool, ids, best) if weights else None
        self._reach = 0
        """Positions whose angles the native pass has been given."""

    def tables(self, sequences: Many[Sequence]) -> Tables:
        """The block tables of the sequences of a pass."""
        if self._native:
            return [sequence.table.blocks for sequence in sequences]
        longest = max(len(sequence.table.blocks) for sequence in sequences)
        tables = np.zeros((len(sequences), longest), np.int32)
        for row, sequence in zip(tables, sequences, strict=True):
            row[: len(sequence.table.blocks)] = sequence.table.blocks
        return torch.from_numpy(tables).to(self._device)

    def start(self, features: Features, tracks: Many[Track]) -> Inputs | Tensor:
        """What the rows that tracks hold start from in the first module; as states [M, d] where they are computed at once."""
        if self._native:
            return Inputs([address for track in tracks for address in track.addresses()], True, tuple(tracks))
        return self._start(features, tracks)

    def go_on(self, states: States, sources: list[int], carried: Many[Tip]) -> Inputs | Tensor:
        """What rows start from that follow others: rows of states [N, d], with ``carried`` ones behind them."""
        if isinstance(states, Tensor):
            return (torch.cat([states, self._stack(carried)]) if carried else states)[sources]
        first, width = states.buffer_info()[0], 4 * self._config.hidden_size
        return Inputs([first + width * source for source in sources], False, (states,))

    @torch.inference_mode()
    def say(self, tips: Many[Tip], races: Races) -> Said:
        """What the first module says after states that it gave."""
        states = self._stack(tips)
        said = self._said(states, self._output(self._head.ready(states, 0)), races)
        if self._native:
            said.ends = array("f", states.numpy().tobytes())
        return said

    def _stack(self, tips: Many[Tip]) -> Tensor:
        """[tips, d]"""
        width = self._config.hidden_size
        return torch.stack([
            (states if isinstance(states, Tensor) else torch.frombuffer(states, dtype=torch.float32).view(-1, width))[row]
            for states, row in tips
        ])  # fmt: skip

    def run(
        self, module: int, inputs: Inputs | Tensor, rows: RowList, tables: Tables, wanted: Many[int], races: Races | None = None
    ) -> tuple[Said, Tensor | None]:
        """One pass of a module.

        Args:
            inputs: as ``start`` and ``go_on`` give them.
            tables: as from ``tables``.
            wanted: rows that are heard, increasing.
            races: of the wanted rows, whose candidates are ranked; None: nothing is asked for but their states.

        Returns:
            What the wanted rows say, and the new states of all rows [M, d]; None where no other module needs them.
        """
        if isinstance(inputs, Inputs):
            assert self._native
            assert not isinstance(tables, Tensor)
            if (n_slots := BLOCK_SIZE * max(map(len, tables))) > self._reach:
                cos, sin, _ = self._rotary.tables(_NOBODY, _NOBODY, n_slots)
                self._reach = self._native.turn(cos, sin)
            return self._native(inputs, rows, tables, wanted, races), None
        assert isinstance(tables, Tensor)
        return self._operations(module, inputs, rows, tables, wanted, races)

    # A call on the native path does nothing that torch could keep track of, and does without this guard, which takes longer
    # than much of what it does.
    @torch.inference_mode()
    def _start(self, features: Features, tracks: Many[Track]) -> Tensor:
        states: Tensor = self._head.start(features.features(tracks))
        return states

    @torch.inference_mode()
    def _operations(
        self, module: int, inputs: Tensor, rows: RowList, tables: Tensor, wanted: Many[int], races: Races | None
    ) -> tuple[Said, Tensor]:
        """``run``, operation by operation."""
        n, positions = len(rows), rows.positions()
        padded, width = rows.padded_paths()
        wide = torch.from_numpy(np.array([*rows.tokens, *positions, *wanted], np.int64)).to(self._device)
        entries = [*rows.owners, *rows.slots, *rows.prefixes, *map(len, rows.paths), *padded]
        narrow = torch.from_numpy(np.array(entries, np.int32)).to(self._device)
        owners, slots, prefixes, n_paths, paths = torch.split(narrow, [n, n, n, n, n * width])
        tokens, places, chosen = torch.split(wide, [n, n, len(wanted)])
        packed = Rows(tables=tables, sequence=owners, slot=slots, prefix=prefixes, path=paths.view(n, width), n_path=n_paths)
        cos, sin, angles = self._rotary.tables(places, places, max(positions) + 1)
        cos, sin = cos[angles], sin[angles]
        n_q, n_qk = self._config.n_heads, self._config.n_heads + self._config.n_kv_heads

        def attend(qkv: Tensor) -> Tensor:
            """[M, (H + 2 KV) * hd] -> [M, H * hd]"""
            heads = qkv.view(n, -1, self._config.head_dim)
            self._kernels.rope(heads[:, :n_qk], cos, sin)  # queries and keys lie side by side
            q, k, v = heads[:, :n_q], heads[:, n_q:n_qk], heads[:, n_qk:]
            return self._attention(module, q, k, v, packed, self._scale, 0)

        after: Tensor = self._head(self._embedding(tokens), inputs, attend, module)
        ends = after if len(wanted) == n else after[chosen]
        logits = self._output(self._head.ready(ends, module)) if races else ends.new_empty(0, self._output.n)
        return self._said(ends, logits, races), after

    def _said(self, ends: Tensor, logits: Tensor, races: Races | None) -> Said:
        """States and logits with the candidates of each row."""
        if races is None:
            return Said(ends, None, [], [])
        logits = logits.cpu()
        ranks = races.temperatures, races.seeds, races.positions
        tokens, chances = candidates(logits, *ranks, self._best, self._kernels, self._names)
        return Said(ends, logits, tokens.tolist(), chances.tolist())


def _fusable(head: RecurrentHead, output: Linear, embedding: Embedding) -> DecoderWeights | None:
    """What a pass in one native call takes; None where the head is of another kind or not packed for the CPU."""
    c = head.config
    if c.kind != "eagle3" or c.normed_residual or c.normed or not isinstance(head.fuse, PackedLinear):
        return None
    layer, norms = head.layers[0], (head.embedding_norms[0], head.state_norms[0], head.layers[0].ffn_norm, head.norms[0])
    products = [m.linear.matrix() for m in (layer.qkv, layer.out, layer.gate_up, layer.down) if isinstance(m, PackedLinear)]
    qkv, out, gate_up, down, fuse, last, table = (
        *products,
        head.fuse.linear.matrix(),
        output.matrix(),
        embedding.weight.matrix(),
    )
    if not (qkv and out and gate_up and down and fuse and last and table):
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
        fuse=fuse,
    )  # fmt: skip
