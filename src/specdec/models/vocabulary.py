"""Do two models mean the same by the same token ids, so that one can draft for the other?"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.models.errors import ModelError
from specdec.models.head_files import is_head
from specdec.models.load import load_tokenizer
from specdec.models.source import Source
from specdec.models.tokenizer import Tokenizer


def check_vocabulary(tokenizer: Tokenizer, drafter: Source) -> None:
    """Raise ModelError where a model that shall draft has another vocabulary than this tokenizer's. Trained heads have none."""
    if drafter.kind == "folder" and is_head(drafter.path):
        return
    if found := difference(tokenizer.pieces, load_tokenizer(drafter).pieces):
        raise ModelError(f"{drafter.name} cannot draft for this model, its vocabulary is another: {found}")


def difference(mine: Sequence[bytes], other: Sequence[bytes]) -> str | None:
    """In what two vocabularies differ, in words; None where one is the other with, perhaps, more tokens behind it.

    Args:
        mine, other: the bytes of each token (``Tokenizer.pieces``).
    """
    shared = range(min(len(mine), len(other)))
    differing = [i for i in shared if mine[i] != other[i]]
    if not differing:
        return None
    first = differing[0]
    return (
        f"{len(differing):,} of {len(shared):,} tokens differ, the first one is {first}: "
        f"{_shown(mine[first])} against {_shown(other[first])}"
    )


def _shown(piece: bytes) -> str:
    return repr(piece.decode(errors="backslashreplace"))
