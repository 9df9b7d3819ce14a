"""Runs requests through an engine and collects their answers; every run ends with an empty, consistent pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.config import EngineConfig, SamplingParams, SpeculationConfig
from specdec.draft.base import Drafter
from specdec.engine import Engine
from specdec.kernels.base import Kernels
from specdec.models.base import Model
from specdec.types import Delta, FinishReason, TokenLogprob

EOS = frozenset({1})

FLAT = {1: 1.0, 64: 1.0}
"""Costs by which every drafter pays and every node is worth verifying: what is drafted does not depend on the machine."""


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    end_tokens: frozenset[int] = frozenset()


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    stats: dict = field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        assert self.finish_reason is None, "a finished sequence emitted again"
        self.tokens += delta.tokens
        self.sources += delta.sources
        self.logprobs += delta.logprobs or ()
        self.finish_reason, self.error = delta.finish_reason, delta.error
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.stats:
            self.stats = delta.stats.as_dict()

    @property
    def same(self) -> tuple:
        """All that speculation must not change."""
        return self.tokens, self.logprobs, self.prompt_logprobs, self.finish_reason, self.error


def make_engine(
    model: Model,
    kernels: Kernels,
    speculation: str = "off",
    drafter: Drafter | None = None,
    max_nodes: int = 8,
    rule: str = "coupled",
    **config,
) -> Engine:
    """An engine that poisons every freed block, so that whoever reads one gets NaN."""
    settings = EngineConfig(
        speculation=SpeculationConfig.parse(speculation, max_nodes=max_nodes, acceptance=rule),
        self_test=False,
        **{"kv_tokens": None, **config},
    )
    engine = Engine(model, kernels, settings, drafter)
    engine.pool.poison(range(engine.pool.n_blocks))
    engine.allocator.on_free = engine.pool.poison
    return engine


def run(engine: Engine, requests: Sequence[Request], max_steps: int = 25_000) -> list[Answer]:
    """Serve the requests together until all have ended."""
    answers = {
        engine.add(list(r.prompt), r.params, r.end_tokens, r.seed): Answer() for r in requests
    }  # ids are handed out in order
    for _ in range(max_steps):
        for delta in engine.step():
            answers[delta.sequence_id].add(delta)
        engine.check()
        if not engine.has_work:
            break
    assert not engine.has_work, f"requests did not end in {max_steps} steps"
    assert engine.allocator.n_used == 0, "blocks leaked"
    return list(answers.values())


def serve(model: Model, kernels: Kernels, requests: Sequence[Request], speculation: str = "off", **settings) -> list[Answer]:
    return run(make_engine(model, kernels, speculation, **settings), requests)


def truth_of(requests: Sequence[Request], answers: Sequence[Answer]):
    """What oracle-like drafters need: the continuation of each of these requests, by sequence id."""
    full = {i: [*r.prompt, *a.tokens] for i, (r, a) in enumerate(zip(requests, answers, strict=True))}
    return lambda sequence: full[sequence.id][len(sequence.tokens) :]
