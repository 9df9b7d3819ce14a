"""The page is one file that asks for nothing else, is whole, and says nothing that the report does not."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

from specdec.audit import html
from specdec.audit.report import Check, Report

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Reader(HTMLParser):
    """Checks that tags nest, and collects what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "data", "srcset", "xlink:href")]
        if tag in ("script", "link", "iframe", "object", "img"):
            self.fetched.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        """Such as <line/> of SVG."""

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_needs_nothing_else(report: Report) -> None:
    page = html.render(report)
    reader = read(page)
    assert reader.fetched == []
    assert not re.search(r"url\(|@import|https?:", page.split("<body>")[0])
    assert "prefers-color-scheme: dark" in page


def test_the_page_tells_every_check(report: Report) -> None:
    text = read(html.render(report)).text
    assert report.statement in text
    for check in report.checks:
        assert check.name in text
        assert check.summary in text


def test_plots_are_sound_xml_and_every_square_has_its_tip(report: Report) -> None:
    svgs = re.findall(r"<svg.*?</svg>", html.render(report), flags=re.S)
    assert len(svgs) >= 2
    for svg in svgs:
        root = ElementTree.fromstring(svg)
        assert root.attrib["aria-label"]


def test_what_a_model_says_is_text_and_not_markup() -> None:
    """A token such as </td><script> must not become part of the page."""
    evil = "</td><script>alert(1)</script>"
    details = {"drafter": evil, "state": "cold", "width": 1, "batch": 1, "passes": 1, "tokens": 2, "differences": [evil]}
    report = Report({"model": evil}, {}, {}, (), [Check("identity", evil, "failed", evil, 0.0, details)], [evil])
    page = html.render(report)
    assert "<script>alert" not in page
    assert read(page).text.count(evil) >= 4


def test_a_report_of_nothing_is_a_page_too() -> None:
    assert "inconclusive" in read(html.render(Report({}, {}, {}, ("rows",)))).text
