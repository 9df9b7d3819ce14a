"""The measurement itself, on a tiny model: order of runs, what is forgotten, and that a changed token ends it."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import tiny
from measurements import gullible

from specdec import acceptance
from specdec.bench import run as bench_run
from specdec.bench.prompts import Prompt
from specdec.bench.run import Changed, Plan, measure
from specdec.config import ConfigError, SamplingParams
from specdec.llm import LLM
from specdec.types import Delta

PROMPTS = [
    Prompt("a", "chat", "tick tock tick tock"),
    Prompt("b", "code", ({"role": "user", "content": "one two one two"},)),
    Prompt("c", "code", "ding dong"),
]
PARAMS = SamplingParams(temperature=0, max_tokens=12, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(str(folder), precision="fp32", self_test=False)


class Clock:
    """Stands still but for what a test says that a step takes."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def timed(llm: LLM, name: str, seconds: float, clock: Clock, events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of its engine takes that long, and is taken down."""
    step = llm.engine.step

    def stepped() -> list[Delta]:
        events.append(name)
        clock.now += seconds
        return step()

    monkeypatch.setattr(llm.engine, "step", stepped)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_off_and_on_alternate_pass_by_pass_by_their_own_clocks(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> None:
    """The side that has worked less goes on; its seconds leave out the other's; every second turn begins with on."""
    plain = llm.without_speculation()
    monkeypatch.setattr(llm, "without_speculation", lambda: plain)
    events: list[str] = []
    clock = Clock()
    monkeypatch.setattr(bench_run, "time", clock)
    timed(plain, "off", 0.02, clock, events, monkeypatch)
    timed(llm, "on", 0.004, clock, events, monkeypatch)
    monkeypatch.setattr(llm, "generate", lambda *args: None)  # no warm-up
    monkeypatch.setattr(plain, "generate", lambda *args: None)
    turns: list[int] = []
    made = measure(llm, PROMPTS[:2], Plan((0.0,), PARAMS, concurrency, repeats=2), lambda prompt: turns.append(len(events)))
    assert (events[0], events[turns[3]]) == ("off", "on")
    first = events[: events.index("off", 1)]  # until the slow side was the one that had worked less
    assert first.count("on") >= 4
    assert events.count("off") >= 2 * 12
    wall = {mode: sum(turn["seconds"] for turn in made.turns if turn["mode"] == mode) for mode in ("off", "on")}
    assert wall == pytest.approx({"off": 0.02 * events.count("off"), "on": 0.004 * events.count("on")})
    for run in made.runs:
        assert run.seconds <= wall[run.mode]


def test_a_result_is_whole(llm: LLM, folder: Path) -> None:
    """Every run has its counters; off never drafts, on does; τ and passes agree; nothing names a folder of this machine."""
    made = measure(llm, PROMPTS, Plan((0.0, 0.8), PARAMS, concurrency=1, repeats=1))
    assert len(made.runs) == 3 * 2 * 2
    assert {run.tokens for run in made.runs} == {12}
    stats = {mode: [run.stats or {} for run in made.runs if run.mode == mode] for mode in ("off", "on")}
    assert all(s["drafted"] == 0 and s["target_passes"] == 12 for s in stats["off"])
    assert any(s["drafted"] for s in stats["on"])
    off = made.row("off")
    assert off is not None
    assert off.tau == 1
    assert all(0 < (run.first_token_seconds or 0) < run.seconds for run in made.runs)
    assert made.temperatures == [0.0, 0.8]
    assert list(made.v) == ["1", "2", "4", "8", "16", "32"]
    assert made.v["1"] == 1
    assert made.one_row["seconds"] > 0
    assert made.one_row["weights_bytes"] == llm.engine.model.n_bytes
    assert made.peak_memory_bytes is None or made.peak_memory_bytes > 10_000_000
    assert made.provenance["model"] == folder.name
    assert made.settings["max_tokens"] == 12
    n_prompt = sum(run.prompt_tokens for run in made.runs) / len(made.runs)
    assert made.settings["context"] == round(n_prompt + 6), "v is measured where passes are on average"
    assert sum(turn["tokens"] for turn in made.turns) == 12 * len(made.runs)


def test_drafters_forget_before_every_turn(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a drafter would have met the answer in the turn before, and every later turn would be too good."""
    events: list[str] = []
    monkeypatch.setattr(llm.engine.budget, "clear", lambda: events.append("clear"))
    measure(llm, PROMPTS[:1], Plan((0.0, 0.8), PARAMS, concurrency=1, repeats=2), lambda prompt: events.append(prompt.id))
    assert events == ["clear", "a", "a"] * 4


def test_neither_side_finds_a_prompt_in_its_prefix_cache(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculation off and on read each prompt anew in every turn, else one of them would answer a prompt it has half read."""
    plain = llm.without_speculation()
    monkeypatch.setattr(llm, "without_speculation", lambda: plain)
    for side in (llm, plain):
        side.engine.stats.cached_tokens = 0
    long = [Prompt("long", PROMPTS[0].task, ({"role": "user", "content": "word " * 30},))]
    measure(llm, long, Plan((0.0, 0.8), PARAMS, concurrency=1, repeats=2), lambda _: None)
    assert llm.engine.stats.cached_tokens == plain.engine.stats.cached_tokens == 0


def test_so_many_requests_are_in_flight(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With concurrency 2 there are two at once, and never three; each request still gives its own tokens and times."""
    alone = measure(llm, PROMPTS, Plan((0.0,), PARAMS, concurrency=1, repeats=1))
    at_once: list[int] = []
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (at_once.append(len(llm.engine.scheduler.sequences)), step())[1])
    made = measure(llm, PROMPTS, Plan((0.0,), PARAMS, concurrency=2, repeats=1))
    assert max(at_once) == 2
    assert sorted(run.mode for run in made.runs) == ["off"] * 3 + ["on"] * 3
    assert sorted(run.prompt_tokens for run in made.runs) == sorted(run.prompt_tokens for run in alone.runs)
    assert not llm.engine.has_work


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_changed_token_ends_the_measurement(llm: LLM, monkeypatch: pytest.MonkeyPatch, concurrency: int) -> None:
    """What is measured is a promise kept: a verifier that accepts too much is found out, and the prompt is named."""
    monkeypatch.setattr(acceptance, "follow", gullible)
    with pytest.raises(Changed, match=r"the runs of a gave different tokens, from token \d+ on"):
        measure(llm, PROMPTS[:1], Plan((0.0,), PARAMS, concurrency=concurrency, repeats=2))
    assert not llm.engine.has_work


def test_what_cannot_be_measured(llm: LLM, folder: Path) -> None:
    """No speculation, too many at once, a prompt that does not fit, bad numbers: told before anything runs."""
    plan = Plan((0.0,), PARAMS, concurrency=1, repeats=1)
    with pytest.raises(ConfigError, match="speculation is off"):
        measure(LLM(str(folder), precision="fp32", speculation="off", self_test=False), PROMPTS, plan)
    with pytest.raises(ConfigError, match="concurrency must be at most 8"):
        measure(llm, PROMPTS, Plan((0.0,), PARAMS, concurrency=9, repeats=1))
    with pytest.raises(ConfigError, match=r"long has \d+ tokens, which leaves no room"):
        measure(llm, [Prompt("long", "chat", "x" * 5000)], plan)
    for wrong, name in (((), "temperatures"), ((0.0, 0.0), "temperatures"), ((-1.0,), "temperature")):
        with pytest.raises(ConfigError, match=name):
            Plan(wrong, PARAMS, concurrency=1, repeats=1)
    with pytest.raises(ConfigError, match="repeats must be"):
        Plan((0.0,), PARAMS, concurrency=1, repeats=0)
