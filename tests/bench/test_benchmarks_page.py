"""docs/benchmarks.md is what the result files give, and its tables say what is in them. No plotting library is needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from measurements import counters, report, timing

from specdec.bench.result import Report, save

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch):
    """The script's module, which lies beside the results and not in the package."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import page

    return page


def own(**more) -> Report:
    return report(
        timing("off", "chat-1", 11.0, stats=counters(11, 11, [], [])),
        timing("on", "chat-1", 5.5, stats=counters(4, 11, [4, 2], [3, 1])),
        timing("off", "code-1", 21.0, stats=counters(11, 11, [], [])),
        timing("on", "code-1", 22.0, stats=counters(11, 11, [5], [0])),
        **more,
    )


def peers(**more) -> Report:
    runs = [
        timing(mode, f"{task}-1", s) for mode, s in (("slow plain", 44.0), ("fast plain", 15.0)) for task in ("chat", "code")
    ]
    return report(*runs, v={}, peak_memory_bytes=None, **more)


def table(text: str, first: str) -> list[list[str]]:
    """The cells below the header that begins with ``first``."""
    (found,) = re.findall(rf"^\| {re.escape(first)} \|.*\n\|[-:|]+\|\n((?:\|.*\n)*)", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()]


def test_the_committed_page_is_what_the_results_give(page) -> None:
    """Figures in the docs have a file behind them; run `make benchmarks-doc` after a change of results or of the text."""
    import report as script

    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == script.text(ROOT / "bench" / "results")


def test_tables_of_speculation(page, tmp_path: Path) -> None:
    """Read from files: speed, waiting, acceptance by depth, v(M), with the file and the command they come from."""
    save(own(), tmp_path / "made.json")
    (tmp_path / "other.json").write_text('{"provenance": {}, "rows": []}')  # of another script
    text = page.document(page.read(tmp_path))
    assert table(text, "task | prompts") == [
        ["chat", "1", "1.0", "2.0", "2.00", "1.0", "2.2", "2.22", "2.75", "0.81"],
        ["code", "1", "0.5", "0.5", "0.95", "0.5", "0.5", "0.95", "1.00", "0.95"],
        ["**all**", "2", "0.7", "0.8", "**1.16**", "0.7", "0.8", "1.18", "1.47", "0.80"],
    ]
    assert table(text, "accepted at depth") == [
        ["chat", "0.75", "0.50", *"––––––"],
        ["code", "0.00", *"–––––––"],
        ["**all**", "0.33", "0.50", *"––––––"],
    ]
    assert table(text, "task | first token off, ms")[0] == ["chat", "1000.0", "1000.0", "100.0", "100.0", "200.0", "200.0"]
    assert table(text, "rows of a pass | 1 | 8") == [["v(M)", "1.00", "1.30"]]
    for words in (
        "[made.json](../bench/results/made.json), made on 2026-01-02 by `specdec bench --json made.json`; commit 0123456789ab.",
        "Worst task: code, 0.95 times the speed of off.",
        "Peak memory: 123 MB.",
        "images/made-speed-0.svg",
        "images/made-costs.svg",
    ):
        assert words in text


def test_tables_of_other_programs(page) -> None:
    """The fastest first, this engine among them, and a line for whatever was not measured alike."""
    changed = {**own().provenance, "precision": "q4_1"}
    text = page.document({"made": own(), "peers": peers(provenance=changed)})
    assert [row[:4] for row in table(text, "program")] == [
        ["specdec on (made)", "0.8", "1.00", "0.8"],
        ["fast plain", "0.7", "0.92", "0.7"],
        ["specdec off (made)", "0.7", "0.86", "0.7"],
        ["slow plain", "0.2", "0.31", "0.2"],
    ]
    assert table(text, "tokens/s | chat | code")[-1] == ["slow plain", "0.2", "0.2"]
    assert "- precision: fp32 against q4_1" in text


def test_only_like_stands_beside_like(page) -> None:
    """A run of several requests at once has other rates; it does not stand beside programs that ran one."""
    several = own(settings={**own().settings, "concurrency": 4})
    text = page.document({"several": several, "peers": peers()})
    assert [row[0] for row in table(text, "program")] == ["fast plain", "slow plain"]


def test_this_engine_among_others_stands_there_once(page) -> None:
    """Where the comparison ran this engine too, its own results of another hour do not stand beside the others."""
    runs = [timing(mode, "chat-1", 10.0) for mode in ("specdec on", "slow plain")]
    rates = [{"mode": "slow plain", "prompt_tokens": 1000, "seconds": 4.0, "tokens_per_second": 250.0}]
    mixed = report(*runs, v={}, peak_memory_bytes=None, prompt_processing=tuple(rates))
    text = page.document({"made": own(), "peers": mixed})
    assert {row[0] for row in table(text, "program")} == {"specdec on", "slow plain"}
    assert "### Prompts of 1,000 tokens" in text
    assert ["slow plain", "250"] in table(text, "reading prompts")


def test_several_in_flight(page) -> None:
    """The rate of all requests together: the median of the turns, from their own clock."""
    turns = [
        {"mode": m, "temperature": 0.0, "turn": t, "seconds": s, "tokens": 100}
        for m in ("off", "on")
        for t, s in ((0, 10.0), (1, 10.0), (2, 50.0))
    ]
    text = page.document({"made": own(settings={**own().settings, "concurrency": 4}, turns=tuple(turns))})
    assert "All together: 10.0 tokens/s off, 10.0 on." in text
    assert "All together" not in page.document({"made": own(turns=tuple(turns))})


def test_without_results(page) -> None:
    """The page says how to make the first."""
    text = page.document({})
    assert "specdec bench --json bench/results/specdec.json" in text
    assert "|--" not in text


def row(server: str, in_flight: int, rate: float) -> dict[str, object]:
    waits = {"request_seconds_p50": 1.25, "request_seconds_max": 2.5}
    return {"server": server, "in_flight": in_flight, "turns": 2, "requests": 8, "tokens_per_second": rate, **waits}


def test_servers_under_load(page) -> None:
    """Rates, this server's speculation against none and against the best of the others, and who was left out and why."""
    result = {
        "provenance": {"date": "2026-01-02T", "command": "python x.py", "commit": "a" * 40, "threads": 2, "cpu": "a CPU"},
        "settings": {"prompts": 24, "max_tokens": 64},
        "rows": [
            row("specdec on", 1, 300.0), row("specdec on", 16, 400.0), row("specdec off", 1, 200.0),
            row("specdec off", 16, 400.0), row("one", 1, 100.0), row("one", 16, 50.0), row("two", 1, 20.0),
            row("two", 16, 160.0),
        ],
        "skipped": [{"server": "three", "reason": "not installed"}],
    }  # fmt: skip
    text = page.document({}, servers=result)
    for line in (
        "medians of 2 turns",
        "| specdec on | 300.0 | 400.0 |",
        "| specdec on over off | 1.50 | 1.00 |",
        "| specdec on over the best other | 3.00 | 2.50 |",
        "| two | 1.2 / 2.5 | 1.2 / 2.5 |",
        "Not measured: three: not installed.",
    ):
        assert line in text
    assert "Servers under load" not in page.document({})


def test_what_one_process_takes(page) -> None:
    """A pass against its bound, v(M), growth with the context, where a start's seconds go, peaks, and a busy neighbour."""
    passes = [(128, 1, 3.0), (128, 8, 6.0), (4096, 1, 9.0)]
    result = {
        "provenance": {"date": "2026-01-02T", "command": "python x.py", "commit": "a" * 40, "threads": 2, "cpu": "a CPU"},
        "passes": {
            "weights_bytes": 100e6,
            "bytes_per_second": 50e9,
            "kv_bytes_per_token": 20_000.0,
            "passes": [{"context": context, "rows": rows, "ms": ms} for context, rows, ms in passes],
        },
        "start": {"seconds": 3.5, "least_seconds": 3.25, "parts": {"torch": 2.0, "first token": 0.01}},
        "memory": {"off": {"tokens": 2000, "peak_bytes": 400e6, "file_bytes": 90e6}},
        "neighbour": {"alone_seconds": 1.0, "beside_seconds": 2.5},
    }
    text = page.document({}, limits=result)
    for line in (
        "takes 3.00 ms, **1.50 times its bound**",
        "| v(M) | 1.00 | 2.00 |",
        "| 4,096 | 9.00 | 81.9 | 3.00 |",
        "**3.5 s** in the median, 3.2 s at least. Of it, in seconds: torch 2.00, first token 0.01.",
        "decodes 2,000 tokens, at its peak, speculation off: **400 MB**, 90 of them pages",
        "takes **2.5 times** as long",
    ):
        assert line in text
    assert "What one process takes" not in page.document({})
