"""specdec and the engines people use, side by side: the same prompts, cap and threads, one request at a time.

    python bench/peers/run.py [--engines specdec llama_cpp] [--tasks chat code] [--limit 12] [--json out.json]

Engines take turns prompt by prompt, mode by mode, with a short pause between requests, so that a change of the machine's
pace meets them all and no engine's idling threads disturb the next. An engine that is not installed, cannot run here or
fails on its way is named with the reason, and the others go on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import asked
from asked import Asked
from engines import ENGINES, EngineKind, missing, peers_folder
from protocol import CONTEXT, Request
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table
from workers import UnavailableError, Worker, WorkerError

from specdec.bench.result import ALL, Report, Summary, Timing, save
from specdec.bench.summary import summarise
from specdec.config import ConfigError
from specdec.models.errors import ModelError

WARM_UP = 8
"""Tokens of the request that each mode answers before the first measured one."""
SHORT = {"summarise": "sum", "question": "ask", "translate": "trans"}
"""Headings of tasks whose names would not fit beside six others in 80 columns."""
UNKNOWN = {"p50": None, "p99": None}
"""Gaps between tokens: workers time whole answers."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How to measure."""

    max_tokens: int
    repeats: int
    pause: float
    """Seconds between requests."""
    prompt_processing: int
    """Length of the prompt whose processing is timed; 0 leaves it out."""
    prompt_repeats: int


@dataclass(frozen=True, slots=True)
class PromptTiming:
    mode: str
    prompt_tokens: int
    seconds: float
    """Median, from the request to the first token."""
    tokens_per_second: float


@dataclass(slots=True)
class Comparison:
    """The engines that still run, what they did, and why the others do not."""

    workers: dict[str, Worker]
    """By the engine's title."""
    plan: Plan
    skipped: list[dict[str, str]]
    runs: list[Timing] = field(default_factory=list)
    prompt_processing: list[PromptTiming] = field(default_factory=list)

    @property
    def modes(self) -> list[str]:
        return [_name(title, mode) for title, worker in self.workers.items() for mode in worker.modes]

    def warm_up(self, prompt: Asked) -> None:
        for title, mode in self._order(0):
            self._ask(title, mode, prompt, min(WARM_UP, self.plan.max_tokens))

    def measure(self, prompts: Sequence[Asked], served: Callable[[Timing], None]) -> None:
        """Every prompt through every mode, ``repeats`` times; every second turn goes through the modes backwards."""
        for turn in range(self.plan.repeats):
            for prompt in prompts:
                for title, mode in self._order(turn):
                    answer = self._ask(title, mode, prompt, self.plan.max_tokens)
                    if answer:
                        run = Timing(
                            mode=_name(title, mode),
                            prompt=prompt.id,
                            task=prompt.task,
                            turn=turn,
                            prompt_tokens=len(prompt.token_ids),
                            tokens=len(answer["tokens"]),
                            seconds=answer["seconds"],
                            first_token_seconds=answer["first_token_seconds"],
                            gaps=UNKNOWN,
                        )
                        self.runs.append(run)
                        served(run)

    def measure_prompts(self, prompts: Sequence[Asked]) -> None:
        """Time to one token after long prompts, in each engine's first mode: the others process prompts no differently."""
        seconds: dict[str, list[float]] = {}
        for turn, prompt in enumerate(prompts):
            for title, mode in self._order(turn):
                first = title in self.workers and mode == self.workers[title].modes[0]
                answer = self._ask(title, mode, prompt, 1) if first else None
                if answer:
                    seconds.setdefault(title, []).append(answer["seconds"])
        for title in self.workers:
            median, n = statistics.median(seconds[title]), len(prompts[0].token_ids)
            self.prompt_processing.append(PromptTiming(_name(title, self.workers[title].modes[0]), n, median, n / median))

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()

    def _order(self, turn: int) -> list[tuple[str, str]]:
        pairs = [(title, mode) for title, worker in self.workers.items() for mode in worker.modes]
        return pairs if turn % 2 == 0 else pairs[::-1]

    def _ask(self, title: str, mode: str, prompt: Asked, max_tokens: int) -> dict[str, Any] | None:
        """An answer, or None of an engine that has failed: what it did before no longer counts, as prompts are missing."""
        if title not in self.workers:
            return None
        time.sleep(self.plan.pause)
        try:
            return self.workers[title].ask(Request(prompt.id, prompt.text, prompt.token_ids, max_tokens, mode))
        except WorkerError as error:
            worker = self.workers.pop(title)
            worker.close()
            names = [_name(title, theirs) for theirs in worker.modes]
            self.runs = [run for run in self.runs if run.mode not in names]
            self.skipped.append({"engine": title, "reason": str(error)})
            return None


def start(
    kinds: Sequence[EngineKind], command: Callable[[EngineKind], list[str]], logs: Path
) -> tuple[dict[str, Worker], list[dict[str, str]]]:
    """The workers that come up, by title, and the engines that do not, with the reason."""
    workers: dict[str, Worker] = {}
    skipped = []
    for kind in kinds:
        reason = missing(kind)
        if reason is None:
            try:
                workers[kind.title] = Worker(kind.title, command(kind), logs / f"{kind.name}.log")
                continue
            except (UnavailableError, WorkerError, ModelError) as error:
                reason = str(error)
        skipped.append({"engine": kind.title, "reason": reason})
    return workers, skipped


def tables(comparison: Comparison, summary: Sequence[Summary]) -> list[Table]:
    """Tokens per second by task; then of decoding alone, the time to the first token and the rate of prompts.

    Two tables, as one would be wider than most terminals.
    """
    tasks = list(dict.fromkeys(row.task for row in summary if row.task != ALL))
    by_task = Table(title="tokens per second by task, prompts included", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    parts = Table(title="tokens per second by part", box=SIMPLE_HEAD)
    for view in (by_task, parts):
        view.add_column("mode", no_wrap=True)
    for task in [*tasks, ALL]:
        by_task.add_column(SHORT.get(task, task), justify="right", no_wrap=True)
    for heading in ("decoding", "prompt", "first token, ms"):
        parts.add_column(heading, justify="right", no_wrap=True)
    rates = {row.mode: row.tokens_per_second for row in comparison.prompt_processing}
    for mode in comparison.modes:
        rows = {row.task: row for row in summary if row.mode == mode}
        shown = mode.replace("prompt lookup", "lookup")
        by_task.add_row(shown, *(f"{rows[task].tokens_per_second:.1f}" for task in [*tasks, ALL]))
        first, decoding = rows[ALL].first_token_seconds, rows[ALL].decode_tokens_per_second
        cells = ["-" if decoding is None else f"{decoding:.1f}", f"{rates[mode]:.0f}" if mode in rates else ""]
        parts.add_row(shown, *cells, "-" if first is None else f"{1000 * first:.0f}")
    return [by_task, parts]


def _name(title: str, mode: str) -> str:
    return f"{title} {mode}"


def _parse() -> argparse.Namespace:
    parser = asked.parser(__doc__, max_tokens=128)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES), metavar="ENGINE")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between requests")
    parser.add_argument("--prompt-processing", type=int, default=1000, metavar="TOKENS", help="0 leaves it out")
    parser.add_argument("--prompt-repeats", type=int, default=5)
    arguments = parser.parse_args()
    for name in ("max_tokens", "threads", "repeats", "prompt_repeats"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 <= arguments.prompt_processing < CONTEXT:
        parser.error(f"--prompt-processing must be below {CONTEXT}")
    return arguments


def main() -> None:
    arguments = _parse()
    console = Console(stderr=True)
    kinds = [ENGINES[name] for name in arguments.engines]
    try:
        questions = asked.read(arguments, CONTEXT)
    except (ConfigError, ModelError) as error:
        sys.exit(str(error))
    prompts = questions.asked

    def command(kind: EngineKind) -> list[str]:
        return [str(kind.python), str(kind.script), *questions.arguments(kind, arguments.threads)]

    plan = Plan(arguments.max_tokens, arguments.repeats, arguments.pause, arguments.prompt_processing, arguments.prompt_repeats)
    workers, skipped = start(kinds, command, peers_folder() / "logs")
    comparison = Comparison(workers, plan, skipped)
    try:
        with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
            bar = progress.add_task("warming up", total=len(prompts) * len(comparison.modes) * plan.repeats)
            comparison.warm_up(prompts[0])
            comparison.measure(
                prompts, lambda run: progress.update(bar, advance=1, description=f"{run.prompt}, turn {run.turn + 1}")
            )
        if plan.prompt_processing:
            long = asked.long_prompts(prompts, questions.tokenizer, plan.prompt_processing, plan.prompt_repeats)
            comparison.measure_prompts(long)
        engines = {title: worker.versions for title, worker in comparison.workers.items()}
    finally:
        comparison.close()
    summary = summarise(comparison.runs, comparison.modes)
    for skip in comparison.skipped:
        console.print(f"skipped {skip['engine']}: {skip['reason']}", markup=False)
    if not comparison.workers:
        sys.exit("no engine could be measured")
    for view in tables(comparison, summary):
        Console().print(view)
    if arguments.json:
        report = Report(
            provenance=questions.provenance(engines, arguments.threads),
            settings={**asdict(plan), "temperature": 0.0, "concurrency": 1, "prompts": len(prompts)},
            modes=tuple(comparison.modes),
            runs=tuple(comparison.runs),
            v={},
            summary=tuple(summary),
            peak_memory_bytes=None,
            prompt_processing=tuple(asdict(row) for row in comparison.prompt_processing),
            skipped=tuple(comparison.skipped),
        )
        save(report, arguments.json)


if __name__ == "__main__":
    main()
