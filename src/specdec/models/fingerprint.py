"""Which model a trained drafter was made for: its sizes and a glimpse of its embedding, which survives another precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor

from specdec.config import ConfigError, from_dict
from specdec.models.decoder import Decoder

_TOKENS: Final = 16
_ENTRIES: Final = 8
_ALIKE: Final = 0.9
"""Smallest cosine of two glimpses of one embedding. Four bits a weight keep it above 0.99; unrelated models are near 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """A model by its sizes and its embedding.

    Raises:
        ConfigError: a value is of the wrong type.
    """

    name: str
    """What it is called; not compared."""
    vocab_size: int
    hidden_size: int
    n_layers: int
    glimpse: tuple[float, ...]
    """Entries of 16 embeddings evenly spaced over the vocabulary, each embedding scaled to length 1."""

    def __post_init__(self) -> None:
        sizes = (self.vocab_size, self.hidden_size, self.n_layers)
        if not all(type(n) is int and n > 0 for n in sizes):
            raise ConfigError(f"vocab_size, hidden_size and n_layers of the target must be whole numbers above 0, got {sizes}")
        if not isinstance(self.glimpse, list | tuple) or not all(isinstance(x, int | float) for x in self.glimpse):
            raise ConfigError("the target's glimpse must be a list of numbers")
        object.__setattr__(self, "glimpse", tuple(float(x) for x in self.glimpse))

    @classmethod
    def of(cls, model: Decoder, name: str) -> Fingerprint:
        """The fingerprint of a loaded model, whatever its precision."""
        a = model.architecture
        ids = torch.linspace(0, a.vocab_size - 1, min(_TOKENS, a.vocab_size)).long()
        entries = torch.linspace(0, a.hidden_size - 1, min(_ENTRIES, a.hidden_size)).long()
        rows = model.embedding(ids.to(model.device)).float().cpu()  # [16, d]
        glimpse = torch.nn.functional.normalize(rows, dim=1)[:, entries].flatten()
        return cls(
            name=name,
            vocab_size=a.vocab_size,
            hidden_size=a.hidden_size,
            n_layers=a.n_layers,
            glimpse=tuple(round(x, 4) for x in glimpse.tolist()),
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Fingerprint:
        """Raises ConfigError where a value is missing, unknown or of the wrong type."""
        if missing := {"name", "vocab_size", "hidden_size", "n_layers", "glimpse"} - set(values):
            raise ConfigError(f"the target's {', '.join(sorted(missing))} is missing")
        return from_dict(cls, values)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def difference(self, other: Fingerprint) -> str | None:
        """In what two models differ, in words; None where they are the same but for precision."""
        for field, what in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary"), ("n_layers", "number of layers")):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                return f"{what} {mine:,} against {theirs:,}"
        if len(self.glimpse) != len(other.glimpse) or _cosine(self.glimpse, other.glimpse) < _ALIKE:
            return "other embeddings"
        return None


def _cosine(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    x, y = (torch.tensor(v, dtype=torch.float64) for v in (a, b))
    norm: Tensor = x.norm() * y.norm()
    return float(x @ y / norm) if norm > 0 else float(torch.equal(x, y))
