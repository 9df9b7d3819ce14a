"""Servers from outside: ours is exact, and every way in which the fake one misbehaves is found and named, and no other."""

from __future__ import annotations

import pytest
from fake_server import faking
from harness import FLAT
from serving import serving

from specdec.audit.client import Server
from specdec.audit.report import Report
from specdec.audit.server import audit, questions
from specdec.config import ConfigError
from specdec.llm import LLM


def run(fault: str, against: str | None = None) -> Report:
    with faking(fault) as url, Server(url) as server:
        if against is None:
            return audit(server, None, 5.0, 10, lambda part, check: None)
        with faking(against) as other_url, Server(other_url) as other:
            return audit(server, other, 5.0, 10, lambda part, check: None)


def failed_sections(report: Report) -> set[str]:
    return {check.section for check in report.failed}


def test_a_server_that_keeps_its_word() -> None:
    report = run("none")
    assert (report.verdict, report.exit_code) == ("exact", 0)
    assert len(report.of("repetition")) == len(questions(False, 10))
    assert "95 % confidence" in report.notes[0]


@pytest.mark.parametrize(
    ("fault", "sections"),
    [("drift", {"repetition"}), ("load", {"load"}), ("stream", {"streaming"}), ("bare", set()), ("seedless", set())],
)
def test_each_fault_is_found_where_it_is(fault: str, sections: set[str]) -> None:
    report = run(fault)
    assert sections <= failed_sections(report)
    if fault != "drift":  # which shows everywhere
        assert failed_sections(report) == sections
    assert report.exit_code == (1 if sections else 0)


def test_a_seed_that_is_not_kept_is_told_and_not_held_against_the_server() -> None:
    sampled = [check for check in run("seedless").of("repetition") if check.name.startswith("seeded")]
    assert {check.status for check in sampled} == {"measured"}
    assert "seed is ignored" in sampled[0].summary


def test_two_servers_are_compared_and_the_gap_is_told() -> None:
    assert run("none", "none").verdict == "exact"
    report = run("none", "other")
    assert failed_sections(report) == {"against"}
    first = report.failed[0].details["differences"][0]
    assert (first["token"], first["gap"]) == (5, 1.5)
    left = [check for check in report.of("against") if check.status == "left out"]
    assert {check.name for check in left} == {"seeded 1", "seeded 2"}


def test_servers_that_cannot_be_audited() -> None:
    with pytest.raises(ConfigError, match="out of order"):
        run("broken")
    with pytest.raises(ConfigError, match="no models are told"):
        Server("http://127.0.0.1:9/v1")
    for url in ("localhost:8000", "ftp://x/v1", "http://"):
        with pytest.raises(ConfigError, match="address"):
            Server(url)


def test_a_path_may_be_left_out() -> None:
    with faking("none") as url, Server(url.removesuffix("/v1")) as server:
        assert server.url == url
        assert not server.ours


def test_our_server_is_exact_request_by_request(folder) -> None:
    """Off and on, alone and under load, whole and streamed, on both routes: ids and log-probabilities too."""
    llm = LLM(str(folder), precision="q8", self_test=False, pass_seconds=FLAT)
    with serving(llm, api_keys=("k",)) as running, Server(running.url, "k") as server:
        assert server.ours
        report = audit(server, None, 5.0, 8, lambda part, check: None)
    assert (report.verdict, report.exit_code) == ("exact", 0), report.statement
    assert any("came from drafts" in check.summary for check in report.of("speculation"))


def test_our_server_with_a_fault_is_found(folder) -> None:
    """A server whose engine believes its drafts answers otherwise with speculation on."""
    from specdec.audit.sabotage import FAULTS

    (fault,) = [fault for fault in FAULTS if fault.name == "drafts believed"]
    llm = LLM(str(folder), precision="q8", self_test=False, pass_seconds=FLAT)
    with fault.broken(), serving(llm) as running, Server(running.url) as server:
        report = audit(server, None, 5.0, 6, lambda part, check: None)
    assert "speculation" in failed_sections(report)
    assert report.exit_code == 1
