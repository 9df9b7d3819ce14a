"""The measurement: the same engine with speculation off and on, in turns, over the same prompts.

Speculation may change the speed and nothing else, so the tokens of all runs of a prompt must be the same; a measurement in
which they are not is broken off. Rules of acceptance that decide by chance promise that at temperature 0 only: above it their
runs are held against nothing, and the result names the rule.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from specdec.bench.prompts import Prompt, digest
from specdec.bench.provenance import model_name, provenance
from specdec.bench.result import MODES, Report, Timing
from specdec.bench.summary import gaps, summarise
from specdec.config import ConfigError, SamplingParams
from specdec.kernels.cpu import NativeKernels
from specdec.kernels.library import load
from specdec.kernels.memory import read_rate
from specdec.llm import LLM, RequestError, Stream
from specdec.results import Result
from specdec.runner.cost import Costs
from specdec.runner.measure import SIZES
from specdec.runner.measure import measure as measure_costs

WARM_UP = 8
"""Tokens of a request before the first measured one: pages are touched and threads started."""


class Changed(Exception):
    """Two runs of one prompt gave different tokens."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How to measure."""

    temperatures: tuple[float, ...]
    params: SamplingParams
    """Everything but the temperature; the seed is given."""
    concurrency: int
    """Requests in flight; the next one starts as soon as one ends."""
    repeats: int
    """Turns; every second one begins with speculation on."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be an integer >= 1, got {getattr(self, name)}")
        if not self.temperatures or len(set(self.temperatures)) != len(self.temperatures):
            raise ConfigError(f"temperatures must be different numbers, at least one, got {list(self.temperatures)}")
        for temperature in self.temperatures:
            self.params.replace(temperature=temperature)  # which checks it

    def n_requests(self, prompts: Sequence[Prompt]) -> int:
        return len(prompts) * len(MODES) * self.repeats * len(self.temperatures)


MOST_READ = 512 << 20
"""Bytes at most by which the rate of reading memory is measured: more than any cache holds."""


@dataclass(slots=True)
class _Flight:
    """A request that runs."""

    prompt: Prompt
    stream: Stream
    began: float
    deliveries: list[tuple[float, int]]
    """When tokens came, and how many."""


@dataclass(frozen=True, slots=True)
class _Landing:
    """A request that has ended."""

    flight: _Flight
    result: Result


class _Side:
    """One mode's way through some prompts, with a clock of its own that goes only while this mode works.

    So two sides can take turns pass by pass, and whatever changes the machine's pace meets both.
    """

    def __init__(
        self, llm: LLM, prompts: Sequence[Prompt], ids: Mapping[str, list[int]], params: SamplingParams, concurrency: int
    ) -> None:
        self._llm, self._ids, self._params, self._concurrency = llm, ids, params, concurrency
        self._waiting, self._flights = deque(prompts), list[_Flight]()
        self.seconds = 0.0

    @property
    def done(self) -> bool:
        return not self._waiting and not self._flights

    def advance(self) -> list[_Landing]:
        """Run until the oldest request gets tokens, in which others may get some too; those that ended."""
        began = time.perf_counter()

        def now() -> float:
            return self.seconds + time.perf_counter() - began

        while self._waiting and len(self._flights) < self._concurrency:
            prompt, moment = self._waiting.popleft(), now()
            self._flights.append(_Flight(prompt, self._llm.stream(self._ids[prompt.id], self._params), moment, []))
        ended: list[_Landing] = []
        for i, flight in enumerate(tuple(self._flights)):
            if i and not flight.stream.ready:
                continue
            chunk = next(flight.stream)
            flight.deliveries.append((now(), len(chunk.tokens)))
            if chunk.result:
                flight.stream.close()
                self._flights.remove(flight)
                ended.append(_Landing(flight, chunk.result))
        self.seconds = now()
        return ended

    def close(self) -> None:
        """Abandon what has not ended."""
        for flight in self._flights:
            flight.stream.close()


def measure(llm: LLM, prompts: Sequence[Prompt], plan: Plan, served: Callable[[Prompt], None] = lambda prompt: None) -> Report:
    """Measure a model whose speculation is on.

    Off and on run the same prompts side by side and alternate pass by pass, each by a clock that goes only while it works: the
    one that has worked less goes on. So a change of the machine's pace meets both. What drafters learned is forgotten before
    each turn, so none has met a prompt's answer before, but each learns from the prompts before it, as in use.

    Args:
        llm: its ``without_speculation`` is the other side.
        prompts: what is asked.
        plan: how.
        served: called after each measured request.

    Raises:
        Changed: the tokens of two runs of a prompt differ.
        ConfigError: there is no speculation to measure, or a prompt cannot be asked.
    """
    if llm.engine.drafter is None:
        raise ConfigError("speculation is off: there is nothing to compare with plain decoding")
    if plan.concurrency > llm.config.max_sequences:
        raise ConfigError(f"concurrency must be at most {llm.config.max_sequences}, which the engine runs at once")
    sides = dict(zip(MODES, (llm.without_speculation(), llm), strict=True))
    ids = {prompt.id: _encode(llm, prompt) for prompt in prompts}
    for side in sides.values():
        side.generate([ids[prompts[0].id]], plan.params.replace(temperature=plan.temperatures[0], max_tokens=WARM_UP))
    context = round(mean(len(ids[prompt.id]) + (plan.params.max_tokens or 0) / 2 for prompt in prompts))
    before, _ = measure_costs(llm.engine.model, llm.kernels, list(SIZES), context=context)

    tokens: dict[tuple[str, float], tuple[int, ...]] = {}
    runs: list[Timing] = []
    turns: list[dict[str, Any]] = []
    groups = [[prompt] for prompt in prompts] if plan.concurrency == 1 else [list(prompts)]
    for temperature in plan.temperatures:
        params = plan.params.replace(temperature=temperature)
        for turn in range(plan.repeats):
            for side in sides.values():  # nor may either find the prompts of the turn before in its prefix cache
                side.engine.forget()
            order = MODES if turn % 2 == 0 else MODES[::-1]
            walls = dict.fromkeys(MODES, 0.0)
            for group in groups:
                parts = {mode: _Side(sides[mode], group, ids, params, plan.concurrency) for mode in order}
                try:
                    while running := [mode for mode, part in parts.items() if not part.done]:
                        mode = min(running, key=lambda mode: parts[mode].seconds)
                        for landing in parts[mode].advance():
                            prompt, result = landing.flight.prompt, landing.result
                            if result.error:
                                raise RequestError(f"{prompt.id}: {result.error}")
                            if mode == MODES[0] or temperature == 0 or not llm.engine.acceptance.by_chance:
                                _check(prompt, result, tokens.setdefault((prompt.id, temperature), result.tokens))
                            runs.append(_timing(mode, landing, turn, temperature))
                            served(prompt)
                finally:
                    for part in parts.values():
                        part.close()
                for mode, part in parts.items():
                    walls[mode] += part.seconds
            turns += [
                {
                    "mode": mode,
                    "temperature": temperature,
                    "turn": turn,
                    "seconds": walls[mode],
                    "tokens": sum(r.tokens for r in runs if (r.mode, r.turn, r.temperature) == (mode, turn, temperature)),
                }
                for mode in MODES
            ]
    after, _ = measure_costs(llm.engine.model, llm.kernels, list(SIZES), context=context)
    # The faster of each: other programs only ever make a pass slower, and some sizes more than others.
    costs = Costs({rows: min(seconds, after.points.get(rows, seconds)) for rows, seconds in before.points.items()})
    peak = peak_memory()  # before the bound is measured, which takes as much as the weights
    return Report(
        provenance=_provenance(llm, prompts),
        settings={**_settings(llm, plan), "context": context},
        modes=MODES,
        runs=tuple(runs),
        v={str(rows): cost for rows, cost in costs.relative().items()},
        one_row=_one_row(llm, costs.points[1]),
        summary=tuple(summarise(runs, MODES)),
        peak_memory_bytes=peak,
        turns=tuple(turns),
    )


def _one_row(llm: LLM, seconds: float) -> dict[str, float]:
    """The cost of a pass of one row, and what bounds it: its weights at the rate at which this machine reads memory."""
    facts = {"seconds": seconds, "weights_bytes": llm.engine.model.n_bytes}
    if isinstance(llm.kernels, NativeKernels):
        facts["bytes_per_second"] = read_rate(load(), min(llm.engine.model.n_bytes, MOST_READ))
    return facts


def peak_memory() -> int | None:
    """The most memory that this process has held at once, in bytes; None where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        pass
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None


def _encode(llm: LLM, prompt: Prompt) -> list[int]:
    """Token ids, laid out before anything is timed."""
    ids = prompt.encode(llm.tokenizer)
    if len(ids) >= llm.engine.max_len:
        raise ConfigError(f"{prompt.id} has {len(ids)} tokens, which leaves no room in the context of {llm.engine.max_len}")
    return ids


def _check(prompt: Prompt, result: Result, expected: tuple[int, ...]) -> None:
    if result.tokens != expected:
        at = next(
            (i for i, (a, b) in enumerate(zip(result.tokens, expected, strict=False)) if a != b),
            min(len(result.tokens), len(expected)),
        )
        raise Changed(f"the runs of {prompt.id} gave different tokens, from token {at} on")


def _timing(mode: str, landing: _Landing, turn: int, temperature: float) -> Timing:
    flight, result = landing.flight, landing.result
    first = next((moment for moment, tokens in flight.deliveries if tokens), None)
    return Timing(
        mode=mode,
        prompt=flight.prompt.id,
        task=flight.prompt.task,
        turn=turn,
        prompt_tokens=result.prompt_tokens,
        tokens=len(result.tokens),
        seconds=flight.deliveries[-1][0] - flight.began,
        first_token_seconds=None if first is None else first - flight.began,
        gaps=gaps(flight.deliveries),
        temperature=temperature,
        stats=result.stats,
    )


def _provenance(llm: LLM, prompts: Sequence[Prompt]) -> dict[str, Any]:
    return provenance(
        model=model_name(llm.name),
        precision=llm.precision,
        kv_format=llm.kv_format,
        kernels=llm.kernels.name,
        prompts=len(prompts),
        prompts_sha256=digest(list(prompts)),
    )


def _settings(llm: LLM, plan: Plan) -> dict[str, Any]:
    return {
        "speculation": [drafter.name for drafter in llm.engine.drafters],
        "drafter": next((drafter.card["name"] for drafter in llm.engine.drafters if drafter.card), None),
        "max_nodes": llm.config.speculation.max_nodes,
        **llm.engine.acceptance.facts,
        "temperature": list(plan.temperatures),
        "max_tokens": plan.params.max_tokens,
        "ignore_eos": plan.params.ignore_eos,
        "seed": plan.params.seed,
        "concurrency": plan.concurrency,
        "repeats": plan.repeats,
    }
