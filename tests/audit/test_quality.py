"""The cost of a precision: losses are those of the naive sum, windows lie where they should, and fp32 costs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.audit.quality import check_kv_format, check_quality, cost, losses, shipped_text, windows
from specdec.llm import LLM


def test_losses_are_those_of_each_row_alone(llm: LLM, replay) -> None:
    tokens = list(range(97, 117))
    ((loss, best),) = losses(llm.engine.model, llm.kernels, [tokens])
    for i in (1, 7, 19):
        logp = replay.row(tokens[:i]).double().log_softmax(-1)
        assert loss[i - 1].item() == pytest.approx(-logp[tokens[i]].item(), abs=1e-12)
        assert int(best[i - 1]) == int(logp.argmax())


def test_windows_are_spread_over_the_text(llm: LLM) -> None:
    text = "".join(chr(97 + i % 26) for i in range(1000))
    cut = windows(llm.tokenizer, text, 400, 100)
    assert [len(window) for window in cut] == [100] * 4
    assert cut[0] == [ord(c) for c in text[:100]]
    assert cut[-1] == [ord(c) for c in text[-100:]]
    assert windows(llm.tokenizer, "short", 400, 100) == [[ord(c) for c in "short"]]
    assert len(shipped_text()) > 4000


def test_a_precision_is_measured_against_fp32(llm: LLM, in_fp32, tmp_path: Path) -> None:
    """8-bit blocks cost a little and not nothing; the model against itself costs exactly nothing."""
    text = tmp_path / "words.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 12)
    check = check_quality(llm, in_fp32, text, 256, 60)
    assert check.status == "measured"
    assert 0 < abs(check.details["added"]) < 0.2
    assert check.details["text"] == "words.txt"
    found = losses(llm.engine.model, llm.kernels, windows(llm.tokenizer, text.read_text(), 256))
    assert cost(found, found).added == 0
    assert cost(found, found).same_top1 == 1


def test_fp32_is_not_measured_against_itself(folder: Path) -> None:
    llm = LLM(str(folder), precision="fp32", self_test=False)
    check = check_quality(llm, lambda: pytest.fail("loaded again"), None, 256, 60)
    assert check.status == "measured"
    assert not check.details


def test_a_model_that_would_not_fit_twice_is_left_out(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000})())
    check = check_quality(llm, lambda: pytest.fail("loaded all the same"), None, 256, 60)
    assert check.status == "left out"
    assert "fp32" in check.summary


def test_a_format_of_keys_and_values_is_measured_against_bf16(folder: Path) -> None:
    """4-bit codes cost more than 8-bit ones, which cost something; floats are not measured."""
    found = {}
    for kv_format in ("int8", "int4"):
        check = check_kv_format(LLM(str(folder), precision="q8", kv_format=kv_format, self_test=False), None, 1024, 1e6)
        assert check.status == "measured"
        assert f"{kv_format} for keys and values adds" in check.summary
        assert check.details["against"] == "bf16"
        found[kv_format] = check.details
    assert found["int4"]["same_top1"] < found["int8"]["same_top1"] < 1
    assert 0 < abs(found["int8"]["added"]) < 0.1
    check = check_kv_format(LLM(str(folder), precision="q8", self_test=False), None, 1024, 1e6)
    assert "not quantised" in check.summary
    assert not check.details


def test_losses_are_finite(llm: LLM) -> None:
    assert all(torch.isfinite(found).all() for found in losses(llm.engine.model, llm.kernels, [[97, 98, 99]]))


def test_the_text_is_cut_to_the_time(llm: LLM, in_fp32) -> None:
    assert check_quality(llm, in_fp32, None, 2048, 1e-6).status == "left out"
    assert check_quality(llm, in_fp32, None, 2048, 1e6).details["tokens"] == 8 * 255
