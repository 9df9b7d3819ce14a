"""Engines over the audited model, in the states that the audit wants to see, and the plain answers that they are held to."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

from specdec import draft
from specdec.audit.requests import Request, Scouted, make_prompts, make_requests
from specdec.audit.runs import Answer, run
from specdec.config import AUTO, BLOCK_SIZE, ConfigError, EngineConfig, SamplingParams, SpeculationConfig
from specdec.draft.base import Drafter, Target
from specdec.engine import Engine
from specdec.kv.blocks import blocks_for
from specdec.llm import LLM
from specdec.runner.probe import Probe
from specdec.testing import Adversary, Oracle, Thicket
from specdec.types import Sequence
from specdec.verify import RULES

FLAT = {1: 1.0, 64: 1.0}
"""Costs by which every draft pays, so that what is verified does not depend on the machine."""

SYNTHETIC = ("thicket", "oracle", "adversary")
"""Drafters that know the answer: random trees with a true path in them, always right, always wrong."""

STATES: Mapping[str, str] = {
    "cold": "every prompt is read from nothing",
    "cached": "prompts begin with blocks that the prefix cache has",
    "preempted": "the pool is small, and sequences lose their blocks and are read again",
    "chunked": "prompts are read a few tokens at a time",
    "staggered": "requests join while others decode",
    "aborted": "neighbours are given up in the middle",
}

CHUNK = 7
"""Prompt rows of a pass where prompts are read in chunks: no divisor of a block."""


FEWEST = 5
"""Requests that an audit has at least: every kind of fault shows in them."""

PASSES_PER_TOKEN = 1.7
"""What preparing costs, in passes of one row for each token of an answer: scouting, the prompt, the plain answer."""


PREEMPT = 3
"""Passes after which a sequence loses its blocks, where they do."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One way of running the requests with speculation on."""

    drafter: str
    """One of the engine's drafters, several joined by commas, or one of SYNTHETIC."""
    width: int
    """Most drafted tokens in a pass."""
    batch: int
    """Most sequences at once."""
    state: str
    """One of STATES."""

    def describe(self) -> str:
        return f"{self.drafter}, {self.width} drafted, {self.batch} at once, {self.state}"


class Workshop:
    """Makes engines over one model, and holds the requests with their plain answers.

    Args:
        llm: the model as the user runs it.
        max_tokens: most tokens of an answer.
    """

    def __init__(self, llm: LLM, max_tokens: int) -> None:
        self.llm = llm
        self._max_tokens = max_tokens
        self.rule = RULES[llm.config.speculation.acceptance]
        self.requests: list[Request] = []
        """Greedy ones alone where the rule of acceptance does not promise the tokens of plain decoding above temperature 0."""
        self.plain: dict[int, Answer] = {}
        """Answers by seed, each request alone without speculation."""
        self._whole: dict[int, list[int]] = {}
        self._victims: list[Request] = []

    @property
    def drafters(self) -> list[str]:
        """Each of the user's drafters alone, then all of them together."""
        names = [name for name in self.llm.config.speculation.drafters if self._can_draft(name)]
        return [*names, ",".join(names)] if len(names) > 1 else names

    def prepare(self, seconds: float) -> None:
        """Scout the prompts, make the requests and decode each of them plainly, alone, in a fresh engine.

        Args:
            seconds: about how long that may take; there are fewer requests where the model is slow, though never less than
                ``FEWEST``.
        """
        n = max(FEWEST, int(seconds / (self._pass_seconds() * PASSES_PER_TOKEN * self._max_tokens)))
        ends = self.llm.end_tokens
        params = SamplingParams(temperature=0, max_tokens=self._max_tokens, ignore_eos=True)
        prompts = make_prompts(self.llm, self._max_tokens)[:n]
        scouts = [Request("scout", prompt, params, i, ends) for i, prompt in enumerate(prompts)]
        found = self._together(scouts)
        scouted = [Scouted(prompt, tuple(found[i].tokens)) for i, prompt in enumerate(prompts)]
        greedy = self.rule.name != "coupled"  # about half of the parameter sets
        self.requests = make_requests(scouted, self.llm, self._max_tokens, 2 * n if greedy else n, greedy=greedy)
        self._victims = [dataclasses.replace(r, label="victim", seed=r.seed + 5000) for r in self.requests[1::3]]
        self.plain = self._alone(self.requests)
        self._whole = {r.seed: [*r.prompt, *self.plain[r.seed].tokens] for r in self.requests}
        for victim, like in zip(self._victims, self.requests[1::3], strict=True):
            self._whole[victim.seed] = self._whole[like.seed]

    def _pass_seconds(self) -> float:
        """Of a pass of one row: the fastest of a few."""
        probe = Probe(self.llm.engine.model, self.llm.kernels, BLOCK_SIZE)
        seconds = []
        for _ in range(4):
            started = time.perf_counter()
            probe.read([0], 1)
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    def engine(self, cell: Cell, drafter: Drafter | None = None) -> Engine:
        """A fresh engine for a cell, whose freed blocks hold NaN: whoever reads one will show it.

        Args:
            drafter: instead of one that the cell's name stands for.
        """
        longest = max(len(r.prompt) + (r.params.max_tokens or 0) for r in self.requests)
        room = blocks_for(longest) * BLOCK_SIZE
        tight = cell.state == "preempted"
        settings = dataclasses.replace(
            self._settings(cell.batch, room),
            kv_tokens=room + 2 * BLOCK_SIZE if tight else (cell.batch + 2) * (room + 4 * BLOCK_SIZE),
            prefill_rows=CHUNK if cell.state == "chunked" else self.llm.config.prefill_rows,
            prefix_cache=cell.state in ("cached", "preempted") and self.llm.config.prefix_cache,
            speculation=self._speculation(cell),
        )
        return self._poisoned(settings, drafter or self._synthetic(cell.drafter))

    def serve(
        self, cell: Cell, requests: Many[Request], engine: Engine, expected: Mapping[int, Answer] | None = None
    ) -> list[dict[int, Answer]]:
        """Run requests in the state of a cell; several times over where the state needs it."""
        tokenizer = self.llm.tokenizer
        victims = self._victims if cell.state == "aborted" else []
        mixed = [r for pair in itertools.zip_longest(requests, victims) for r in pair if r is not None]
        abort = {victim.seed for victim in victims}
        every = 2 if cell.state in ("staggered", "aborted") else 0
        turns = 2 if cell.state == "cached" else 1
        preempt = PREEMPT if cell.state == "preempted" else 0
        return [
            run(engine, mixed, tokenizer, every=every, preempt_every=preempt, abort=abort, expected=expected)
            for _ in range(turns)
        ]

    def _together(self, requests: Many[Request]) -> dict[int, Answer]:
        return run(self._without_speculation(requests, len(requests)), requests, self.llm.tokenizer)

    def _alone(self, requests: Many[Request]) -> dict[int, Answer]:
        engine = self._without_speculation(requests, 1)
        answers: dict[int, Answer] = {}
        for request in requests:
            answers |= run(engine, [request], self.llm.tokenizer)
        return answers

    def _without_speculation(self, requests: Many[Request], batch: int) -> Engine:
        room = max(len(r.prompt) + (r.params.max_tokens or 0) for r in requests)
        settings = self._settings(batch, blocks_for(room) * BLOCK_SIZE)
        speculation = dataclasses.replace(settings.speculation, drafters=(), trained=AUTO)
        kv_tokens = (batch + 1) * (blocks_for(room) + 1) * BLOCK_SIZE
        return self._poisoned(
            dataclasses.replace(settings, speculation=speculation, kv_tokens=kv_tokens, prefix_cache=False), None
        )

    def _settings(self, batch: int, room: int) -> EngineConfig:
        """The user's settings, for so many sequences of so many tokens."""
        room = min(room, self.llm.engine.max_len)
        return dataclasses.replace(
            self.llm.config, max_sequences=batch, max_len=room, kv_tokens=None, self_test=False, pass_seconds=FLAT
        )

    def _speculation(self, cell: Cell) -> SpeculationConfig:
        speculation = self.llm.config.speculation
        names = tuple(name for name in cell.drafter.split(",") if name in speculation.drafters)
        trained = speculation.trained if "trained" in names else AUTO
        return dataclasses.replace(speculation, drafters=names, trained=trained, max_nodes=cell.width)

    def _synthetic(self, name: str) -> Drafter | None:
        vocab_size = self.llm.engine.model.shape.vocab_size
        if name == "thicket":
            return Thicket(self._truth, vocab_size, seed=7)
        if name == "adversary":
            return Adversary(self._truth, vocab_size)
        return Oracle(self._truth) if name == "oracle" else None

    def _truth(self, sequence: Sequence) -> Many[int]:
        """What plain decoding appends to a sequence after its committed tokens; nothing where it has left that."""
        whole = self._whole.get(sequence.seed, [])
        return whole[len(sequence.tokens) :]

    def _poisoned(self, settings: EngineConfig, drafter: Drafter | None) -> Engine:
        engine = Engine(self.llm.engine.model, self.llm.kernels, settings, drafter)
        engine.pool.poison(range(engine.pool.n_blocks))
        engine.allocator.on_free = engine.pool.poison
        return engine

    def _can_draft(self, name: str) -> bool:
        speculation = self.llm.config.speculation
        alone = dataclasses.replace(speculation, drafters=(name,), trained=speculation.trained if name == "trained" else AUTO)
        try:
            return draft.build(alone, Target(self.llm.engine.model, self.llm.kernels, 1)) is not None
        except ConfigError:
            if speculation.trained == AUTO:
                return False  # none ships for this model, and none was asked for
            raise
