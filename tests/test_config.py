"""Settings: every wrong value is an error that names its setting, whatever its type; lists may be given as others take them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from specdec.config import ConfigError, EngineConfig, SamplingParams, SpeculationConfig

CLASSES: tuple[type[Any], ...] = (SamplingParams, SpeculationConfig, EngineConfig)
EVERY = [(cls, field.name) for cls in CLASSES for field in fields(cls)]
LISTS = ("stop", "stop_token_ids", "bad_words", "bad_words_ids")


@pytest.mark.parametrize(("cls", "name"), EVERY, ids=[f"{cls.__name__}.{name}" for cls, name in EVERY])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), b"2", {"a": 1}, [[]], type], ids=str)
def test_no_setting_takes_a_value_of_another_type(cls: type[Any], name: str, value: object) -> None:
    """No setting anywhere lets through what is no number, string, flag or list of its own kind; the message says which."""
    with pytest.raises(ConfigError, match=name):
        cls(**{name: value})


@pytest.mark.parametrize(("cls", "name"), EVERY, ids=[f"{cls.__name__}.{name}" for cls, name in EVERY])
def test_flags_and_numbers_are_not_taken_for_each_other(cls: type[Any], name: str) -> None:
    """True is no count and 1 is no flag; a float is no count even where it is whole."""
    default = getattr(cls(), name)
    for value in (1, 1.0) if isinstance(default, bool) else (True, False):
        with pytest.raises(ConfigError, match=name):
            cls(**{name: value})
    if isinstance(default, int):
        with pytest.raises(ConfigError, match=name):
            cls(**{name: float(default)})


def test_whole_numbers_beyond_every_float_are_no_numbers() -> None:
    """Python's integers have no end; arithmetic with this one would overflow later."""
    for cls, name in EVERY:
        if isinstance(getattr(cls(), name), float):
            with pytest.raises(ConfigError, match=name):
                cls(**{name: 10**400})


@pytest.mark.parametrize("name", LISTS)
def test_lists_may_be_absent_and_must_be_lists(name: str) -> None:
    """None is an empty list; a single number is none."""
    assert getattr(SamplingParams(**{name: None}), name) == ()
    assert getattr(SamplingParams(**{name: []}), name) == ()
    for value in (5, 5.0, True, {1: 2}, [None]):
        with pytest.raises(ConfigError, match=name):
            SamplingParams(**{name: value})


def test_logit_bias_may_be_absent_and_must_be_a_mapping() -> None:
    """None is no bias; a list of ids lacks the values."""
    assert SamplingParams(logit_bias=None).logit_bias == {}  # type: ignore[arg-type]
    for value in (1, [1], "1", [(1, 2.0)]):
        with pytest.raises(ConfigError, match="logit_bias"):
            SamplingParams(logit_bias=value)  # type: ignore[arg-type]


def test_parameters_do_not_change_with_what_they_were_made_of() -> None:
    """A caller that goes on using its dict or its lists does not alter a request that was checked already."""
    given: dict[str, Any] = {"logit_bias": {1: 2.0}, "stop": ["a"], "stop_token_ids": [1], "bad_words_ids": [[1]]}
    params = SamplingParams(**given)
    given["logit_bias"][-5] = 1e9
    given["stop"].append("b")
    given["stop_token_ids"].append(2)
    given["bad_words_ids"][0].append(3)
    assert params == SamplingParams(logit_bias={1: 2.0}, stop=("a",), stop_token_ids=(1,), bad_words_ids=((1,),))


def test_a_string_is_not_a_list_of_drafters() -> None:
    """Its letters would each be taken for a name."""
    with pytest.raises(ConfigError, match=r"drafters must be a list or tuple of names.*'ngram'"):
        SpeculationConfig(drafters="ngram")  # type: ignore[arg-type]
    assert SpeculationConfig(drafters=["ngram"]).drafters == ("ngram",)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="without repeats"):
        SpeculationConfig(drafters=("ngram", "ngram"))


def test_trained_drafters_that_are_named_must_be_there() -> None:
    """auto takes one if there is one; a name in the list, or of a drafter, is a demand."""
    assert SpeculationConfig.parse("auto").trained == "auto"
    assert SpeculationConfig.parse("suffix,trained").trained is None
    assert SpeculationConfig.parse("suffix,trained", trained="x").trained == "x"
    assert SpeculationConfig.parse("auto", trained="x").drafters == SpeculationConfig().drafters
    for method in ("off", "suffix"):
        with pytest.raises(ConfigError, match="the trained drafter 'x' has no effect unless"):
            SpeculationConfig.parse(method, trained="x")
    for name, value in [("trained", ""), ("trained", 3), ("trained_depth", 0), ("trained_width", 65), ("trained_nodes", 1.5)]:
        with pytest.raises(ConfigError, match=f"{name} must be"):
            SpeculationConfig(**{name: value})
    with pytest.raises(ConfigError, match="trained_precision must be one of auto"):
        SpeculationConfig(trained_precision="int3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="trained_min_probability must be"):
        SpeculationConfig(trained_min_probability=0.0)


def test_off_and_auto_stand_alone() -> None:
    """In a list they are not offered as what would do."""
    assert SpeculationConfig.parse("off").drafters == ()
    assert SpeculationConfig.parse("auto") == SpeculationConfig()
    assert SpeculationConfig.parse("ngram, suffix").drafters == ("ngram", "suffix")
    with pytest.raises(ConfigError, match=r"must be one of off, auto, ngram.* got 'telepathy'"):
        SpeculationConfig.parse("telepathy")
    for method in ("auto,ngram", "ngram,off", "ngram,"):
        with pytest.raises(ConfigError, match=r"speculation must be a list out of ngram.*\(off and auto stand alone\)"):
            SpeculationConfig.parse(method)
