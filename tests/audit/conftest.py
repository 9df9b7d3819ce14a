"""What the audit's tests share: a tiny model, its requests with their plain answers, and a report."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from checkpoints import tiny
from harness import FLAT

from specdec.audit.divergence import Replay
from specdec.audit.identity import check_cell, check_cells, core
from specdec.audit.law import check_laws
from specdec.audit.quality import check_quality
from specdec.audit.report import Report
from specdec.audit.rows import check_rows
from specdec.audit.sabotage import FAULTS
from specdec.audit.teeth import check_faults
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
def report(llm: LLM, in_fp32, workshop: Workshop, replay: Replay) -> Report:
    """Something of every section, a failure among it."""
    report = Report({"kind": "engine", "model": "tiny"}, {"specdec": "0"}, {"minutes": 1}, ("rows", "teeth"), notes=["A note."])
    cells = core(workshop, 8)[:3]
    report.checks += check_rows(llm.engine.model, llm.kernels, llm.config, lambda seconds: False)
    report.checks += check_cells(workshop, cells, replay, lambda seconds: False)
    with FAULTS[0].broken():
        report.checks.append(check_cell(workshop, cells[1], replay))
    report.checks += check_faults(workshop, cells, lambda seconds: False, FAULTS[:2])
    report.checks += itertools.islice(check_laws(workshop, lambda seconds: False), 2)
    report.checks.append(check_quality(llm, in_fp32, None, 512, 60))
    return report
