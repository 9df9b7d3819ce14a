"""Parts of pages in docs/ that are computed, from results or by the code that the page is about.

A part stands between ``<!-- name -->`` and ``<!-- end -->``; what is between them is replaced, the rest is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

_PART = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str, parts: Mapping[str, Callable[[Path], str]], results: Path) -> str:
    """A page with every part made anew.

    Args:
        text: the page.
        parts: make the text of a part, by its name, from the folder of results.

    Raises:
        KeyError: a part that there is none of.
    """
    return _PART.sub(lambda found: found[1] + parts[found[2]](results) + found[3], text)
