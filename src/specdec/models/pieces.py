"""What bytes each entry of a vocabulary stands for.

With them decoding is a matter of bytes: text can be decoded token by token, a character at a time, with the same result as
all at once. (The decoders of the tokenizers library look at several tokens together, so what they make of a token can
change with the next one.)
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

from specdec.models.errors import ModelError

_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF = {
    **{chr(byte): byte for byte in _PLAIN},
    **{chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PLAIN)))},
}
"""GPT-2 writes each byte as a printable character: itself where it is one, else one from U+0100 on."""
_TO_LATIN = dict.fromkeys(range(256), 65535) | {ord(character): byte for character, byte in _BYTE_OF.items()}
"""The same for str.translate, to characters of Latin 1, which are bytes; other ones of Latin 1 are sent out of it."""

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class PieceRules:
    """How a tokenizer's decoder reads the pieces of its vocabulary."""

    byte_characters: bool = False
    """Pieces are written in GPT-2's byte characters."""
    byte_names: bool = False
    """``<0x0A>`` is a byte."""
    space: str | None = None
    """The character that stands for a space."""
    drops_first_space: bool = False
    """A space at the very beginning of a text is not part of it."""

    @classmethod
    def of(cls, backend: Backend) -> PieceRules:
        """Read them off a tokenizer.

        Raises:
            ModelError: its decoder does more than join bytes, so that text could not be decoded token by token.
        """
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else None
        steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
        rules: dict[str, Any] = {}
        for step in steps:
            match step:
                case {"type": "ByteLevel"}:
                    rules["byte_characters"] = True
                case {"type": "ByteFallback"}:
                    rules["byte_names"] = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Replace", "pattern": {"String": space}, "content": " "}:
                    rules["space"] = space
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                    rules["drops_first_space"] = True
                case {"type": "Metaspace", "replacement": space, **rest}:
                    rules["space"] = space
                    rules["drops_first_space"] = rest.get("prepend_scheme", "always") != "never"
                case _:
                    raise ModelError(f"this tokenizer's decoder has a step that is not supported: {json.dumps(step)}")
        return cls(**rules)

    def to_bytes(self, piece: str) -> bytes:
        """The bytes of a piece."""
        if self.byte_characters:
            with suppress(UnicodeEncodeError):  # a piece with another character is plain text
                return piece.translate(_TO_LATIN).encode("latin-1")
        if self.byte_names and (name := _BYTE.fullmatch(piece)):
            return bytes([int(name[1], 16)])
        return (piece.replace(self.space, " ") if self.space else piece).encode()
