"""``specdec train``: a drafter for a model, from its own answers to some prompts."""

from __future__ import annotations

import dataclasses
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specdec.cli import render
from specdec.cli.options import TargetOptions, command, option
from specdec.config import ConfigError

if TYPE_CHECKING:
    from specdec.train.evaluate import Measured
    from specdec.train.losses import Losses
    from specdec.train.settings import Kind

_DATA, _TRAINING = "Data", "Training"
_LINE_SECONDS = 30.0
"""Where no bar can be drawn, a line is printed this often."""


@dataclass(frozen=True)
class DataOptions:
    """What is learned from."""

    prompts: Annotated[
        Path | None, option(_DATA, help="JSON lines with prompt, messages, turns or text, and perhaps task.")
    ] = None
    answers: Annotated[
        Path | None,
        option(_DATA, help="Answers that exist already (answers.jsonl of another run); no prompts are needed then."),
    ] = None
    max_tokens: Annotated[int, option(_DATA, help="Most tokens of an answer.")] = 224
    held_out: Annotated[float | None, option(_DATA, help="Share of the prompts that is kept to measure on.")] = None
    cache: Annotated[
        Path | None, option(_DATA, help="Folder of the target's hidden states, which runs may share; inside --out by default.")
    ] = None
    cache_gb: Annotated[float | None, option(_DATA, help="Most disk for hidden states, at most 10.")] = None


@dataclass(frozen=True)
class TrainingOptions:
    """How it learns."""

    steps: Annotated[int | None, option(_TRAINING, help="Tokens ahead that it learns to look.")] = None
    vocabulary: Annotated[int | None, option(_TRAINING, help="Tokens it can draft, the most frequent ones; 0 for all.")] = None
    taps: Annotated[str | None, option(_TRAINING, help="Layers whose outputs it sees, joined by commas.")] = None
    epochs: Annotated[float | None, option(_TRAINING, help="Passes over the answers, at most.")] = None
    minutes: Annotated[float | None, option(_TRAINING, help="Minutes of training, at most.")] = None
    batch: Annotated[int | None, option(_TRAINING, help="Positions in a step of the optimiser.")] = None
    rate: Annotated[float | None, option(_TRAINING, help="Highest learning rate.")] = None
    hard: Annotated[float | None, option(_TRAINING, help="Share of the likeliest token, against the law, in the loss.")] = None
    evaluations: Annotated[int | None, option(_TRAINING, help="Measurements in the course of a run.")] = None
    patience: Annotated[int | None, option(_TRAINING, help="Stop after this many without improvement; 0: never.")] = None
    seed: Annotated[int | None, option(_TRAINING, help="Same seed, same drafter.")] = None

    def given(self) -> dict[str, Any]:
        values = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        if self.taps is not None:
            values["taps"] = _layers("--taps", self.taps)
        return values


def _layers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(layer) for layer in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} needs layers joined by commas, such as 2,15,27, got {text!r}") from None


From = Annotated[
    str | None,
    option(_TRAINING, "--from", help="Start as this trained head: a folder, or the alias of one that ships."),
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder of the run and its result; a run that is there is taken up.")]
_NO_TARGET, _NO_DATA, _NO_TRAINING = TargetOptions(), DataOptions(), TrainingOptions()


@command
def medusa(
    out: Out,
    correction: Annotated[
        str, option(_TRAINING, help="What a head sees of the tokens between: none, markov, hydra.")
    ] = "hydra",
    blocks: Annotated[int, option(_TRAINING, help="Residual blocks in each head.")] = 1,
    before: From = None,
    target: TargetOptions = _NO_TARGET,
    data: DataOptions = _NO_DATA,
    training: TrainingOptions = _NO_TRAINING,
) -> None:
    """Heads that each foresee one position further ahead (Medusa), corrected by the tokens between (Hydra)."""
    if correction not in ("none", "markov", "hydra"):
        raise ConfigError(f"--correction must be none, markov or hydra, got {correction!r}")
    _train("medusa", out, target, data, training, before=before, correction=correction, blocks=blocks)


@command
def eagle(
    out: Out,
    style: Annotated[str, option(_TRAINING, help="eagle3, or eagle for versions 1 and 2.")] = "eagle3",
    before: From = None,
    target: TargetOptions = _NO_TARGET,
    data: DataOptions = _NO_DATA,
    training: TrainingOptions = _NO_TRAINING,
) -> None:
    """One decoder layer over the target's hidden states that goes on from its own (EAGLE)."""
    _train("eagle", out, target, data, training, style, before)


@command
def mtp(
    out: Out,
    modules: Annotated[int, option(_TRAINING, help="Modules of their own; the last is applied again after that.")] = 1,
    before: From = None,
    target: TargetOptions = _NO_TARGET,
    data: DataOptions = _NO_DATA,
    training: TrainingOptions = _NO_TRAINING,
) -> None:
    """Modules for multi-token prediction, as in DeepSeek-V3."""
    _train("mtp", out, target, data, training, before=before, modules=modules)


@command
def draft(
    out: Out,
    layers: Annotated[
        str | None, option(_TRAINING, help="Layers of the model that it starts as; by default the first three.")
    ] = None,
    target: TargetOptions = _NO_TARGET,
    data: DataOptions = _NO_DATA,
    training: TrainingOptions = _NO_TRAINING,
) -> None:
    """A small model of a few of the model's own layers, distilled: a model folder for --drafter, or for --model."""
    kept: dict[str, Any] = {} if layers is None else {"layers": _layers("--layers", layers)}
    _train("draft", out, target, data, training, **kept)


@command
def narrow(
    head: Annotated[Path, typer.Argument(help="Folder of a trained head.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the result.")],
    answers: Annotated[Path, option(_DATA, help="The answers that it was trained on (answers.jsonl of its run).")],
    vocabulary: Annotated[int, option(_TRAINING, help="Tokens that it can draft then, the most frequent ones.")] = 4096,
    held_out: Annotated[float, option(_DATA, help="Share of the prompts that its training kept to measure on.")] = 0.03,
    cache: Annotated[
        Path | None, option(_DATA, help="Folder of the target's hidden states, which runs may share; inside --out by default.")
    ] = None,
    target: TargetOptions = _NO_TARGET,
) -> None:
    """A trained head that drafts fewer tokens and takes less time for each, measured again."""
    from specdec.train import narrow as narrowing

    if not answers.is_file():
        raise ConfigError(f"--answers: there is no file {answers}")
    llm = target.load(max_sequences=1)
    covered, found = narrowing.narrow(llm, head, vocabulary, answers, out, cache or out / "features", held_out)
    render.out().print(f"{out}: {vocabulary} tokens, {covered:.1%} of those said; tau {found.tau:.3f} predicted for chains")


def _train(
    kind: Kind,
    out: Path,
    target: TargetOptions,
    data: DataOptions,
    training: TrainingOptions,
    style: str | None = None,
    before: str | None = None,
    **more: Any,
) -> None:
    from specdec.bench.prompts import load as read_prompts
    from specdec.models.head_files import load_head
    from specdec.models.source import resolve_drafter
    from specdec.train import session, settings
    from specdec.train.data import make_answers

    more |= {name: value for name in ("held_out", "cache_gb") if (value := getattr(data, name)) is not None}
    head = None if before is None else load_head(resolve_drafter(before).path, name=before)
    if head is not None:
        more |= {"vocabulary": head.config.vocabulary or 0, "rate": settings.LEARNED_RATE}
    config = settings.TrainConfig(**{**settings.defaults(kind, style), **more, **training.given()})
    if (data.prompts is None) == (data.answers is None):
        raise ConfigError("give --prompts, which the model then answers, or --answers that it gave before, and not both")
    prompts = None if data.prompts is None else read_prompts(data.prompts)
    if prompts is not None and len(prompts) <= session.FEWEST:
        told = f"--prompts: {len(prompts)} prompts are too few: more than {session.FEWEST} are needed"
        raise ConfigError(told)
    if data.answers is not None and not data.answers.is_file():
        raise ConfigError(f"--answers: there is no file {data.answers}")
    out.mkdir(parents=True, exist_ok=True)
    llm = target.load(max_sequences=16)
    session.check(llm, config, head)
    answers = data.answers or out / "answers.jsonl"
    with _Bar() as bar:
        if prompts is not None:
            make_answers(llm, prompts, answers, data.max_tokens, lambda done, tokens: bar.answering(done, len(prompts), tokens))
        trained = session.train(llm, config, answers, out, data.cache or out / "features", bar, head)
    session.save(llm, trained, out)
    console = render.out()
    console.print(f"{out}: tau {trained.measured['tau']:.2f} predicted for chains, see report.md")


class _Bar(AbstractContextManager["_Bar"]):
    """Shows how a run goes on stderr: a bar on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self.console = render.notes()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(20),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=self.console, disable=not sys.stderr.isatty())
        self.task = self.bar.add_task("loading", total=1.0)
        self.tau, self.printed = 0.0, 0.0

    def __enter__(self) -> _Bar:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def answering(self, done: int, total: int, tokens: int) -> None:
        self._show(done / total, f"answers {done}/{total}, {tokens} tokens")

    def note(self, text: str) -> None:
        self.console.print(text)

    def trained(self, progress: float, anchors_per_second: float, losses: Losses) -> None:
        loss = sum(losses.by_step) / len(losses.by_step)
        accuracy = " ".join(f"{a:.2f}" for a in losses.accuracy)
        self._show(progress, f"loss {loss:.3f} | accuracy {accuracy} | tau {self.tau:.2f} | {anchors_per_second:.0f}/s")

    def measured(self, progress: float, measured: Measured, best: bool) -> None:
        self.tau = measured.tau
        own = " ".join(f"{a:.3f}" for a in measured.own)
        groups = ", ".join(f"{group} {measured.tau_of(group):.2f}" for group in sorted(measured.passes) if group != "all")
        self.note(
            f"{progress:4.0%}: predicted tau {measured.tau:.3f}{' (best)' if best else ''} ({groups}); right by step {own}"
        )

    def _show(self, progress: float, text: str) -> None:
        self.bar.update(self.task, completed=min(1.0, progress), description=text)
        if self.bar.disable and time.monotonic() - self.printed > _LINE_SECONDS:
            self.printed = time.monotonic()
            self.note(f"{progress:4.0%}: {text}")


app = typer.Typer(name="train", no_args_is_help=True, help="Train a drafter for a model, on its own answers to some prompts.")
for verb in (medusa, eagle, mtp, draft, narrow):
    app.command()(verb)
