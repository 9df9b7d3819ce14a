"""Tiny models that the audit's tests share, and one whole audit of a sound engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import tiny
from harness import FLAT

from specdec.audit.divergence import Replay
from specdec.audit.report import Report
from specdec.audit.session import Plan, audit
from specdec.audit.workshop import Workshop
from specdec.llm import LLM
from specdec.models.load import load_model
from specdec.models.source import resolve


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="package")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), precision="q8", self_test=False, pass_seconds=FLAT)


@pytest.fixture(scope="package")
def in_fp32(folder: Path, llm: LLM):
    return lambda: load_model(resolve(str(folder)), "fp32", llm.kernels, llm.engine.model.device)


@pytest.fixture(scope="package")
def workshop(llm: LLM) -> Workshop:
    """Few and short answers."""
    workshop = Workshop(llm, 14)
    workshop.prepare(0.0)
    return workshop


@pytest.fixture(scope="package")
def replay(llm: LLM) -> Replay:
    return Replay(llm, 128)


@pytest.fixture(scope="package")
def report(llm: LLM, in_fp32) -> Report:
    """A whole audit of a sound engine, with time for its first parts and some of the others."""
    return audit(llm, Plan(minutes=0.25, max_tokens=14), in_fp32, lambda part, check: None)
