"""``specdec generate``: one prompt, one answer or several."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli import compare as comparison
from specdec.cli import render
from specdec.cli.options import GenerationConfig, ModelOptions, SamplingOptions, command, utf8_input
from specdec.config import AUTO, ConfigError

if TYPE_CHECKING:
    from specdec.config import SamplingParams
    from specdec.llm import LLM, Result

FAILED = 1


@command
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from standard input.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file; - is standard input.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message, for models with a chat template.")] = None,
    model: ModelOptions = ModelOptions(),  # noqa: B008 - replaced by one option per field
    generation_config: GenerationConfig = AUTO,
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008
    n: Annotated[int, typer.Option("--n", help="Answers, each with a seed of its own.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="Give log-probabilities, with this many of the likeliest (--json).")
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same for the prompt's tokens, from the second one on (--json).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with everything, and nothing else.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run it without speculation too; exit code 1 if any token differs.")
    ] = False,
) -> None:
    """Answer a prompt.

    A model with a chat template is asked the prompt as a user's message; --raw continues the text instead, as a model
    without one always does. Sampling is greedy unless --temperature is given, or the model's generation_config.json asks for
    something else.
    """
    text = _read_prompt(prompt, prompt_file)
    more = {"n": n, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    sampling.params({}, **more)  # what is wrong with them is told before anything is loaded
    if (logprobs is not None or prompt_logprobs is not None) and not as_json:
        raise ConfigError("--logprobs and --prompt-logprobs show only in --json")
    llm = model.load(progress=not as_json, generation_config=generation_config)
    params = sampling.params(llm.generation_defaults, **more)
    if system is not None and (raw or not llm.tokenizer.has_chat_template):
        raise ConfigError("--system needs a chat template: drop --raw, or choose a model that has one")
    if compare and llm.engine.acceptance.by_chance and not params.greedy:
        raise ConfigError(
            f"--compare asks for the tokens of plain decoding, which acceptance={model.acceptance} does not promise above "
            "temperature 0: leave --compare out, or take --acceptance coupled"
        )
    request: str | list[dict[str, str]] = text
    if llm.tokenizer.has_chat_template and not raw:
        request = [{"role": "system", "content": system}] if system is not None else []
        request.append({"role": "user", "content": text})

    results = _answer(llm, request, params, show=not as_json)
    report = comparison.compare(llm, request, params, results) if compare else None
    if as_json:
        typer.echo(json.dumps(_json(llm, results, report), ensure_ascii=False, allow_nan=False))
    elif report is not None:
        render.notes().print(report.describe())
    for result in results:
        if result.error:
            typer.echo(f"error: {result.error}", err=True)
    if any(result.error for result in results) or (report is not None and not report.identical):
        raise typer.Exit(FAILED)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise ConfigError("give a prompt, or --prompt-file, and not both; - reads standard input")
    if prompt == "-" or str(file) == "-":
        with utf8_input("standard input"):
            return sys.stdin.read()
    if file is None:
        return prompt or ""
    with utf8_input(str(file)):
        return file.read_text(encoding="utf-8")


def _answer(llm: LLM, request: str | list[dict[str, str]], params: SamplingParams, *, show: bool) -> list[Result]:
    """Run the request; a single answer shows while it comes, several show one after the other."""
    console = render.out()
    with llm.stream(request, params) as stream:
        for chunk in stream:
            if show and params.n == 1:
                render.print_chunk(console, chunk)
        results = sorted(stream.results, key=lambda result: result.choice)
    if show:
        if params.n > 1:
            for result in results:
                render.write(console, f"[{result.choice}] {result.text}\n", "")
        else:
            render.write(console, "\n", "")
        console.file.flush()
        render.notes().print(render.summary(results))
    return results


def _json(llm: LLM, results: list[Result], report: comparison.Comparison | None) -> dict[str, Any]:
    """One answer lies flat in the object, several are a list in it."""
    answers = [render.result_json(result, llm) for result in results]
    return {
        **render.run_json(llm),
        **(answers[0] if len(answers) == 1 else {"choices": answers}),
        **({} if report is None else {"compare": report.as_dict()}),
    }
