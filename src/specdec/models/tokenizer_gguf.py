"""Byte-pair tokenizers rebuilt from the metadata of a GGUF file.

GGUF names a pre-tokenizer instead of describing it; the table here gives each known name the pieces that the model's own
tokenizer file has. A name that is not in the table is an error, since a guess would change tokens without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

from specdec.models.errors import ModelError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_Value = TypeVar("_Value")


class TokenType(IntEnum):
    """What an entry of a GGUF vocabulary is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How a family of models cuts text before merging."""

    pattern: str | None = None
    """Cut by this; None: by GPT-2's own pattern."""
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    """A piece that is in the vocabulary is taken whole, whatever the merges say."""
    add_bos: bool = False
    """What the family does where the file does not say."""


_LLAMA_3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN_2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)

SPLITTINGS: Mapping[str, _Splitting] = {
    "gpt-2": _Splitting(),
    "default": _Splitting(),
    "smollm": _Splitting(single_digits=True),
    "llama-bpe": _Splitting(pattern=_LLAMA_3, whole_words=True, add_bos=True),
    "qwen2": _Splitting(pattern=_QWEN_2, nfc=True),
    "tekken": _Splitting(pattern=_TEKKEN, whole_words=True, add_bos=True),
}


def splitting(metadata: Mapping[str, Any]) -> _Splitting:
    """The entry of the table that a GGUF file names.

    Raises:
        ModelError: the tokenizer is not byte-level BPE, or its pre-tokenizer is unknown.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"this GGUF file holds a tokenizer of type {kind!r}; only gpt2 (byte-level BPE) can be rebuilt exactly: "
            "use the model's Hugging Face folder, whose tokenizer.json is complete"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in SPLITTINGS:
        raise ModelError(
            f"this GGUF file names the pre-tokenizer {pre!r}; known ones are {', '.join(SPLITTINGS)}: "
            "use the model's Hugging Face folder, whose tokenizer.json is complete"
        )
    return SPLITTINGS[pre]


def setting(metadata: Mapping[str, Any], key: str, kind: type[_Value]) -> _Value | None:
    """A value that the file need not have.

    Raises:
        ModelError: it is of another type.
    """
    value = metadata.get(key)
    if value is None or type(value) is kind:
        return value
    raise ModelError(f"this GGUF file is damaged: {key} must be of type {kind.__name__}, got {value!r}")


def backend_from_gguf(metadata: Mapping[str, Any]) -> Backend:
    """The tokenizer that a GGUF file describes.

    Raises:
        ModelError: its kind is unsupported, or its lists are missing, damaged or do not belong together.
    """
    rules = splitting(metadata)
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int)
    if len(types) != len(tokens):
        raise ModelError(f"this GGUF file has {len(tokens)} tokens but {len(types)} token types")
    merges = [_pair(merge) for merge in _list(metadata, "merges", str)]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        backend = Backend(BPE(vocab=vocab, merges=merges, ignore_merges=rules.whole_words))
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"this GGUF file's vocabulary and merges do not belong together: {error}") from error
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_steps(rules))
    backend.decoder = decoders.ByteLevel()
    # Both kinds are found in text before it is cut; only control tokens are left out of decoded text.
    added = [
        AddedToken(token, special=kind == TokenType.CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]
    backend.add_tokens([token for token in added if not token.special])
    backend.add_special_tokens([token for token in added if token.special])
    return backend


def _steps(rules: _Splitting) -> list[PreTokenizer]:
    steps: list[PreTokenizer] = []
    if rules.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rules.pattern:
        steps.append(pre_tokenizers.Split(Regex(rules.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.pattern is None))
    return steps


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise ModelError(f"this GGUF file holds the merge {merge!r}, which is not two pieces with a space between")
    return left, right


def _list(metadata: Mapping[str, Any], name: str, kind: type[_Value]) -> list[_Value]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list):
        raise ModelError(f"this GGUF file has no tokenizer.ggml.{name}: use the model's Hugging Face folder")
    if not all(type(item) is kind for item in value):
        raise ModelError(f"this GGUF file is damaged: tokenizer.ggml.{name} must be a list of {kind.__name__}")
    return value
