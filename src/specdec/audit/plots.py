"""The pictures of a report as inline SVG: text and shapes only, coloured by the page's own variables, so dark and light fit.

Every function takes checks and gives one ``<svg>``, or an empty string where there is nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Many
from html import escape

from specdec.audit.report import Check, Status

WIDTH = 720
_CLASS: dict[Status, str] = {
    "passed": "good", "failed": "bad", "measured": "plain", "not reached": "open", "left out": "open",
}  # fmt: skip


def _svg(height: float, title: str, parts: Iterable[str]) -> str:
    body = "".join(parts)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title>{body}</svg>'
    )


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, style: str, tip: str = "") -> str:
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" class="{style}">{inside}</rect>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str = "axis") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'


def _dot(x: float, y: float, style: str, tip: str, radius: float = 3.5) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{style}"><title>{escape(tip)}</title></circle>'


def rows(checks: Many[Check]) -> str:
    """Widths from left to right; a bar as high as the largest difference of a logit, a low mark where there is none."""
    tested = [check for check in checks if "rows" in check.details]
    if not tested:
        return ""
    largest = [max(form["largest"] for form in check.details["forms"]) for check in tested]
    step, floor, top = (WIDTH - 60) / len(tested), 96.0 if any(largest) else 24.0, 14.0
    parts = [_line(40, floor, WIDTH - 10, floor), _text(36, floor + 4, "0", "small", "end")]
    if any(largest):
        parts += [_text(36, top + 4, f"{max(largest):.0e}", "small", "end")]
    for i, (check, value) in enumerate(zip(tested, largest, strict=True)):
        x = 45 + i * step
        height = 4 if value == 0 else 8 + (floor - top - 8) * _log_share(value, [v for v in largest if v])
        parts.append(_box(x, floor - height, max(6, step - 6), height, _CLASS[check.status], f"{check.name}: {check.summary}"))
        parts.append(_text(x + max(6, step - 6) / 2, floor + 16, str(check.details["rows"]), "small", "middle"))
    parts.append(_text(45, floor + 34, "rows in a pass", "small"))
    return _svg(floor + 42, "largest difference of a logit, by the number of rows in a pass", parts)


def _log_share(value: float, values: Many[float]) -> float:
    low, high = math.log(min(values)), math.log(max(values))
    return 1.0 if low == high else (math.log(value) - low) / (high - low)


def grid(checks: Many[Check]) -> str:
    """Drafters down, states of the cache across; each square holds its cells: green passed, red failed, grey not reached."""
    cells = [check for check in checks if "drafter" in check.details]
    if not cells:
        return ""
    drafters = list(dict.fromkeys(check.details["drafter"] for check in cells))
    states = list(dict.fromkeys(check.details["state"] for check in cells))
    left, top, row = 170.0, 26.0, 30.0
    column = (WIDTH - left - 10) / len(states)
    parts = [_text(left + (i + 0.5) * column, 16, state, "small", "middle") for i, state in enumerate(states)]
    for j, drafter in enumerate(drafters):
        y = top + j * row
        parts.append(_text(left - 8, y + 18, drafter if len(drafter) < 26 else drafter[:24] + "…", "label", "end"))
        for i, state in enumerate(states):
            here = [c for c in cells if c.details["drafter"] == drafter and c.details["state"] == state]
            parts.append(_box(left + i * column + 2, y + 2, column - 4, row - 4, "back"))
            size = min(14.0, (column - 12) / max(1, len(here)) - 2)
            for k, check in enumerate(here):
                x = left + i * column + 7 + k * (size + 2)
                tip = f"{check.name}: {check.status}. {check.summary}"
                parts.append(_box(x, y + (row - size) / 2, size, size, _CLASS[check.status], tip))
    return _svg(top + len(drafters) * row + 6, "cells that were run, by drafter and state of the cache", parts)


def tokens_per_pass(checks: Many[Check]) -> str:
    """How much each drafter really sped the cells up, so that one sees that speculation was at work."""
    totals: dict[str, tuple[int, int]] = {}
    for check in checks:
        if check.details.get("passes") and "drafter" in check.details:
            tokens, passes = totals.get(check.details["drafter"], (0, 0))
            totals[check.details["drafter"]] = tokens + check.details["tokens"], passes + check.details["passes"]
    if not totals:
        return ""
    left, row = 170.0, 22.0
    most = max(tokens / passes for tokens, passes in totals.values())
    parts = []
    for i, (drafter, (tokens, passes)) in enumerate(totals.items()):
        y, tau = 4 + i * row, tokens / passes
        length = (WIDTH - left - 70) * tau / most
        parts.append(_text(left - 8, y + 14, drafter if len(drafter) < 26 else drafter[:24] + "…", "label", "end"))
        parts.append(_box(left, y + 2, length, row - 6, "plain", f"{drafter}: {tokens} tokens in {passes} passes"))
        parts.append(_text(left + length + 6, y + 14, f"{tau:.2f}", "small"))
    return _svg(8 + len(totals) * row, "tokens per pass of a sequence, by drafter", parts)


def laws(checks: Many[Check]) -> str:
    """Total variation of each sampled law from the exact one, beside the bound that chance keeps below."""
    tested = [check for check in checks if "tv" in check.details]
    if not tested:
        return ""
    left, row, right = 220.0, 22.0, WIDTH - 60.0
    most = max(max(check.details["tv"], check.details["tv_bound"]) for check in tested) * 1.1
    parts = []
    for i, check in enumerate(tested):
        y, details = 4 + i * row, check.details
        tv, bound = (left + (right - left) * details[name] / most for name in ("tv", "tv_bound"))
        name = check.name if len(check.name) < 34 else check.name[:32] + "…"
        parts.append(_text(left - 8, y + 14, name, "label", "end"))
        parts.append(_line(left, y + 10, right, y + 10, "faint"))
        parts.append(_line(bound, y + 2, bound, y + 18))
        parts.append(_dot(tv, y + 10, _CLASS[check.status], f"{check.name}: {check.summary}"))
    y = 4 + len(tested) * row
    parts += [_text(left, y + 12, "0", "small", "middle"), _text(right, y + 12, f"{most:.3f}", "small", "middle")]
    return _svg(y + 20, "total variation from the exact law; the upright line is the most that chance gives", parts)


def likelihood(checks: Many[Check]) -> str:
    """Of each comparison, the added loss of each window of the text, with the mean and two standard errors of it."""
    return "".join(_added(check) for check in checks if check.details.get("added_by_window"))


def _added(check: Check) -> str:
    details = check.details
    values, mean, error = details["added_by_window"], details["added"], details["standard_error"]
    low = min([0.0, *values, mean - 2 * error])
    high = max([0.0, *values, mean + 2 * error])
    span = (high - low) or 1.0

    def x(value: float) -> float:
        return float(60 + (WIDTH - 120) * (value - low) / span)

    parts = [
        _line(60, 40, WIDTH - 60, 40, "faint"),
        _line(x(0), 28, x(0), 62),
        _text(x(0), 76, details["against"], "small", "middle"),
        _box(x(mean - 2 * error), 34, max(1.0, x(mean + 2 * error) - x(mean - 2 * error)), 12, "back"),
        *(_dot(x(value), 40, "plain", f"window {i}: {value:+.4f} nats a token") for i, value in enumerate(values)),
        _line(x(mean), 28, x(mean), 52, "mean"),
        _text(x(mean), 22, f"{mean:+.4f} nats a token", "small", "middle"),
    ]
    return _svg(84, f"{check.name}: loss added to that of {details['against']}, by window of the text", parts)
