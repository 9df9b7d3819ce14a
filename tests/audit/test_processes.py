"""Other processes: the same bits pass, other bits fail, and what cannot be started is said."""

from __future__ import annotations

import functools
from pathlib import Path

from checkpoints import tiny
from harness import FLAT

from specdec.audit.processes import check_processes, digest
from specdec.audit.report import Check
from specdec.llm import LLM


def load(folder: Path) -> functools.partial[LLM]:
    return functools.partial(LLM, str(folder), precision="q8", self_test=False, pass_seconds=FLAT, threads=1)


def never(seconds: float) -> bool:
    return False


def test_another_process_computes_the_same_bits(llm: LLM, folder: Path) -> None:
    """All that is compared elsewhere shares one model; this is what would see that it differs from start to start."""
    spent: list[float] = []
    checks = list(check_processes(llm, load(folder), lambda seconds: spent.append(seconds) or seconds > 0))
    assert [check.status for check in checks] == ["passed", "left out"], "there was time for one"
    assert spent[0] == 0 < spent[1]


def test_other_bits_fail(llm: LLM, tmp_path: Path) -> None:
    """Here of other weights; one angle that is rounded otherwise is enough (test below)."""
    first, *_ = check_processes(llm, load(tiny(tmp_path, seed=5)), never)
    assert first.status == "failed"
    assert "other logits" in first.summary


def test_a_cosine_that_is_rounded_otherwise_shows(llm: LLM, folder: Path) -> None:
    """As torch's did in the second thread of a process's first call, behind position 128."""
    other = load(folder)()
    assert digest(other) == digest(llm)
    cos = other.engine.model._rotary._short.cos
    cos[130:140] = cos[130:140].nextafter(cos.new_tensor(2.0))
    assert digest(other) != digest(llm)


def test_a_process_that_cannot_load_the_model_is_told(llm: LLM, tmp_path: Path) -> None:
    found: list[Check] = list(check_processes(llm, load(tmp_path / "gone"), never))
    assert [check.status for check in found] == ["not reached"]
    assert "gone" in found[0].summary


def test_without_a_way_to_load_it_the_part_is_left_out(llm: LLM) -> None:
    assert [check.status for check in check_processes(llm, None, never)] == ["left out"]
