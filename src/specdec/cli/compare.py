"""The same request without speculation: are the tokens the same, and what was saved?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

if TYPE_CHECKING:
    from specdec.config import SamplingParams
    from specdec.llm import LLM, Result


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both runs, side by side; sums where there are several answers."""

    first_difference: tuple[int, int] | None
    """Choice and index of the first token that differs; None if none does."""
    tokens: int
    passes: int
    seconds: float
    plain_passes: int
    plain_seconds: float

    @property
    def identical(self) -> bool:
        return self.first_difference is None

    def describe(self) -> Text:
        """Two lines for people."""
        if self.first_difference is None:
            verdict = Text(f"identical: all {self.tokens} tokens are those of plain decoding", style="bold green")
        else:
            choice, index = self.first_difference
            verdict = Text(f"DIFFERENT from plain decoding at token {index} of answer {choice}", style="bold red")
        speed = self.plain_seconds / self.seconds if self.seconds else 0.0
        saved = 1 - self.passes / self.plain_passes if self.plain_passes else 0.0
        return verdict.append(
            f"\nplain {self.plain_passes} passes, {self.plain_seconds:.2f} s; "
            f"speculative {self.passes} passes ({saved:.0%} saved), {self.seconds:.2f} s: {speed:.2f} times as fast",
            style="not bold default",
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "identical": self.identical,
            "first_difference": self.first_difference,
            "passes": self.passes,
            "seconds": self.seconds,
            "plain_passes": self.plain_passes,
            "plain_seconds": self.plain_seconds,
        }


def compare(llm: LLM, request: str | list[dict[str, str]], params: SamplingParams, results: list[Result]) -> Comparison:
    """Repeat a request with speculation off, on the same weights and with the same seed."""
    plain = llm.without_speculation()
    with plain.stream(request, params.replace(seed=results[0].seed)) as stream:
        for _ in stream:
            pass
        others = sorted(stream.results, key=lambda result: result.choice)
    return Comparison(
        first_difference=_first_difference(results, others),
        tokens=sum(len(result.tokens) for result in results),
        passes=sum(result.stats["target_passes"] for result in results),
        seconds=max(result.seconds for result in results),
        plain_passes=sum(result.stats["target_passes"] for result in others),
        plain_seconds=max(result.seconds for result in others),
    )


def _first_difference(results: list[Result], others: list[Result]) -> tuple[int, int] | None:
    for result, other in zip(results, others, strict=True):
        mine, theirs = result.tokens, other.tokens
        for index in range(max(len(mine), len(theirs))):
            if mine[index : index + 1] != theirs[index : index + 1]:
                return result.choice, index
    return None
