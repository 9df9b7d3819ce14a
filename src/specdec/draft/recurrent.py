"""Drafting with a recurrent head: EAGLE, EAGLE-2, EAGLE-3 and the modules of multi-token prediction.

Row i of the head's first module takes the target's feature f_i and the embedding of x_{i+1}, attends to the rows before it,
and says x_{i+2}. Row i of module m takes what module m - 1 gave for row i, and x_{i+1+m}. So with x_L pending, module m has
rows 0 .. L - 1 - m that rest on features and on committed tokens alone. These are *fed* once, in one pass for all sequences,
before the next draft; the last of them says the first drafted token. Each further depth is one pass over the nodes that
propose children. Depth t is said by module t - 1, and once there is none left, by the last one going on on its own states.

Keys and values lie in a pool of the drafter's own under the target's block numbers, row i in slot i of the sequence's table:
what becomes of a sequence's blocks becomes of its rows here. Drafted rows lie in the slots behind, which are the sequence's
own until the pass is over, and are overwritten by what is fed next.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from dataclasses import dataclass

from torch import Tensor

from specdec.config import ConfigError, SpeculationConfig
from specdec.draft.base import Drafter, Target
from specdec.draft.drawing import Drawing, Drawings
from specdec.draft.expand import Growth
from specdec.draft.features import Features, Tip, Track
from specdec.draft.layers import Layers, Tables
from specdec.draft.levels import Levels
from specdec.kernels.head_pass import Races, RowList, Said
from specdec.models.decoder import Decoder
from specdec.models.head_files import LoadedHead
from specdec.models.heads import RecurrentHead
from specdec.models.packed_heads import PackedLinear, pack_head, packed_bytes
from specdec.types import NO_DRAFT, ROOT, Draft, Forward, Sequence, Siblings, Step, Verdict

MOST_HELD = 8192
"""Rows that all sequences together may hold unfed; a sequence with more than its share of them is fed, draft or no draft."""


@dataclass(slots=True)
class Leaf:
    """A node that was run through the head and now proposes children; or the pending token, the root."""

    owner: int
    """Which of the sequences asked for."""
    node: int
    rows: list[int]
    """Its rows among the states of the last pass; the last one is its own, those before are what a new module rests on."""
    path: list[int]
    """Slots of the drafted rows that the last of them sees."""
    tokens: list[int]
    """From the root down to the node."""


class RecurrentDrafter(Drafter):
    """Drafts the best nodes of a tree that a trained recurrent head spans.

    Args:
        loaded: the head and its vocabulary.
        target: the model that it was trained for.
        config: the ``trained_`` settings.
        draws: how siblings are drawn; None: candidates are ranked.

    Raises:
        ConfigError: the head does not fit the model.
    """

    holds = True

    def __init__(self, loaded: LoadedHead, target: Target, config: SpeculationConfig, draws: Siblings | None = None) -> None:
        model, head = target.model, loaded.head
        if not isinstance(head, RecurrentHead):
            raise ConfigError(f"{loaded.name} is a head of kind {loaded.config.kind}, which is not recurrent")
        if not isinstance(model, Decoder):
            raise ConfigError(f"{loaded.name} needs a model whose embedding and output matrix it can use")
        h, a = loaded.config, model.architecture
        if (h.hidden_size, h.vocab_size) != (a.hidden_size, a.vocab_size) or h.taps[-1] >= a.n_layers:
            raise ConfigError(
                f"{loaded.name} was made for a model of width {h.hidden_size} with {h.vocab_size} tokens and at least "
                f"{h.taps[-1] + 1} layers, this one has width {a.hidden_size}, {a.vocab_size} tokens and {a.n_layers} layers"
            )
        ids, device = loaded.vocabulary_ids, model.device
        self.name = h.kind
        self.taps = h.taps
        self._head = pack_head(head, target.kernels, config.trained_precision, device)
        cut = None if h.own_output or ids is None else model.head.subset(ids)
        own = [output.linear for output in self._head.outputs if isinstance(output, PackedLinear)]
        self._output_bytes = cut.n_bytes if cut else 0
        self._vocabulary = None if ids is None else ids.cpu().numpy()
        best = min(config.trained_width, h.n_outputs, 32)
        output = own[0] if own else cut or model.head
        self._layers = Layers(self._head, output, model, target.kernels, target.n_blocks, self._vocabulary, best)
        self._features = Features(h.taps, (lambda x: target.kernels.rms_norm(x, model.norm, a.rms_eps)) if h.normed else None)
        self._depth, self._width, self._nodes = config.trained_depth, config.trained_width, config.trained_nodes
        self._least = config.trained_min_probability
        self._last = h.n_modules - 1
        self.draws = draws
        self._drawings = Drawings(draws, config, a.vocab_size, self._vocabulary)
        self._levels = Levels()

    def weigh(self, token: float, row: float) -> None:
        self._levels.weigh(token, row)

    def unread(self, sequence: Sequence) -> int:
        track = self._features.ready(sequence)
        return track.n_held - 1 if track and track.fed == track.first else 0

    def read(self, sequences: Many[Sequence]) -> None:
        tracks = [(sequence, self._features.ready(sequence)) for sequence in sequences]
        self._read([(sequence, track) for sequence, track in tracks if track])

    def observe(self, step: Step, forward: Forward, verdicts: Many[Verdict | None]) -> None:
        collected = self._features.collect(step, forward, verdicts)
        share = MOST_HELD // max(1, len(self._features))
        if full := [(sequence, track) for sequence, track in collected if track.n_held > share]:
            self._read(full)

    def propose(self, sequences: Many[Sequence], budgets: Many[int]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(sequences)
        asked: list[int] = []
        known: list[tuple[Sequence, Track]] = []
        for i, (sequence, budget) in enumerate(zip(sequences, budgets, strict=True)):
            if budget > 0 and (track := self._features.ready(sequence)):
                asked.append(i)
                known.append((sequence, track))
        if not asked:
            return drafts
        growths = [
            self._drawings.start(sequence, budgets[i])
            or Growth(self._width, min(budgets[i], self._nodes), self._least, sequence.end_tokens)
            for i, (sequence, _) in zip(asked, known, strict=True)
        ]
        began = time.perf_counter()
        said = self._first(known)
        self._grow(known, growths, said, time.perf_counter() - began)
        for i, growth in zip(asked, growths, strict=True):
            drafts[i] = growth.draft(self.name)
        return drafts

    def release(self, sequence: Sequence) -> None:
        self._features.release(sequence)

    def clear(self) -> None:
        self._features.clear()

    @property
    def n_bytes(self) -> int:
        return packed_bytes(self._head) + self._output_bytes + self._layers.pool.n_bytes + self._features.n_bytes

    def _first(self, known: Many[tuple[Sequence, Track]]) -> Said:
        """What the first module says after the last committed row of each sequence."""
        hungry = [(sequence, track) for sequence, track in known if track.n_held]
        said = self._feed(hungry, self._races([sequence for sequence, _ in hungry], 1)) if hungry else None
        if said is None or len(hungry) < len(known):  # asked again before another pass
            races = self._races([sequence for sequence, _ in known], 1)
            said = self._layers.say([track.tips[0] for _, track in known], races)
        return said

    def _read(self, known: Many[tuple[Sequence, Track]]) -> None:
        """Run all rows that sequences hold but the last, which is left for the next draft to begin with."""
        known = [(sequence, track) for sequence, track in known if track.n_held > 1]
        left = [track.part() for _, track in known]
        if known:
            self._feed(known, None)
        for (_, track), piece in zip(known, left, strict=True):
            track.hold(piece)

    def _feed(self, known: Many[tuple[Sequence, Track]], races: Races | None) -> Said | None:
        """Run the rows that sequences hold through every module, as far as their tokens are known.

        Args:
            races: for the tokens that follow each sequence's last row; None: these are not asked for, and rows are held back.

        Returns:
            What the first module says after each sequence's last row.
        """
        tables = self._layers.tables([sequence for sequence, _ in known])
        states = self._layers.start(self._features, [track for _, track in known])  # of N rows
        said: Said | None = None
        inside = [range(track.fed, track.stop) for _, track in known]  # rows of each sequence that lie in states
        tips: list[tuple[Track, int, Tip]] = []
        after: Tensor | None = None
        for module in range(self._last + 1):
            rows = RowList()
            n_states = sum(map(len, inside))
            sources: list[int] = []  # rows of states
            carried: list[Tip] = []  # and what is put behind them
            ended: list[tuple[Track, int]] = []
            begin = 0
            for owner, (sequence, track) in enumerate(known):
                had, now = inside[owner], range(track.fed, track.stop)
                if module:
                    # A module lags the one before it by a row, whose state is the tip of last time.
                    now = range(max(track.first, track.fed - module), max(track.first, track.stop - module))
                    if now and now.start < had.start:
                        sources.append(n_states + len(carried))
                        carried.append(track.tips[module - 1])
                    sources += [begin + row - had.start for row in now if row >= had.start]
                    begin += len(had)
                    inside[owner] = now
                rows.add_committed(sequence.tokens[now.start + 1 + module : now.stop + 1 + module], owner, now.start)
                if now:
                    ended.append((track, len(rows) - 1))
            if not ended:
                break
            if after is not None:
                states = self._layers.go_on(after, sources, carried)
            if races is None and not self._last:
                ended = []  # nobody will go on from them
            heard, after = self._layers.run(module, states, rows, tables, [row for _, row in ended], None if module else races)
            said = said or heard
            tips += [(track, module, (heard.ends, i)) for i, (track, _) in enumerate(ended)]
        for track, module, tip in tips:
            track.tips[module : module + 1] = [tip]
        for _, track in known:
            track.feed()
        return said

    def _grow(self, known: Many[tuple[Sequence, Track]], growths: Many[Growth | Drawing], said: Said, took: float) -> None:
        """Grow one tree per sequence, a depth at a time, all of them in the same passes, as long as that pays.

        Args:
            said: after the last committed row of each.
            took: seconds that this took.
        """
        self._levels.first(took)
        tables: Tables | None = None
        states = said.ends  # [S, d]
        leaves = [Leaf(owner, ROOT, [owner], [], []) for owner in range(len(known))]
        taken = [0] * len(known)
        """Slots behind each sequence's committed rows that drafted rows of the module lie in."""
        for depth in range(1, self._depth + 1):
            self._add_children(said, leaves, growths)
            parents = [] if depth == self._depth else self._levels.parents(growths)
            if not parents:
                if depth == 1:
                    self._levels.ended(took)
                return
            began = time.perf_counter()
            module = min(depth, self._last)
            if module == depth:
                taken = [0] * len(known)  # no drafted row of this module is there yet
            rows = RowList()
            sources: list[int] = []  # rows of states
            carried: list[Tip] = []  # and what is put behind them
            above = {(leaf.owner, leaf.node): leaf for leaf in leaves}
            leaves = []
            for owner, ((sequence, track), growth, nodes) in enumerate(zip(known, growths, parents, strict=True)):
                end = len(sequence.tokens) - 1  # the first slot behind the committed rows of the first module
                n_rows = depth if module == depth else 1
                room = (sequence.table.n_slots - end - taken[owner]) // n_rows
                if n_rows > track.stop - track.first:
                    room = 0  # a row that these would rest on was not observed
                for node in nodes[:room]:
                    parent = above[owner, growth.parents[node]]
                    tokens = [*parent.tokens, growth.tokens[node]]
                    path = list(range(end + taken[owner], end + taken[owner] + n_rows))
                    taken[owner] += n_rows
                    if module == depth:
                        # The module's first drafted rows: from the one whose token is the first drafted one.
                        if depth > 1:
                            sources.append(len(states) + len(carried))
                            carried.append(track.tips[depth - 1])
                        sources += parent.rows
                    else:
                        sources.append(parent.rows[-1])
                        path = parent.path + path
                    first = len(rows)
                    for token, n in zip(tokens[-n_rows:], range(len(path) - n_rows + 1, len(path) + 1), strict=True):
                        rows.add(token, owner, path[n - 1], end - module, path[:n])
                    leaves.append(Leaf(owner, node, list(range(first, first + n_rows)), path, tokens))
            if not leaves:
                return
            if tables is None:
                tables = self._layers.tables([sequence for sequence, _ in known])
            wanted = [leaf.rows[-1] for leaf in leaves]
            races = self._races([known[leaf.owner][0] for leaf in leaves], depth + 1)
            said, after = self._layers.run(module, self._layers.go_on(states, sources, carried), rows, tables, wanted, races)
            states = said.ends if after is None else after
            self._levels.further(time.perf_counter() - began)

    def _add_children(self, said: Said, leaves: Many[Leaf], growths: Many[Growth | Drawing]) -> None:
        """Give every leaf its children, which are what was said after it."""
        for i, leaf in enumerate(leaves):
            growth = growths[leaf.owner]
            if isinstance(growth, Drawing):
                assert said.logits is not None
                growth.draw(leaf.node, said.logits[i])
                continue
            growth.add(leaf.node, said.tokens[i], said.chances[i])
            self._levels.likely(said.chances[i][0])

    def _races(self, sequences: Many[Sequence], depth: int) -> Races:
        """For tokens so many places behind the pending one of each sequence."""
        return Races(
            [sequence.params.temperature for sequence in sequences],
            [sequence.seed for sequence in sequences],
            [len(sequence.tokens) - 1 + depth for sequence in sequences],
            self.draws is not None,
        )
