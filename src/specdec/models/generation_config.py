"""What a model's generation_config.json says of sampling: the defaults of requests that say nothing of it themselves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from specdec.config import AUTO, ConfigError, SamplingParams
from specdec.models.checkpoint import read_json
from specdec.models.errors import ModelError
from specdec.models.keys import Keys, token_ids
from specdec.models.source import Source

_log = logging.getLogger(__name__)

FILE: Final = "generation_config.json"
NONE: Final = "none"

_TAKEN: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "bad_words_ids": "bad_words_ids",
    "max_new_tokens": "max_tokens",
}
"""Their name -> ours."""

_NOT_DONE: Final[Mapping[str, tuple[Any, ...]]] = {
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ([], {}),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "top_h": (1,),
    "typical_p": (1,),
    "watermarking_config": (),
}
"""Fields that would change answers and that are not taken, with the values that ask for nothing, as null does in each."""


@dataclass(frozen=True)
class GenerationConfig:
    """What is taken of a file."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``SamplingParams`` that it sets."""
    end_tokens: frozenset[int] = frozenset()


def find(source: Source, where: str) -> GenerationConfig:
    """The defaults of a model.

    Args:
        where: ``auto`` for the file in the model's folder, if there is one (a GGUF file has none); ``none``; or a folder that
            holds another file, whose end tokens count too.

    Raises:
        ModelError: there is no such folder, or a bad value in the file; the message names the file, the field and the value.
    """
    if where == NONE:
        return GenerationConfig()
    if where == AUTO:
        path = source.path / FILE
        return read(path) if path.is_file() else GenerationConfig()
    path = Path(where).expanduser() / FILE
    if not path.is_file():
        raise ModelError(f"there is no {path}; a generation config is {AUTO}, {NONE}, or a folder that holds {FILE}")
    return read(path)


def read(path: Path) -> GenerationConfig:
    """As ``find``, from one file."""
    values = read_json(path)
    keys = Keys(values, path)
    defaults: dict[str, Any] = {}
    for theirs, ours in _TAKEN.items():
        value = keys.get(theirs)
        if value is None:
            continue
        try:
            SamplingParams(**{ours: value})
        except ConfigError as error:
            told = f"{theirs}{str(error).removeprefix(ours)}"
            raise ModelError(
                f"{path}: {told}; mend it, or go without the file's defaults by generation config {NONE}"
            ) from error
        defaults[ours] = value
    if keys.get("do_sample") is not None:
        sampled = keys.flag("do_sample", True)
        defaults["temperature"] = defaults.get("temperature", 1.0) if sampled else 0.0
    asked = [name for name, nothing in _NOT_DONE.items() if keys.get(name) not in (None, *nothing)]
    if asked:
        told = ", ".join(f"{name} {values[name]!r}" for name in asked)
        _log.warning("%s asks for what is not done here, and answers come without it: %s", path, told)
    return GenerationConfig(defaults, token_ids(keys, "eos_token_id"))
