"""docs/benchmarks.md and its plots, from the result files in bench/results.

    python bench/report.py [--results bench/results] [--docs docs] [--tables-only]

Plots need matplotlib (``pip install -e '.[bench]'``; ``make benchmarks-doc`` does it all).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from page import document, read

ROOT = Path(__file__).parent.parent


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
    table = arguments.results / "drafters.json"
    drafters = json.loads(table.read_text(encoding="utf-8")) if table.exists() else None
    (arguments.docs / "benchmarks.md").write_text(document(results, drafters), encoding="utf-8")


if __name__ == "__main__":
    main()
