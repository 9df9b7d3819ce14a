"""docs/guide.md: what it shows of results is what the result files give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide.md"


@pytest.fixture
def guide(monkeypatch: pytest.MonkeyPatch):
    """The script's module, which lies beside the results and not in the package."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import guide

    return guide


def test_the_committed_guide_is_what_the_results_give(guide) -> None:
    """Run `make benchmarks-doc` after a change of results."""
    text = GUIDE.read_text(encoding="utf-8")
    assert guide.fill(text, ROOT / "bench" / "results") == text
    assert set(re.findall(r"<!-- (\w+) -->", text)) == {"machine", "passes", "free", "textbook", "throttle", "checked", "end"}


def test_parts_are_made_anew_and_the_rest_is_left(guide) -> None:
    """Nothing outside the marks changes; a mark that nothing belongs to is an error."""
    made = guide.fill("a\n<!-- textbook -->\nold\n<!-- end -->\nb <!-- end -->\n", ROOT / "bench" / "results")
    assert made.startswith("a\n<!-- textbook -->\n| drafted |")
    assert "| 5 | 3.69 | 1.25 | 2.95 |\n" in made
    assert made.endswith("|\n<!-- end -->\nb <!-- end -->\n")
    with pytest.raises(KeyError, match="poems"):
        guide.fill("<!-- poems -->\n<!-- end -->", ROOT / "bench" / "results")


def test_figures_of_the_guide_exist() -> None:
    """Every image that it shows is committed."""
    images = re.findall(r"\]\((images/[\w.-]+)\)", GUIDE.read_text(encoding="utf-8"))
    assert len(images) == 3
    assert all((ROOT / "docs" / image).is_file() for image in images)
