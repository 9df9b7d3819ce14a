"""A report as one HTML file that needs nothing else: no script, no font, no picture from anywhere."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from specdec.audit import plots
from specdec.audit.report import TITLES, Report

_PLOTS = {
    "rows": (plots.rows,),
    "identity": (plots.grid, plots.tokens_per_pass),
    "law": (plots.laws,),
    "quality": (plots.likelihood,),
}


def render(report: Report) -> str:
    """The page."""
    environment = Environment(
        loader=PackageLoader("specdec.audit", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = [
        {
            "name": section,
            "title": TITLES[section],
            "checks": report.of(section),
            "plots": [Markup(svg) for plot in _PLOTS.get(section, ()) if (svg := plot(report.of(section)))],
        }
        for section in report.sections
    ]
    return environment.get_template("report.html.jinja").render(report=report, sections=sections)


def save(report: Report, path: Path) -> None:
    """Write the page."""
    path.write_text(render(report), encoding="utf-8")
