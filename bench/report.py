"""docs/benchmarks.md and its plots, from the files in bench/results, and the parts of other pages that are computed.

    python bench/report.py [--results bench/results] [--docs docs] [--tables-only]

Plots need matplotlib (``pip install -e '.[bench]'``; ``make benchmarks-doc`` does it all).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import drafter_examples
import guide
import operations
import rule_examples
from limits_part import read_limits
from page import document, read
from parts import fill
from servers import read_servers

ROOT = Path(__file__).parent.parent

PAGES = {"guide.md": guide.PARTS, **operations.PARTS, **rule_examples.PARTS, **drafter_examples.PARTS}
"""Pages with computed parts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    parser.add_argument("--tables-only", action="store_true", help="leave the plots as they are")
    arguments = parser.parse_args()
    results = read(arguments.results)
    if not arguments.tables_only:
        from plots import draw

        draw(results, arguments.docs / "images")
        guide.draw(arguments.results, arguments.docs / "images")
    (arguments.docs / "benchmarks.md").write_text(text(arguments.results), encoding="utf-8")
    for name, parts in PAGES.items():
        page = arguments.docs / name
        page.write_text(fill(page.read_text(encoding="utf-8"), parts, arguments.results), encoding="utf-8")


def text(folder: Path) -> str:
    """The page that the result files of a folder give."""
    table = folder / "drafters.json"
    drafters = json.loads(table.read_text(encoding="utf-8")) if table.exists() else None
    return document(read(folder), drafters, read_servers(folder), read_limits(folder))


if __name__ == "__main__":
    main()
