"""What commands show: answers coloured by where their tokens came from, and the line that sums an answer up."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

if TYPE_CHECKING:
    from specdec.llm import LLM
    from specdec.results import Chunk, Result
    from specdec.types import TokenLogprob

_COLOURS: Mapping[str, str] = {"ngram": "green", "suffix": "cyan", "recycling": "magenta"}
_OTHER = "yellow"


def out() -> Console:
    """The console of answers."""
    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)


def notes() -> Console:
    """The console of everything that is not part of an answer."""
    return Console(file=sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


def colour(source: str | None) -> str:
    """The style of tokens from a drafter; the target's own are plain."""
    return "" if source is None else _COLOURS.get(source, _OTHER)


def legend(drafters: Iterable[str]) -> Text:
    """What the colours mean."""
    text = Text().append("foreseen by ", style="dim")
    for i, name in enumerate(drafters):
        text.append(" or " if i else "", style="dim").append(name, style=colour(name))
    return text.append("; the rest is the model's own", style="dim")


def print_chunk(console: Console, chunk: Chunk) -> None:
    """Write a chunk's text without ending the line."""
    for text, source in chunk.pieces:
        write(console, text, colour(source))
    console.file.flush()


def write(console: Console, text: str, style: str) -> None:
    """Write a model's text as it is: printing would expand tabs and drop control characters."""
    coloured = console.color_system is not None and not console.no_color and not console.legacy_windows
    console.file.write(Style.parse(style).render(text) if coloured else text)


def summary(results: list[Result]) -> Text:
    """One line: tokens, passes, tokens per pass, speed, and what each drafter contributed."""
    tokens = sum(len(result.tokens) for result in results)
    passes = sum(result.stats["target_passes"] for result in results)
    seconds = max(result.seconds for result in results)
    accepted: dict[str, int] = {}
    for result in results:
        for name, count in result.stats["accepted_by_drafter"].items():
            accepted[name] = accepted.get(name, 0) + count
    line = f"{tokens} tokens in {passes} passes, {tokens / passes if passes else 0:.2f} per pass"
    text = Text().append(line, style="dim")
    text.append(f", {tokens / seconds:.1f} tokens/s" if seconds else "", style="dim")
    for i, (name, count) in enumerate(sorted(accepted.items(), key=lambda item: -item[1])):
        text.append(", " if i else ", accepted drafts: ", style="dim").append(f"{name} {count}", style=colour(name))
    proposed = sum(result.stats["proposed"] for result in results)
    if proposed:
        drafted = sum(result.stats["drafted"] for result in results)
        text.append(f", {drafted} of {proposed} drafted tokens verified", style="dim")
    if rule := accepted_by(results[0].stats):
        text.append(f", {rule}", style="dim")
    reasons = ", ".join(dict.fromkeys(result.finish_reason for result in results))
    return text.append(f" ({reasons})", style="dim")


def accepted_by(facts: Mapping[str, Any]) -> str:
    """Which rule accepted drafted tokens, by what statistics say of it; nothing of the default one."""
    rule = facts.get("acceptance")
    return f"accepted by {rule}{' (LOSSY)' if facts['lossy'] else ''}" if rule else ""


def defaults(values: Mapping[str, Any]) -> str:
    """What a model's generation_config.json sets."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def result_json(result: Result, llm: LLM) -> dict[str, Any]:
    """A result as plain values."""
    return {
        "text": result.text,
        "tokens": list(result.tokens),
        "sources": list(result.sources),
        "finish_reason": result.finish_reason,
        "error": result.error,
        "usage": result.usage,
        "seed": result.seed,
        "logprobs": _logprobs_json(result.logprobs, llm),
        "prompt_logprobs": _logprobs_json(result.prompt_logprobs, llm),
        "seconds": result.seconds,
        "first_token_seconds": result.first_token_seconds,
        "stats": result.stats,
    }


def run_json(llm: LLM) -> dict[str, Any]:
    """What ran: the model and how."""
    invariance = llm.engine.invariance
    engine = llm.engine
    budget, max_nodes = engine.budget, llm.config.speculation.max_nodes
    return {
        "model": llm.name,
        "precision": llm.precision,
        "kv_format": llm.kv_format,
        "kernels": llm.kernels.name,
        "speculation": [drafter.name for drafter in engine.drafters],
        "max_nodes": max_nodes if engine.drafters else 0,
        **engine.acceptance.facts,
        "pass_seconds": None if budget is None else budget.costs.points,
        "pass_costs": None if budget is None else budget.costs.relative(),
        "exact": None if invariance is None else invariance.exact,
    }


def _logprobs_json(entries: tuple[TokenLogprob, ...] | None, llm: LLM) -> list[dict[str, Any]] | None:
    return None if entries is None else [_logprob_json(entry, llm) for entry in entries]


def _logprob_json(entry: TokenLogprob, llm: LLM) -> dict[str, Any]:
    def token(i: int, logprob: float) -> dict[str, Any]:
        text = llm.tokenizer.decode([i], skip_special=False)
        return {"token": i, "text": text, "logprob": logprob}

    return {**token(entry.token, entry.logprob), "top": [token(i, logprob) for i, logprob in entry.top]}
