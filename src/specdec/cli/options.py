"""Options that several commands share, and the one place where errors become a line and an exit code."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import typer

from specdec.config import (
    ACCEPTANCES,
    AUTO,
    DEFAULT_MODEL,
    DRAFTERS,
    KV_FORMATS,
    PRECISIONS,
    ConfigError,
    Precision,
    SamplingParams,
    SpeculationConfig,
)
from specdec.models.errors import ModelError

if TYPE_CHECKING:
    from specdec.llm import LLM

BAD_INPUT = 2
INTERRUPTED = 130

_MODEL, _SAMPLING = "Model", "Sampling"


def option(panel: str, *names: str, help: str, **settings: Any) -> Any:
    """An option, under the panel of the help page that it belongs to."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


ModelName = Annotated[str, option(_MODEL, "--model", "-m", help="Alias, Hugging Face folder, .gguf file, or hub id.")]
Revision = Annotated[str | None, option(_MODEL, help="Branch, tag or commit of a hub id.")]
PrecisionName = Annotated[str, option(_MODEL, help=f"One of {', '.join(PRECISIONS)}.")]
Threads = Annotated[int | None, option(_MODEL, help="Threads of the arithmetic.")]
Device = Annotated[str, option(_MODEL, help="Where the model runs.")]
GenerationConfig = Annotated[
    str,
    option(_MODEL, help="Defaults of sampling: auto (the model's generation_config.json), none, or a folder that holds one."),
]


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it runs."""

    model: ModelName = DEFAULT_MODEL
    revision: Revision = None
    precision: PrecisionName = "auto"
    speculation: Annotated[
        str, option(_MODEL, help=f"off, auto, or drafters joined by commas: {', '.join(DRAFTERS)}. Changes the speed only.")
    ] = "auto"
    drafter: Annotated[
        str | None,
        option(_MODEL, help="The trained drafter: folder, hub id or alias of a head, or a model to draft with."),
    ] = None
    acceptance: Annotated[
        str,
        option(_MODEL, help=f"How drafted tokens are accepted, one of {', '.join(ACCEPTANCES)}; see docs/rules.md."),
    ] = SpeculationConfig().acceptance
    max_nodes: Annotated[int | None, option(_MODEL, help="Most drafted tokens that one pass verifies.")] = None
    threads: Threads = None
    max_len: Annotated[int | None, option(_MODEL, help="Longest prompt and output together, in tokens.")] = None
    kv_format: Annotated[
        str, option(_MODEL, help=f"What keys and values are held in, one of {', '.join(KV_FORMATS)}; see docs/quality.md.")
    ] = AUTO
    device: Device = "cpu"

    def load(self, *, progress: bool, generation_config: str = "none", **settings: Any) -> LLM:
        """The model; commands that sample by rules of their own need no ``generation_config``."""
        from specdec.llm import LLM

        _catch_interrupts()
        nodes = {} if self.max_nodes is None else {"max_nodes": self.max_nodes}
        return LLM(
            self.model,
            revision=self.revision,
            precision=cast(Precision, self.precision),
            speculation=SpeculationConfig.parse(self.speculation, acceptance=self.acceptance, **nodes),
            drafter=self.drafter,
            threads=self.threads,
            max_len=self.max_len,
            kv_format=self.kv_format,
            device=self.device,
            generation_config=generation_config,
            progress=progress,
            **settings,
        )


@dataclass(frozen=True)
class TargetOptions:
    """Which model, and how it runs, where nothing is drafted."""

    model: ModelName = DEFAULT_MODEL
    revision: Revision = None
    precision: PrecisionName = "auto"
    threads: Threads = None
    device: Device = "cpu"

    def load(self, **settings: Any) -> LLM:
        """Without drafters and without the self-test."""
        from specdec.llm import LLM

        _catch_interrupts()
        return LLM(
            self.model,
            revision=self.revision,
            precision=cast(Precision, self.precision),
            threads=self.threads,
            device=self.device,
            generation_config="none",
            speculation="off",
            self_test=False,
            **settings,
        )


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen; what is not given is as the model's generation_config.json has it, or else as the library has it,
    except that the command line is greedy."""

    temperature: Annotated[float | None, option(_SAMPLING, "--temperature", "-t", help="0 takes the most likely token.")] = None
    top_k: Annotated[int | None, option(_SAMPLING, help="Keep the k most likely tokens.")] = None
    top_p: Annotated[float | None, option(_SAMPLING, help="Keep the most likely tokens of this total probability.")] = None
    min_p: Annotated[float | None, option(_SAMPLING, help="Keep tokens this likely relative to the most likely one.")] = None
    repetition_penalty: Annotated[float | None, option(_SAMPLING, help="Against tokens of prompt and output; 1 is off.")] = None
    frequency_penalty: Annotated[float | None, option(_SAMPLING, help="Against tokens of the output, per occurrence.")] = None
    presence_penalty: Annotated[float | None, option(_SAMPLING, help="Against tokens of the output, once.")] = None
    logit_bias: Annotated[list[str] | None, option(_SAMPLING, metavar="ID=VALUE", help="Add to a logit; repeatable.")] = None
    bad_word: Annotated[list[str] | None, option(_SAMPLING, help="Text never to emit; repeatable.")] = None
    min_tokens: Annotated[int | None, option(_SAMPLING, help="No end before this many tokens.")] = None
    max_tokens: Annotated[int | None, option(_SAMPLING, help="Most tokens to emit.")] = None
    stop: Annotated[list[str] | None, option(_SAMPLING, help="End before this text; repeatable.")] = None
    stop_token_id: Annotated[list[int] | None, option(_SAMPLING, help="End at this token; repeatable.")] = None
    ignore_eos: Annotated[bool, option(_SAMPLING, "--ignore-eos", help="Go on past the model's end token.")] = False
    seed: Annotated[int | None, option(_SAMPLING, help="Same seed, same tokens; drawn afresh if not given.")] = None

    def params(self, defaults: Mapping[str, Any], /, **more: Any) -> SamplingParams:
        """Sampling parameters, with ``more`` where it is not None, and ``defaults`` for what is not given.

        Raises:
            ConfigError: a value is out of range.
        """
        values = {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "logit_bias": _biases(self.logit_bias) if self.logit_bias else None,
            "bad_words": self.bad_word,
            "stop_token_ids": self.stop_token_id,
            **more,
        }
        del values["bad_word"], values["stop_token_id"]
        given = {name: value for name, value in values.items() if value is not None}
        return SamplingParams(**{"temperature": 0.0, **defaults, **given})


def _biases(texts: list[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for text in texts:
        token, _, value = text.partition("=")
        try:
            biases[int(token)] = float(value)
        except ValueError:
            raise ConfigError(f"--logit-bias needs ID=VALUE, such as 1234=-5, got {text!r}") from None
    return biases


def _catch_interrupts() -> None:
    """From here on Ctrl-C is an exception: what ``specdec.__main__`` spares it has been imported."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def command(run: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function some of whose parameters are groups of options.

    A parameter whose type is one of the dataclasses above becomes one option per field. Errors that a user can do something
    about become one line on stderr and the exit code for bad input; Ctrl-C becomes its exit code.
    """
    hints = get_type_hints(run, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters = []
    for parameter in inspect.signature(run).parameters.values():
        group = groups.get(parameter.name)
        if group is None:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY))
            continue
        fields = get_type_hints(group, include_extras=True)
        parameters += [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=fields[f.name])
            for f in dataclasses.fields(cast(Any, group))
        ]

    @functools.wraps(run)
    def wrapped(**values: Any) -> None:
        for name, group in groups.items():
            names = [f.name for f in dataclasses.fields(cast(Any, group))]
            values[name] = cast(Any, group)(**{field: values.pop(field) for field in names})
        with_errors(lambda: run(**values))

    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


def with_errors(run: Callable[[], None]) -> None:
    """Run a command; what a user got wrong, or cannot be done here, is told in one line."""
    try:
        run()
    except KeyboardInterrupt:
        typer.echo(err=True)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        raise
    except Exception as error:
        if not isinstance(error, (ConfigError, ModelError, OSError, *_engine_errors())):
            raise
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from error


def given(ctx: typer.Context) -> dict[str, str]:
    """The options that stand on the command line: their parameters' names, and how they are written."""
    return {
        parameter.name: parameter.opts[0]
        for parameter in ctx.command.params
        if parameter.name and (source := ctx.get_parameter_source(parameter.name)) and source.name == "COMMANDLINE"
    }


def refuse_beside(ctx: typer.Context, option: str, group: type[Any]) -> None:
    """Raise where an option of a group stands beside one that leaves it without effect."""
    written = given(ctx)
    for name in (f.name for f in dataclasses.fields(group)):
        if name in written:
            raise ConfigError(f"{written[name]} has no effect beside {option}: leave one out")


def writable(option: str, path: Path | None) -> None:
    """Raise, before any work is done, where a file could not be written for sure."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{option}: the folder {path.parent} does not exist")
    if path is not None and path.is_dir():
        raise ConfigError(f"{option}: {path} is a folder, not a file")


@contextmanager
def utf8_input(name: str) -> Iterator[None]:
    """Reading text from a user: bytes that are no text are the input's fault, and the error says whose."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text: {error}") from error


def _engine_errors() -> tuple[type[Exception], ...]:
    """Errors of modules that load torch; there cannot be one before they are loaded."""
    if "torch" not in sys.modules:
        return ()
    from specdec.kernels.library import KernelError
    from specdec.llm import ChatTemplateError, RequestError

    return KernelError, ChatTemplateError, RequestError
