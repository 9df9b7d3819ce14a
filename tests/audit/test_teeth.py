"""Every broken engine and rule is caught, by cells that the sound engine passes; and one that were not would be told."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import FLAT

from specdec.audit.divergence import Replay
from specdec.audit.fault import Fault
from specdec.audit.identity import check_cell, core
from specdec.audit.law import check_broken_rules
from specdec.audit.report import Check, Report
from specdec.audit.sabotage import FAULTS
from specdec.audit.teeth import check_fault, check_faults
from specdec.audit.workshop import Workshop
from specdec.audit.world import cut_world
from specdec.kv.pool import Pool
from specdec.llm import LLM
from specdec.verify.broken import BROKEN


@pytest.fixture(scope="module")
def cells(workshop: Workshop, replay):
    """The cells of the audit that a sound engine passes: all of its core."""
    wanted = core(workshop, 8)
    checks = [check_cell(workshop, cell, replay) for cell in wanted]
    assert [check.status for check in checks] == ["passed"] * len(wanted), [check.summary for check in checks]
    return wanted


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(workshop: Workshop, cells, fault: Fault) -> None:
    check = check_fault(workshop, fault, cells)
    assert check.status == "passed", check.summary
    assert check.details["cell"] in [cell.describe() for cell in cells]


def test_faults_of_the_cache_are_caught_where_it_is_quantised(folder: Path) -> None:
    """Codes and scales that stay behind, come too late, or are somebody else's; a sound engine passes in the same cells."""
    llm = LLM(str(folder), precision="q8", kv_format="int8", self_test=False, pass_seconds=FLAT)
    workshop = Workshop(llm, 14)
    workshop.prepare(0.0)
    cells = core(workshop, 8)
    assert {check_cell(workshop, cell, Replay(llm, 128)).status for cell in cells} == {"passed"}
    for fault in FAULTS:
        if fault.part == "cache":
            check = check_fault(workshop, fault, cells)
            assert check.status == "passed", check.summary


def test_a_fault_is_gone_afterwards(workshop: Workshop, cells, replay) -> None:
    """What was broken is put back, also where the broken engine raised: the sound engine passes again."""
    for fault in FAULTS:
        check_fault(workshop, fault, cells[:1])
    assert check_cell(workshop, cells[0], replay).status == "passed"


def test_an_engine_that_is_not_broken_survives(workshop: Workshop, cells) -> None:
    """Being caught is a finding and no formality: without a fault nothing is caught, and the audit says that it failed."""
    right = Pool.move

    def unbroken(pool: Pool, *slots: object) -> None:
        right(pool, *slots)

    from unittest.mock import patch

    harmless = Fault("none", "cache", "is not broken", lambda: patch.object(Pool, "move", unbroken))
    check = check_fault(workshop, harmless, cells)
    assert check.status == "failed"
    assert "SURVIVED" in check.summary
    report = Report({}, {}, {}, ("teeth",), [check, Check("teeth", "another", "passed", "")])
    assert (report.verdict, report.exit_code) == ("inconclusive", 2)
    assert "none" in report.statement


def test_a_fault_counts_only_where_a_sound_engine_has_passed(workshop: Workshop, cells) -> None:
    """A cell that was not run, or that the sound engine fails, proves nothing about a broken one."""
    (fault,) = [fault for fault in FAULTS if fault.name == "foreign prefix block"]
    check = check_fault(workshop, fault, [cell for cell in cells if cell.state != "cached"])
    assert check.status == "left out"


def test_faults_are_left_out_by_name_when_time_is_up(workshop: Workshop, cells) -> None:
    (check,) = check_faults(workshop, cells, lambda seconds: True)
    assert check.status == "left out"
    assert check.details["faults"] == len(FAULTS)


def test_every_broken_rule_is_caught(workshop: Workshop) -> None:
    checks = list(check_broken_rules(workshop, lambda seconds: False))
    assert [check.status for check in checks] == ["passed"] * len(BROKEN), [c.summary for c in checks if c.status != "passed"]


def test_the_world_of_the_rules_is_the_models(workshop: Workshop, replay) -> None:
    """Its laws are those of real rows: computed one context at a time, they are the same."""
    from specdec.history import History
    from specdec.sampling import warp

    request = workshop.requests[0]
    world = cut_world(workshop.llm, request.prompt)
    for path in ((), (1,), (2, 0)):
        tokens = [*request.prompt, *(world.tokens[path[:i]][rank] for i, rank in enumerate(path))]
        params = request.params.replace(temperature=1.0, top_k=3, logprobs=None)
        p = warp(replay.row(tokens), params, History.of(tokens, len(request.prompt))).exp()
        assert p[world.tokens[path]].tolist() == pytest.approx(world.law[path].tolist(), abs=1e-12)
