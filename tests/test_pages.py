"""The pages: each rule and each drafter has one with all that a reader asks for, and what pages refer to is there.

That worked examples are what the code gives is in ``bench/test_guide.py``.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from specdec.config import DRAFTERS, SpeculationConfig
from specdec.models.head_config import HeadKind
from specdec.verify import RULES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "src" / "specdec" / "heads").rglob("*.md")])
EXPLAINED = {
    **{f"rules/{name}.md": "rules.md" for name in RULES},
    **{
        f"drafters/{name}.md": "drafters.md"
        for name in sorted({*DRAFTERS, "draft-model", *get_args(HeadKind)} - {"trained", "eagle3"})
    },
}
"""Page -> the overview that leads to it. ``trained`` is said by kind, and EAGLE-3 with EAGLE."""


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", EXPLAINED)
def test_every_rule_and_drafter_has_its_page(name: str) -> None:
    """What it is, an example with a table, when to use it, its cost, its paper, and where the code and the proof are."""
    text = read(name)
    sections = dict(re.findall(r"^## (.*)\n\n((?:(?!## ).*\n)*)", text, re.MULTILINE))
    wanted = ["What it is", "Example", "When to use it", "Cost", "Settings", "Paper", "Code and proof"]
    if name.startswith("rules/"):
        wanted.remove("Settings")
    assert list(sections) == wanted
    assert "<!-- end -->" in sections["Example"]
    assert f"]({name})" in read(EXPLAINED[name])
    assert "arXiv" in sections["Paper"]


@pytest.mark.parametrize("name", RULES)
def test_a_rules_page_agrees_with_the_rule(name: str) -> None:
    """The papers that the code names, and what it says of the drafts and of what is kept."""
    rule, text = RULES[name], " ".join(read(f"rules/{name}.md").split())
    for paper in re.findall(r"arXiv [\d.]+\d", rule.paper):
        assert paper in text
    (row,) = re.findall(rf"^\| \[`{name}`\].*$", read("rules.md"), re.MULTILINE)
    keeps, drafts = (cell.strip() for cell in row.split("|")[2:4])
    assert keeps == {"tokens": "the tokens", "law": "the law", "lossy": "**neither: lossy**"}[rule.keeps]
    siblings = {"one": "chain", "distinct": "without replacement", "repeated": "independent", None: "any"}[rule.siblings]
    assert drafts.endswith(siblings)
    assert ("Lossy" in text) == (rule.keeps == "lossy")


def test_settings_have_the_defaults_that_pages_give() -> None:
    """And every setting of a drafter stands on one page."""
    told: Counter[str] = Counter()
    defaults = {field.name: field.default for field in dataclasses.fields(SpeculationConfig)}
    for page in (DOCS / "drafters").glob("*.md"):
        for name, default in re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page.read_text(encoding="utf-8"), re.MULTILINE):
            if name in defaults:
                assert default.strip() == str(defaults[name]), name
                told[name] += 1
    assert told == Counter(set(defaults) - {"drafters", "acceptance", "max_nodes"})


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them: lower case, words joined by hyphens, other signs dropped."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page: Path) -> None:
    """Files and headings; also sources of this repository that are only named."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), target
    for name in re.findall(r"`((?:src|tests|bench|docs|examples|deploy)/[\w./-]*\.(?:py|c|md|yaml))`", text):
        assert (ROOT / name).exists(), name
