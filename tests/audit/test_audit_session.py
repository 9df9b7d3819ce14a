"""A whole audit: a sound engine is exact, a broken one is not and the report says where; time is kept; nothing is called passed
that did not run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from types import SimpleNamespace

import pytest
from harness import FLAT

from specdec.audit import chance, law, session
from specdec.audit.chance import check_chance
from specdec.audit.fault import Fault
from specdec.audit.identity import check_cell, core, grid, n_pairs
from specdec.audit.law import _through_the_engine
from specdec.audit.report import TITLES, Check, Report, save
from specdec.audit.requests import make_prompts
from specdec.audit.rows import check_rows
from specdec.audit.sabotage import FAULTS
from specdec.audit.session import Plan, audit
from specdec.audit.workshop import STATES, Cell, Workshop
from specdec.audit.world import World, cut_world
from specdec.config import ConfigError
from specdec.engine import Engine
from specdec.llm import LLM
from specdec.types import Delta
from specdec.verify import RULES
from specdec.verify.broken import BROKEN

FAULT = {fault.name: fault for fault in FAULTS}


def test_a_sound_engine_is_exact(llm: LLM, in_fp32, monkeypatch: pytest.MonkeyPatch) -> None:
    """From end to end, with time enough for all but most of the grid: every part passes, every fault and rule is caught."""
    monkeypatch.setattr(session, "PREPARING", 0.0)
    monkeypatch.setattr(law, "DRAWS", 250)
    monkeypatch.setattr(session, "grid", lambda workshop, batches: grid(workshop, batches)[:8])
    parts = []
    again = functools.partial(LLM, llm.name, precision="q8", self_test=False, pass_seconds=FLAT)
    report = audit(llm, Plan(minutes=20, max_tokens=14), in_fp32, lambda part, check: check or parts.append(part), again)
    assert (report.verdict, report.exit_code) == ("exact", 0), report.statement
    assert parts == [
        "rows", "other processes", "plain decoding", "identity", "broken engines", "broken rules", "laws", "quality",
        "identity",
    ]  # fmt: skip
    assert len(report.of("teeth")) == len(FAULTS) + len(BROKEN)
    assert not any(check.status in ("left out", "failed", "not reached") for check in report.checks)


def test_json_is_strict_and_its_shape_is_kept(report: Report, tmp_path) -> None:
    """Programs read it: the keys are these, the values are finite, and every check is there."""
    save(report, tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert list(found) == [
        "format", "verdict", "exit_code", "statement", "subject", "provenance", "settings", "required", "notes", "sections",
    ]  # fmt: skip
    assert found["format"] == 1
    assert found["exit_code"] == {"exact": 0, "different": 1, "inconclusive": 2}[found["verdict"]]
    for section in found["sections"]:
        assert section["title"] == TITLES[section["section"]]
        assert all(list(check) == ["name", "status", "summary", "seconds", "details"] for check in section["checks"])
    assert sum(len(section["checks"]) for section in found["sections"]) == len(report.checks)


def test_the_verdict_follows_from_the_checks() -> None:
    """A failure is a difference; a section that must pass and did not, or a fault that was not caught, is no verdict."""
    passed, failed = Check("rows", "a", "passed", ""), Check("identity", "b", "failed", "")
    teeth, hollow = Check("teeth", "c", "passed", ""), Check("teeth", "d", "left out", "")

    def verdict(*checks: Check) -> tuple[str, int]:
        report = Report({}, {}, {}, ("rows", "teeth"), list(checks))
        assert report.statement
        return report.verdict, report.exit_code

    assert verdict(passed, teeth) == ("exact", 0)
    assert verdict(passed, teeth, failed) == ("different", 1)
    assert verdict(passed) == ("inconclusive", 2)
    assert verdict(passed, teeth, hollow) == ("inconclusive", 2)
    assert verdict(passed, dataclasses.replace(teeth, status="failed")) == ("inconclusive", 2)


@pytest.mark.parametrize("last", ["rows", "identity", "broken engines", "broken rules"])
def test_time_is_kept_and_what_is_left_out_is_told(llm: LLM, in_fp32, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """Where it is over when a part begins there is no verdict: of all that depends on time nothing more runs or is passed."""
    now, late = 0.0, list[Check]()

    def told(part: str, check: Check | None) -> None:
        nonlocal now
        if part == last:
            now = 60.0
        if now and check and check.section in ("identity", "teeth", "law") and check.name != "recomputed":
            late.append(check)

    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(session, "PREPARING", 0.0)
    report = audit(llm, Plan(minutes=1, max_tokens=14), in_fp32, told)
    assert (report.verdict, report.exit_code) == ("inconclusive", 2)
    assert {check.section for check in late} == {"identity", "teeth", "law"}
    assert {check.status for check in late} == {"left out"}
    assert any(check.status == "passed" for check in report.of("teeth")) == (last == "broken rules")


def test_a_broken_engine_is_told_with_its_first_difference(workshop: Workshop, replay) -> None:
    """Request, place, both tokens, how far their scores lie apart, where it came from, and that this is no rounding."""
    with FAULT["drafts believed"].broken():
        check = check_cell(workshop, core(workshop, 8)[1], replay)
    assert check.status == "failed"
    first = check.details["differences"][0]
    assert first["what"] == "token"
    assert first["gap"] > 1e-3
    assert "no tie" in first["kind"]
    assert first["recomputed_side"] == "the plain token"
    assert first["source"] == "thicket"
    assert first["kernels"] == workshop.llm.kernels.name
    assert first["request"] in check.summary
    json.dumps(check.details, allow_nan=False)


def test_a_near_tie_is_told_as_one(workshop: Workshop, replay) -> None:
    """Two tokens whose scores are almost equal: rounding may turn them, and the report says so."""
    from specdec.audit.runs import Difference

    request = next(request for request in workshop.requests if request.label == "greedy")
    plain = workshop.plain[request.seed]
    row = replay.row(list(request.prompt))
    replay_row, close = replay.row, int(row.topk(2).indices[1])
    row[close] = row.max() - 1e-5
    try:
        replay.row = lambda tokens: row
        told = replay.explain(Difference(request, "token", 0, plain.tokens[0], close), plain)
    finally:
        replay.row = replay_row
    assert told["gap"] < 1e-3
    assert "near tie" in told["kind"]


def test_rows_that_depend_on_their_company_fail(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose logits change by a last bit when more than eight rows run together is found, at the right widths."""
    model = llm.engine.model
    bind = type(model).bind

    def sloppy(self, attention, taps=()):
        run = bind(self, attention, taps)

        def forward(rows):
            logits, found = run(rows)
            return (logits * (1 + 2**-22) if rows.n_rows > 8 else logits), found

        return forward

    monkeypatch.setattr(type(model), "bind", sloppy)
    checks = {check.name: check for check in check_rows(model, llm.kernels, llm.config, lambda seconds: False)}
    assert checks["4 rows"].status == "passed"
    assert checks["16 rows"].status == "failed"
    assert checks["16 rows"].details["forms"][0]["largest"] > 0


def test_cells_that_meet_nothing_are_not_passed(workshop: Workshop, replay) -> None:
    """A drafter that drafted nothing tests nothing."""
    cell = Cell("oracle", 4, 8, "cold")
    whole, workshop._whole = workshop._whole, {}
    try:
        check = check_cell(workshop, cell, replay)
    finally:
        workshop._whole = whole
    assert check.status == "not reached"
    assert "nothing was drafted" in check.summary


def test_the_grid_has_every_pair_early(workshop: Workshop) -> None:
    """All states come first, and half of the cells are enough for all pairs of factors."""
    cells = grid(workshop, (1, 8))
    assert {cell.state for cell in cells[: len(STATES)]} == set(STATES)
    assert len(cells) == len(set(cells))
    assert n_pairs(cells[: len(cells) // 2]) == n_pairs(cells)


def test_two_prompts_share_a_block_and_no_prefix(llm: LLM) -> None:
    """Who looks a block up by its own tokens would take the wrong one."""
    a, b, *_ = make_prompts(llm, 24)
    assert a[16:32] == b[16:32]
    assert a[:16] != b[:16]


def test_the_law_through_the_engine_would_show_a_fault(workshop: Workshop) -> None:
    """The engine's answers fit the model's own law, and not one that is off by a few hundredths."""
    world = cut_world(workshop.llm, workshop.requests[0].prompt)
    assert _through_the_engine(workshop, world, lambda seconds: False).status == "passed"
    off = World(world.prompt, {path: p.flip(0) for path, p in world.law.items()}, world.tokens)
    assert _through_the_engine(workshop, off, lambda seconds: False).status == "failed"


def test_answers_that_would_take_too_long_are_not_begun(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest check of all would else run far past the time that the user gave: it is foretold from a few answers. A pass
    takes a second here, whatever it takes."""
    passes, step = 0, Engine.step

    def counted(engine: Engine) -> list[Delta]:
        nonlocal passes
        passes += 1
        return step(engine)

    monkeypatch.setattr(Engine, "step", counted)
    monkeypatch.setattr(law, "time", SimpleNamespace(perf_counter=lambda: float(passes)))
    world, foretold = cut_world(workshop.llm, workshop.requests[0].prompt), list[float]()
    check = _through_the_engine(workshop, world, lambda seconds: not foretold.append(seconds))
    assert (check.status, check.seconds) == ("left out", 0)
    took = _through_the_engine(workshop, world, lambda seconds: False).seconds
    assert took / 2 < foretold[0] < 2 * took


def test_without_speculation_there_is_nothing_to_audit(folder, in_fp32) -> None:
    llm = LLM(str(folder), precision="q8", speculation="off", self_test=False)
    with pytest.raises(ConfigError, match="speculation is off"):
        audit(llm, Plan(minutes=1), in_fp32, lambda part, check: None)


@pytest.fixture(scope="module", params=[name for name, rule in RULES.items() if rule.keeps == "law"])
def by_chance(folder, request: pytest.FixtureRequest) -> Workshop:
    """Of an engine whose rule keeps the law by chance."""
    drafters = "suffix,recycling"
    llm = LLM(str(folder), precision="q8", acceptance=request.param, speculation=drafters, self_test=False, pass_seconds=FLAT)
    workshop = Workshop(llm, 14)
    workshop.prepare(0.0)
    return workshop


def test_a_rule_by_chance_is_held_to_its_law(by_chance: Workshop) -> None:
    """Only greedy requests are compared token by token, and the engine's own draws are tested."""
    assert all(request.params.greedy for request in by_chance.requests)
    assert len(by_chance.requests) > 2
    a, b, *_ = make_prompts(by_chance.llm, 14)
    assert {a, b} <= {request.prompt for request in by_chance.requests}, "they share a block and no prefix"
    check = _through_the_engine(by_chance, cut_world(by_chance.llm, by_chance.requests[0].prompt), lambda seconds: False)
    assert check.status == "passed", check.summary
    assert by_chance.rule.name in check.summary


def test_engines_that_are_broken_in_their_chance_are_caught(by_chance: Workshop) -> None:
    """Where tokens cannot be compared, by the law: with drafts that are really refused and accepted, under every such rule."""
    sound, *broken = check_chance(by_chance, lambda seconds: False)
    assert (sound.section, sound.status) == ("law", "passed"), sound.summary
    assert sound.details["accepted"] > 50
    assert sound.details["drafted"] - sound.details["accepted"] > 50
    assert [check.name for check in broken] == [fault.name for fault in chance.FAULTS]
    assert [(check.section, check.status) for check in broken] == [("teeth", "passed")] * len(broken), [
        check.summary for check in broken if check.status != "passed"
    ]


def test_an_engine_whose_chance_is_sound_survives(by_chance: Workshop) -> None:
    """Being caught is no formality; and what a sound engine has not passed, or no time was left for, counts as not caught."""
    world = cut_world(by_chance.llm, by_chance.requests[0].prompt)
    harmless = Fault("none", "chance", "is not broken", contextlib.nullcontext)
    check = chance.check_fault(by_chance, harmless, world)
    assert check.status == "failed"
    assert "SURVIVED" in check.summary
    with chance.FAULTS[0].broken():
        sound, left = check_chance(by_chance, lambda seconds: False)
    assert (sound.status, left.status) == ("failed", "left out")
    _, left = check_chance(by_chance, lambda seconds: True)
    assert (left.section, left.status, left.details["faults"]) == ("teeth", "left out", len(chance.FAULTS))


def test_an_audit_of_a_rule_by_chance(folder, in_fp32, monkeypatch: pytest.MonkeyPatch) -> None:
    """From end to end: exact, with the law required and its own broken engines among the teeth."""
    monkeypatch.setattr(session, "PREPARING", 0.0)
    monkeypatch.setattr(law, "DRAWS", 250)
    monkeypatch.setattr(session, "grid", lambda workshop, batches: grid(workshop, batches)[:7])
    llm = LLM(str(folder), precision="q8", acceptance="block", speculation="suffix", self_test=False, pass_seconds=FLAT)
    report = audit(llm, Plan(minutes=20, max_tokens=14), in_fp32, lambda part, check: None)
    assert (report.verdict, report.exit_code) == ("exact", 0), report.statement
    assert "law" in report.required
    assert {fault.name for fault in chance.FAULTS} < {check.name for check in report.of("teeth")}


@pytest.mark.parametrize("minutes", [0, -1, float("nan"), float("inf")])
def test_times_that_are_none(minutes: float) -> None:
    with pytest.raises(ConfigError, match="minutes"):
        Plan(minutes=minutes)
