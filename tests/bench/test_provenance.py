"""Where results come from, without telling more of a machine than its processor."""

from __future__ import annotations

import sys

import pytest
import torch

from specdec.bench.provenance import command, provenance


def test_commands_lose_the_folders_of_absolute_paths() -> None:
    """What one would type remains; relative paths say something and stay."""
    typed = ["/opt/venv/bin/specdec", "bench", "--json=/tmp/me/x.json", "-t", "0,0.8", "--prompts", "/home/me/a b.jsonl"]
    assert command(typed) == "specdec bench --json=x.json -t 0,0.8 --prompts 'a b.jsonl'"
    assert (
        command(["bench/kernels.py", "--json", "bench/results/k.json"]) == "python bench/kernels.py --json bench/results/k.json"
    )


def test_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough to repeat it; this file is in a checkout, so the commit is known."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/specdec", "bench"])
    facts = provenance(precision="fp32")
    assert facts["command"] == "specdec bench"
    assert (facts["precision"], facts["torch"]) == ("fp32", torch.__version__)
    assert facts["threads"] == torch.get_num_threads()
    assert facts["commit"] is None or len(facts["commit"]) == 40


def test_a_checkout_that_is_not_ours_gives_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package lies in somebody's folders; the commit of these says nothing about it."""
    monkeypatch.setattr("specdec.bench.provenance.__file__", sys.executable)
    assert provenance()["commit"] is None
