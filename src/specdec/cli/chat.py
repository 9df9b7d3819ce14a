"""``specdec chat``: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from specdec.cli import render
from specdec.cli.options import GenerationConfig, ModelOptions, SamplingOptions, command, utf8_input
from specdec.config import AUTO, ConfigError

if TYPE_CHECKING:
    from specdec.config import SamplingParams
    from specdec.llm import LLM

_HELP = "/reset forgets the conversation, /quit ends (so does Ctrl-D); Ctrl-C stops an answer"


@command
def chat(
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    model: ModelOptions = ModelOptions(),  # noqa: B008 - replaced by one option per field
    generation_config: GenerationConfig = AUTO,
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008
) -> None:
    """Talk with a model; colours show which tokens a drafter had foreseen.

    Sampling is greedy unless --temperature is given, or the model's generation_config.json asks for something else. From a
    pipe, each line is a message.
    """
    sampling.params({})  # what is wrong with them is told before anything is loaded
    llm = model.load(progress=True, generation_config=generation_config)
    params = sampling.params(llm.generation_defaults)
    if not llm.tokenizer.has_chat_template:
        raise ConfigError("this model has no chat template: use specdec generate")
    Conversation(llm, params, system).run(interactive=sys.stdin.isatty())


class Conversation:
    """What was said so far, and the loop around it."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._opening = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._opening)
        self._out, self._notes = render.out(), render.notes()

    def run(self, *, interactive: bool) -> None:
        """Read and answer until the input ends."""
        if interactive:
            self._notes.print(Text(f"{self._llm.name}. {_HELP}", style="dim"))
            if drafters := self._llm.engine.drafters:
                self._notes.print(render.legend(drafter.name for drafter in drafters))
        for line in _lines(interactive):
            match line.strip():
                case "":
                    pass
                case "/quit" | "/exit":
                    return
                case "/reset":
                    self._messages = list(self._opening)
                    self._notes.print(Text("forgotten", style="dim"))
                case "/help":
                    self._notes.print(Text(_HELP, style="dim"))
                case command if command.startswith("/") and " " not in command:
                    self._notes.print(f"unknown command {command}: {_HELP}")
                case _:
                    self._answer(line)

    def _answer(self, line: str) -> None:
        """Answer one message; a message that cannot be answered is not remembered."""
        from specdec.llm import ChatTemplateError, RequestError

        messages = [*self._messages, {"role": "user", "content": line}]
        try:
            stream = self._llm.stream(messages, self._params)
        except (ChatTemplateError, RequestError) as error:
            self._notes.print(f"error: {error} (/reset forgets the conversation)")
            return
        text = ""
        with stream, _interruptible() as interrupted:
            for chunk in stream:
                text += chunk.text
                render.print_chunk(self._out, chunk)
                if interrupted:
                    break
            render.write(self._out, "\n", "")
            self._out.file.flush()
            results = stream.results
        self._messages = [*messages, {"role": "assistant", "content": text}]
        if not results:
            self._notes.print(Text("stopped", style="dim"))
        for result in results:
            self._notes.print(f"error: {result.error}" if result.error else render.summary([result]))


def _lines(interactive: bool) -> Iterator[str]:
    """Lines of input; an interrupt at the prompt ends them as the end of the input does."""
    if not interactive:
        with utf8_input("standard input"):
            yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401 - gives input() editing and history

    while True:
        try:
            with utf8_input("standard input"):
                line = input("> ")
            yield line
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return


@contextmanager
def _interruptible() -> Iterator[list[bool]]:
    """The list given fills at Ctrl-C, so that what was said so far is kept; a second Ctrl-C ends the program."""
    pressed: list[bool] = []

    def press(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
