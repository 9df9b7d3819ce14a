"""A file of results: what it holds, how it is written, and a reader that says what is wrong with one.

Programs other than ours write such files too, so that all are reported and compared in the same way: ``modes`` are then
names such as "llama.cpp plain", and what a program cannot tell is null.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.config import ConfigError

SCHEMA = 1

MODES = ("off", "on")
"""The modes of ``specdec bench``: speculation off, and on."""

ALL = "all"
"""The task of a summary over all tasks."""

Number = float | None


@dataclass(frozen=True, slots=True)
class Timing:
    """One request, once."""

    mode: str
    prompt: str
    """The id of the prompt."""
    task: str
    turn: int
    prompt_tokens: int
    tokens: int
    """Tokens that came out."""
    seconds: float
    """From the request to the last token, the processing of the prompt included."""
    first_token_seconds: Number
    gaps: Mapping[str, Number]
    """Seconds that a client waits for a token after the one before, as quantiles ``p50`` and ``p99``."""
    temperature: float = 0.0
    stats: Mapping[str, Any] | None = None
    """The engine's counters of this sequence."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One mode on the prompts of one task, or of all."""

    mode: str
    task: str
    prompts: int
    tokens_per_second: float
    """With the processing of the prompt."""
    decode_tokens_per_second: Number
    first_token_seconds: Number
    gap_p50: Number
    gap_p99: Number
    tau: Number = None
    acceptance_by_depth: tuple[float, ...] | None = None
    speedup: Number = None
    """Tokens per second over those of the first mode."""
    speedup_decoding: Number = None
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """One measurement."""

    provenance: Mapping[str, Any]
    """Where it comes from: commit, command, machine, versions, model, precision, prompts."""
    settings: Mapping[str, Any]
    """What was asked of the engine: temperature, max_tokens, concurrency, repeats, seed and more."""
    modes: tuple[str, ...]
    """The first one is what the others are compared with."""
    runs: tuple[Timing, ...]
    v: Mapping[str, float]
    """Cost of a pass of M rows over that of one row, by M; empty where it was not measured."""
    summary: tuple[Summary, ...]
    peak_memory_bytes: int | None
    schema: int = SCHEMA
    turns: tuple[Mapping[str, Any], ...] = field(default=())
    """Wall-clock ``seconds`` and ``tokens`` of each turn of a mode through all prompts."""
    one_row: Mapping[str, float] = field(default_factory=dict)
    """A pass of one row: ``seconds``, ``weights_bytes``, and the ``bytes_per_second`` at which memory can be read; or empty."""
    prompt_processing: tuple[Mapping[str, Any], ...] = field(default=())
    """Of a mode, ``prompt_tokens``, median ``seconds`` to the first token and ``tokens_per_second``, where it was measured."""
    skipped: tuple[Mapping[str, str], ...] = field(default=())
    """Each ``engine`` that was asked for and not measured, and the ``reason``."""

    @property
    def over_bound(self) -> float | None:
        """Seconds of a one-row pass over those of reading the weights once; None where that is not known."""
        facts = self.one_row
        if not facts.get("bytes_per_second") or not facts.get("weights_bytes"):
            return None
        return facts["seconds"] * facts["bytes_per_second"] / facts["weights_bytes"]

    @property
    def temperatures(self) -> list[float]:
        return list(dict.fromkeys(row.temperature for row in self.summary))

    @property
    def tasks(self) -> list[str]:
        """Every task, the total last."""
        return [*dict.fromkeys(row.task for row in self.summary if row.task != ALL), ALL]

    def row(self, mode: str, task: str = ALL, temperature: float | None = None) -> Summary | None:
        """A row of the summary; the first temperature where none is given."""
        wanted = self.temperatures[0] if temperature is None else temperature
        key = (mode, task, wanted)
        return next((row for row in self.summary if (row.mode, row.task, row.temperature) == key), None)

    def throughput(self, mode: str, temperature: float) -> float | None:
        """Tokens per second of all requests in flight together, the median of the turns; None where turns are not told."""
        turns = [turn for turn in self.turns if (turn["mode"], turn["temperature"]) == (mode, temperature)]
        return statistics.median(turn["tokens"] / turn["seconds"] for turn in turns) if turns else None

    def fact(self, name: str) -> Any:
        """A setting, or what the provenance says of it."""
        return self.settings.get(name, self.provenance.get(name))


def save(report: Report, path: Path) -> None:
    """Write a result; each run and each row of the summary on a line of its own."""
    parts = []
    for f in dataclasses.fields(report):
        value = getattr(report, f.name)
        if f.name in ("runs", "summary", *_ROWS):
            rows = [row if isinstance(row, Mapping) else dataclasses.asdict(row) for row in value]
            text = "[\n" + ",\n".join(f"  {_dump(row)}" for row in rows) + "\n ]" if rows else "[]"
        else:
            text = json.dumps(_rounded(value), indent=1, ensure_ascii=False, allow_nan=False).replace("\n", "\n ")
        parts.append(f' "{f.name}": {text}')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def load(path: Path) -> Report:
    """Read a result.

    Raises:
        ConfigError: the file is no result of this layout; the message names what is missing or wrong.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # bytes that are no text, or text that is no JSON
        raise ConfigError(f"{path} is not JSON: {error}") from error
    where = str(path)
    if not isinstance(data, dict) or "schema" not in data:
        raise ConfigError(f"{where} is no result of specdec bench: it has no schema")
    if data["schema"] != SCHEMA:
        raise ConfigError(f"{where} has the schema {data['schema']!r}; this version reads {SCHEMA}")
    data = _checked(data, _REPORT, where)
    data["runs"] = tuple(Timing(**_checked(row, _TIMING, f"{where}: runs[{i}]")) for i, row in enumerate(data["runs"]))
    for i, run in enumerate(data["runs"]):
        _checked(run.gaps, {"p50": _NUMBER, "p99": _NUMBER}, f"{where}: runs[{i}].gaps")
    rows = [_checked(row, _SUMMARY, f"{where}: summary[{i}]") for i, row in enumerate(data["summary"])]
    for row in rows:
        if row["acceptance_by_depth"] is not None:
            row["acceptance_by_depth"] = tuple(row["acceptance_by_depth"])
    data["summary"] = tuple(Summary(**row) for row in rows)
    data |= {"modes": tuple(data["modes"]), **{key: tuple(data.get(key, ())) for key in _ROWS}}
    for i, turn in enumerate(data["turns"]):
        _checked(turn, _TURN, f"{where}: turns[{i}]")
    report = Report(**data)
    if not report.modes:
        raise ConfigError(f"{where}: modes is empty")
    for mode in report.modes:
        if report.summary and not any(row.mode == mode for row in report.summary):
            raise ConfigError(f"{where}: the summary has no row of the mode {mode!r}")
    if not report.summary:
        raise ConfigError(f"{where}: summary is empty")
    return report


_NUMBER: tuple[type, ...] = (int, float, type(None))
_REPORT: dict[str, tuple[type, ...]] = {
    "schema": (int,),
    "provenance": (dict,),
    "settings": (dict,),
    "modes": (list,),
    "runs": (list,),
    "v": (dict,),
    "summary": (list,),
    "peak_memory_bytes": (int, type(None)),
}
_TIMING: dict[str, tuple[type, ...]] = {
    "mode": (str,),
    "prompt": (str,),
    "task": (str,),
    "turn": (int,),
    "prompt_tokens": (int,),
    "tokens": (int,),
    "seconds": (int, float),
    "first_token_seconds": _NUMBER,
    "gaps": (dict,),
}
_SUMMARY: dict[str, tuple[type, ...]] = {
    "mode": (str,),
    "task": (str,),
    "prompts": (int,),
    "tokens_per_second": (int, float),
    "decode_tokens_per_second": _NUMBER,
    "first_token_seconds": _NUMBER,
    "gap_p50": _NUMBER,
    "gap_p99": _NUMBER,
    "tau": _NUMBER,
    "acceptance_by_depth": (list, type(None)),
    "speedup": _NUMBER,
    "speedup_decoding": _NUMBER,
}
_TURN: dict[str, tuple[type, ...]] = {
    "mode": (str,),
    "temperature": (int, float),
    "turn": (int,),
    "seconds": (int, float),
    "tokens": (int,),
}
_ROWS = ("turns", "prompt_processing", "skipped")
"""What a report may lack."""
_OPTIONAL: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_ROWS, (list,)),
    "one_row": (dict,),
    "temperature": (int, float),
    "stats": (dict, type(None)),
}


def _checked(value: Any, kinds: Mapping[str, tuple[type, ...]], where: str) -> dict[str, Any]:
    """The mapping, if it has every key with a value of its kind and no unknown one."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be an object, got {value!r}")
    if missing := [key for key in kinds if key not in value]:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    if unknown := [key for key in value if key not in kinds and key not in _OPTIONAL]:
        raise ConfigError(f"{where} has the unknown key {unknown[0]!r}")
    for key, kind in {**_OPTIONAL, **kinds}.items():
        if key in value and (isinstance(value[key], bool) or not isinstance(value[key], kind)):
            names = " or ".join("null" if k is type(None) else k.__name__ for k in kind)
            raise ConfigError(f"{where}: {key} must be {names}, got {value[key]!r}")
    return dict(value)


def _dump(value: Any) -> str:
    return json.dumps(_rounded(value), ensure_ascii=False, allow_nan=False)


def _rounded(value: Any) -> Any:
    """Microseconds are enough, and files stay small."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
