"""Speculative decoding that changes nothing but the speed, and that you can check.

``LLM`` loads a model and answers, ``SamplingParams`` says how tokens are chosen, ``Result`` is an answer::

    from specdec import LLM, SamplingParams

    llm = LLM("smollm2-135m-instruct")
    (answer,) = llm.chat([{"role": "user", "content": "Name three rivers."}], SamplingParams(temperature=0, max_tokens=60))
    print(answer.text)

What cannot be done is an error that says why: ``ModelError`` for a model, ``ConfigError`` for a setting, ``RequestError`` and
``ChatTemplateError`` for a request. All of them are ValueErrors.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.config import ConfigError, SamplingParams, SpeculationConfig
    from specdec.llm import LLM
    from specdec.models.errors import ModelError
    from specdec.models.tokenizer import ChatTemplateError
    from specdec.request import RequestError
    from specdec.results import Chunk, Result
    from specdec.runs import Stream
    from specdec.types import TokenLogprob

__all__ = [
    "LLM",
    "ChatTemplateError",
    "Chunk",
    "ConfigError",
    "ModelError",
    "RequestError",
    "Result",
    "SamplingParams",
    "SpeculationConfig",
    "Stream",
    "TokenLogprob",
]

try:
    __version__ = version("specdec")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

_HOMES = {
    "LLM": "specdec.llm",
    "ChatTemplateError": "specdec.models.tokenizer",
    "Chunk": "specdec.results",
    "ConfigError": "specdec.config",
    "ModelError": "specdec.models.errors",
    "RequestError": "specdec.request",
    "Result": "specdec.results",
    "SamplingParams": "specdec.config",
    "SpeculationConfig": "specdec.config",
    "Stream": "specdec.runs",
    "TokenLogprob": "specdec.types",
}


def __getattr__(name: str) -> object:
    """Import on first use: the command line's help should not wait for PyTorch."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'specdec' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is exported, before it has been imported too: for help() and completion."""
    return sorted({*globals(), *__all__})
