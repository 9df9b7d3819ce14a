"""Medusa (Cai et al., arXiv 2401.10774): several heads over one feature, each for a token further ahead.

With x_L pending, the feature f of position L - 1 is known: it is the one that the target chose x_L from. Head k says x_{L+1+k}
from it. What lies between, x_L and the drafted tokens before, is left out (no correction), seen in the token just before (a
Markov head, which adds a bias to logits that are computed once for all heads) or seen whole (Hydra, Ankner et al., arXiv
2402.05109, which computes the logits of each depth anew).

Trees grow by the estimates of the heads themselves. Where there is no correction, every node of a depth has the same
candidates, and the shape is fixed beforehand if it was measured how often each rank of each head is right.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from specdec.config import ConfigError, SpeculationConfig
from specdec.draft.base import Drafter, Target
from specdec.draft.candidates import Floats, Ids, candidates
from specdec.draft.drawing import Drawings, add_children
from specdec.draft.expand import Growth
from specdec.draft.medusa_heads import Heads
from specdec.draft.shape import Shape, static
from specdec.kernels.base import WIDTH
from specdec.models.decoder import Decoder
from specdec.models.head_files import LoadedHead
from specdec.models.heads import MedusaHead
from specdec.quant.linear import Linear
from specdec.types import ROOT, Draft, Forward, Sequence, Siblings, Step, Verdict


class MedusaDrafter(Drafter):
    """Drafts the best nodes of a tree that trained Medusa heads span; holds one feature for each sequence.

    Args:
        loaded: the heads, their vocabulary and what was measured of them: ``measured["accuracy"]``, by head and rank.
        target: the model that they were trained for.
        config: the ``trained_`` settings.
        draws: how siblings are drawn; None: candidates are ranked.

    Raises:
        ConfigError: the heads do not fit the model.
    """

    name = "medusa"

    def __init__(self, loaded: LoadedHead, target: Target, config: SpeculationConfig, draws: Siblings | None = None) -> None:
        head, model, c = loaded.head, target.model, loaded.config
        if not isinstance(head, MedusaHead):
            raise ConfigError(f"{loaded.name} is a head of kind {c.kind}, not of kind medusa")
        if not isinstance(model, Decoder):
            raise ConfigError(f"{loaded.name} needs a model whose embedding and output matrix it can use")
        a = model.architecture
        if (c.hidden_size, c.vocab_size) != (a.hidden_size, a.vocab_size) or c.taps[0] >= a.n_layers:
            raise ConfigError(
                f"{loaded.name} was made for a model of width {c.hidden_size} with {c.vocab_size} tokens and at least "
                f"{c.taps[0] + 1} layers, this one has width {a.hidden_size}, {a.vocab_size} tokens and {a.n_layers} layers"
            )
        ids = loaded.vocabulary_ids
        self.taps = c.taps
        self._kernels, self._device = target.kernels, model.device
        self._correction = c.correction
        self._depth, self._width, self._nodes = min(config.trained_depth, c.depth), config.trained_width, config.trained_nodes
        self._children = min(config.trained_width, c.n_outputs, WIDTH)
        self._least = config.trained_min_probability
        self._heads = Heads(head, self._depth, target.kernels, config.trained_precision, model.device)
        self._embedding = self._heads.embedding or model.embedding
        cut = None if c.own_output or ids is None else model.head.subset(ids)
        self._shared: Linear | None = None if c.own_output else cut or model.head
        self._output_bytes = cut.n_bytes if cut else 0
        self._vocabulary = None if ids is None else ids.cpu().numpy()
        self._norm = (lambda x: target.kernels.rms_norm(x, model.norm, a.rms_eps)) if c.normed else None
        accuracy = [ranks[: self._children] for ranks in loaded.measured.get("accuracy", ())[: self._depth]]
        self._shape = static(accuracy, self._nodes) if accuracy and c.correction == "none" else None
        self.draws = draws
        self._drawings = Drawings(draws, config, a.vocab_size, self._vocabulary)
        self._features: dict[int, Tensor] = {}
        """Sequence id -> [d], the feature of the row that gave its pending token."""

    @torch.inference_mode()
    def observe(self, step: Step, forward: Forward, verdicts: Many[Verdict | None]) -> None:
        rows: list[int] = []
        owners: list[Sequence] = []
        row = 0
        for span, verdict in zip(step, verdicts, strict=True):
            nodes = row + span.stop - span.start
            row += span.n_rows
            if verdict is not None:
                owners.append(span.sequence)
                rows.append(nodes + verdict.path[-1] if verdict.path else nodes - 1)
        if owners:
            features = forward.taps[self.taps[0]][rows]  # [n, d], a copy
            if self._norm is not None:
                features = self._norm(features)
            for sequence, feature in zip(owners, features.unbind(), strict=True):
                self._features[sequence.id] = feature

    @torch.inference_mode()
    def propose(self, sequences: Many[Sequence], budgets: Many[int]) -> list[Draft]:
        drafts = [Draft()] * len(sequences)
        asked = [
            i for i, (s, budget) in enumerate(zip(sequences, budgets, strict=True)) if budget > 0 and s.id in self._features
        ]
        if not asked:
            return drafts
        owners = [sequences[i] for i in asked]
        limits = [min(budgets[i], self._nodes) for i in asked]
        features = torch.stack([self._features[sequence.id] for sequence in owners])  # [S, d]
        make = self._lay_out if self._correction == "none" else self._grow
        for i, draft in zip(asked, make(owners, limits, features), strict=True):
            drafts[i] = draft
        return drafts

    def release(self, sequence: Sequence) -> None:
        self._features.pop(sequence.id, None)

    def clear(self) -> None:
        self._features.clear()

    @property
    def n_bytes(self) -> int:
        return self._heads.n_bytes + self._output_bytes + sum(feature.nbytes for feature in self._features.values())

    def _lay_out(self, owners: Many[Sequence], limits: Many[int], features: Tensor) -> Iterator[Draft]:
        """Trees all of whose nodes of a depth have the same candidates, or are drawn from the same law."""
        logits = self._parallel(features)  # [S, depth, Vd]
        drawings = [self._drawings.start(sequence, limit) for sequence, limit in zip(owners, limits, strict=True)]
        ranked = [i for i, drawing in enumerate(drawings) if drawing is None]
        best = self._by_rank(
            [owners[i] for i in ranked],
            [limits[i] for i in ranked],
            logits if len(ranked) == len(owners) else logits[ranked],
        )
        for drawing, rows in zip(drawings, logits, strict=True):
            if drawing is None:
                yield next(best)
                continue
            leaves = [ROOT]
            for row in rows.cpu():
                for node in leaves:
                    drawing.draw(node, row)
                leaves = drawing.next()
            yield drawing.draft(self.name)

    def _by_rank(self, owners: Many[Sequence], limits: Many[int], logits: Tensor) -> Iterator[Draft]:
        """Trees of the best candidates, from logits [S, depth, Vd]."""
        depth = self._depth
        tokens, chances = self._rank(
            [s for s in owners for _ in range(depth)], [*range(depth)] * len(owners), logits.flatten(0, 1)
        )
        for i, (sequence, limit) in enumerate(zip(owners, limits, strict=True)):
            mine = slice(i * depth, (i + 1) * depth)
            growth = Growth(self._width, limit, self._least, sequence.end_tokens)
            if self._shape is None:
                spread(growth, tokens[mine].tolist(), chances[mine].tolist())
            else:
                fill(growth, self._shape, tokens[mine].tolist(), chances[mine].tolist(), sequence.end_tokens)
            yield growth.draft(self.name)

    def _grow(self, owners: Many[Sequence], limits: Many[int], features: Tensor) -> Iterator[Draft]:
        """Trees whose nodes have candidates of their own: a depth at a time, all sequences in the same products."""
        growths = [
            self._drawings.start(s, n) or Growth(self._width, n, self._least, s.end_tokens)
            for s, n in zip(owners, limits, strict=True)
        ]
        base = self._parallel(features) if self._correction == "markov" else None
        between = features.new_empty(len(owners), 0)
        leaves = [(i, ROOT, i, sequence.tokens[-1]) for i, sequence in enumerate(owners)]  # owner, node, parent's leaf, token
        for k in range(self._depth):
            mine = [owner for owner, *_ in leaves]
            last = torch.tensor([token for *_, token in leaves], device=self._device)
            if base is not None:
                logits = base[mine, k] + self._heads.bias(last)
            else:
                between = torch.cat([between[[above for _, _, above, _ in leaves]], self._embedding(last)], 1)
                state = self._heads.state(k, features[mine], between)
                logits = (self._shared or self._heads.outputs[k])(state)  # [leaves, Vd]
            add_children(
                [(growths[owner], node, owners[owner], len(owners[owner].tokens) + k) for owner, node, *_ in leaves],
                logits.cpu(),
                self._children,
                self._kernels,
                self._vocabulary,
            )
            at = {(owner, node): i for i, (owner, node, _, _) in enumerate(leaves)}
            leaves = [
                (owner, node, at[owner, growth.parents[node]], growth.tokens[node])
                for owner, growth in enumerate(growths)
                for node in growth.next()
            ]
            if not leaves:
                break
        return (growth.draft(self.name) for growth in growths)

    def _parallel(self, features: Tensor) -> Tensor:
        """What all heads say by themselves: features [S, d] -> logits [S, depth, Vd]."""
        states = self._heads.states(features)
        if self._shared:
            return self._shared(states.reshape(-1, states.shape[2])).view(len(features), self._depth, -1)
        return torch.stack([self._heads.outputs[k](states[:, k]) for k in range(self._depth)], 1)

    def _rank(self, owners: Many[Sequence], depths: Many[int], logits: Tensor) -> tuple[Ids, Floats]:
        """Candidates and chances of rows [n, Vd], each with its sequence and how many drafted tokens lie before it."""
        return candidates(
            logits.cpu(),
            [sequence.params.temperature for sequence in owners],
            [sequence.seed for sequence in owners],
            [len(sequence.tokens) + depth for sequence, depth in zip(owners, depths, strict=True)],
            self._children,
            self._kernels,
            self._vocabulary,
        )


def spread(growth: Growth, tokens: list[list[int]], chances: list[list[float]]) -> None:
    """Grow a tree by its estimates, all nodes of a depth having the same candidates: [depths, children]."""
    leaves = [ROOT]
    for ids, likely in zip(tokens, chances, strict=True):
        for node in leaves:
            growth.add(node, ids, likely)
        leaves = growth.next()


def fill(growth: Growth, shape: Shape, tokens: list[list[int]], chances: list[list[float]], ends: Collection[int]) -> None:
    """Give a fixed shape its tokens; [depths, children] candidates and chances."""
    place = {ROOT: ROOT}  # node of the shape -> node of the tree; some are too unlikely, or follow an end token
    for node, (parent, rank, depth) in enumerate(zip(shape.parents, shape.ranks, shape.depths, strict=True)):
        if parent in place and (parent == ROOT or growth.tokens[place[parent]] not in ends):
            n = len(growth.tokens)
            growth.add(place[parent], [tokens[depth - 1][rank]], [chances[depth - 1][rank]])
            if len(growth.tokens) > n:
                place[node] = n
