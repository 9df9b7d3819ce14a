"""Pages with computed parts: what they show is what the result files, the rules and the drafters give."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS, RESULTS = ROOT / "docs", ROOT / "bench" / "results"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scripts' module, which lies beside the results and not in the package."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import parts

    return parts


def test_the_committed_pages_are_what_results_and_code_give(parts: Any) -> None:
    """Run `make benchmarks-doc` after a change of results, of a rule or of a drafter."""
    import report

    for name, made in report.PAGES.items():
        text = (DOCS / name).read_text(encoding="utf-8")
        assert parts.fill(text, made, RESULTS) == text
        assert set(re.findall(r"<!-- (\w+) -->", text)) == {*made, "end"}


def test_examples_are_of_the_world_that_the_pages_name(parts: Any) -> None:
    """The text between the tables is written by hand."""
    import rule_examples

    world = {name: ", ".join(f"{x:g}" for x in law) for name, law in (("p", rule_examples.P), ("q", rule_examples.Q))}
    for name in ("rules.md", "rules/coupled.md", "rules/recursive.md", "rules/multistep.md"):
        text = " ".join((DOCS / name).read_text(encoding="utf-8").split())
        assert f"p = {world['p']}" in text
        assert f"q = {world['q']}" in text


def test_parts_are_made_anew_and_the_rest_is_left(parts: Any) -> None:
    """Nothing outside the marks changes; a mark that nothing belongs to is an error."""
    import guide

    made = parts.fill("a\n<!-- textbook -->\nold\n<!-- end -->\nb <!-- end -->\n", guide.PARTS, RESULTS)
    assert made.startswith("a\n<!-- textbook -->\n| drafted |")
    assert "| 5 | 3.69 | 1.25 | 2.95 |\n" in made
    assert made.endswith("|\n<!-- end -->\nb <!-- end -->\n")
    with pytest.raises(KeyError, match="poems"):
        parts.fill("<!-- poems -->\n<!-- end -->", guide.PARTS, RESULTS)


def test_figures_of_the_guide_exist() -> None:
    """Every image that it shows is committed."""
    images = re.findall(r"\]\((images/[\w.-]+)\)", (DOCS / "guide.md").read_text(encoding="utf-8"))
    assert len(images) == 3
    assert all((DOCS / image).is_file() for image in images)
