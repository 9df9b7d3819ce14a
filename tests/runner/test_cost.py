"""Seconds of a pass by its rows: interpolation, following, the measurement, and the file it is kept in."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import kernels
from specdec.runner import measure as measuring
from specdec.runner.cost import Costs
from specdec.runner.runner import Runner
from specdec.testing import TableModel
from specdec.types import Step


def model(v: int = 16, context: int = 512) -> TableModel:
    return TableModel(torch.zeros(v, v), context)


@pytest.fixture(scope="module")
def ops():
    return kernels.select(torch.device("cpu"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Measurements that were made; each gives other figures than the one before."""
    calls: list[list[int]] = []

    def measure(model, kernels, sizes):
        calls.append(sizes)
        return Costs({1: 1.0, 8: 1.0 + len(calls)}), True

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(measuring, "outdone", lambda *_: False)
    return calls


def test_straight_lines_between_points_and_after_the_last() -> None:
    """Between measured sizes, and beyond them, where a batch has more rows than were measured."""
    costs = Costs({8: 2.4, 1: 1.0, 4: 1.6})
    assert [round(costs.seconds(rows), 9) for rows in (1, 2, 4, 6, 8, 10, 108)] == [1.0, 1.2, 1.6, 2.0, 2.4, 2.8, 22.4]
    assert costs.relative() == {1: 1.0, 4: 1.6, 8: 2.4}


def test_more_rows_are_never_cheaper() -> None:
    """A dip in the figures is noise; following it would fill passes up with rows for their own sake."""
    costs = Costs({1: 1.0, 2: 3.0, 4: 2.0, 8: 2.5})
    assert costs.points == {1: 1.0, 2: 3.0, 4: 3.0, 8: 3.0}


@pytest.mark.parametrize("seconds", [{}, {0: 1.0}, {1: 0.0}, {1: float("nan")}, {1: -1.0}])
def test_costs_that_are_none(seconds: dict[int, float]) -> None:
    """A rate of tokens per second could not be formed of these."""
    with pytest.raises(ValueError, match="costs need"):
        Costs(seconds)


def test_the_factor_follows_what_runs_and_not_an_outlier() -> None:
    """Twice as slow for long: all sizes become twice as dear. One pass that hung: next to nothing happens."""
    costs = Costs({1: 1.0, 9: 2.0})
    for _ in range(200):
        costs.follow(5, 3.0)
    assert costs.seconds(1) == pytest.approx(2.0, rel=0.01)
    assert costs.seconds(9) == pytest.approx(4.0, rel=0.01)
    costs.follow(1, 1000.0)
    assert costs.seconds(1) < 2.05
    before = costs.seconds(1)
    costs.follow(500, 1e6)  # a prompt, far from any measured size
    assert costs.seconds(1) == before


@pytest.mark.parametrize(("asked", "measured"), [(128, 128), (300, 300), (9999, 504)])
def test_passes_attend_to_the_context_asked_for(ops, monkeypatch: pytest.MonkeyPatch, asked: int, measured: int) -> None:
    """Rows cost more the more they attend to; there is no more than the model has room for."""
    seen: list[int] = []
    burst = measuring.Passes.burst

    def noting(passes: measuring.Passes, context: int, rows: int) -> Step:
        seen.append(context)
        return burst(passes, context, rows)

    monkeypatch.setattr(measuring.Passes, "burst", noting)
    measuring.measure(model(), ops, [1, 8], context=asked, rounds=1)
    assert set(seen) == {measured}


def test_given_costs_follow_nothing() -> None:
    """What a user states stays as it is."""
    costs = Costs({1: 1.0, 9: 2.0}, fixed=True)
    costs.follow(1, 50.0)
    assert costs.seconds(9) == 2.0


def test_the_measurement_takes_turns_and_the_fastest(ops) -> None:
    """Each size is timed once per round; a slow pass in between does not count; steady figures say so."""
    durations = {1: 10.0, 4: 14.0, 8: 18.0}

    class Clock:
        now, calls = 0.0, 0

        def __call__(self) -> float:
            return self.now

    clock = Clock()
    runner = Runner.forward
    order: list[int] = []

    def forward(self, step):
        order.append(step.n_rows)
        clock.now += durations[step.n_rows] * (3 if len(order) in (2, 4) else 1)
        return runner(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "forward", forward)
        costs, steady = measuring.measure(model(), ops, [1, 8, 4], limit=1e9, clock=clock)
        assert order[:6] == [1, 8, 4, 1, 8, 4]
        assert costs.points == {1: 10.0, 4: 14.0, 8: 18.0}
        assert steady

        order.clear()
        costs, steady = measuring.measure(model(), ops, [1, 8, 4], limit=20.0, clock=clock)
        assert order == [1, 8], "a slow model is measured at two sizes and no more"
        assert list(costs.points) == [1, 8]
        assert not steady


def test_a_short_context_is_measured_within_it(ops) -> None:
    """Sizes that the model's window cannot hold are left out."""
    costs, _ = measuring.measure(model(context=12), ops, [1, 8, 32], limit=0.2)
    assert list(costs.points) == [1, 8]


def test_costs_are_measured_once_per_identity(home: Path, measured, ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start reads the file; another model, precision, format of keys, number of threads or version does not."""
    first = measuring.pass_costs(model(), ops, 9)
    assert measuring.pass_costs(model(), ops, 9).points == first.points
    assert len(measured) == 1
    other = model()
    other.precision = "bf16"
    measuring.pass_costs(other, ops, 9)
    wider = model()
    wider.shape = replace(wider.shape, n_layers=2)
    measuring.pass_costs(wider, ops, 9)
    measuring.pass_costs(model().holding(torch.int8), ops, 9)
    measuring.pass_costs(model(), ops, 64)
    assert 64 in measured[-1]
    monkeypatch.setattr(measuring.torch, "get_num_threads", lambda: 77)
    measuring.pass_costs(model(), ops, 9)
    monkeypatch.setattr(measuring.specdec, "__version__", "0.0.0")
    measuring.pass_costs(model(), ops, 9)
    assert len(measured) == 7
    assert len(list((home / "costs").iterdir())) == 7, "one whole file each, and nothing half-written"


@pytest.mark.parametrize("damage", [
    "", "{", "[]", "null", '{"of": 1}', '{"seconds": {"1": 1.0}}', "KEY {}", 'KEY {"1": 0}', 'KEY {"1": "x"}', 'KEY [1]',
])  # fmt: skip
def test_a_damaged_or_foreign_file_is_measured_anew(home: Path, measured, ops, damage: str) -> None:
    """Whatever stands in the file, the figures come out right and the file is right again."""
    measuring.pass_costs(model(), ops, 9)
    (path,) = (home / "costs").iterdir()
    if damage.startswith("KEY"):
        damage = json.dumps({"of": json.loads(path.read_text())["of"], "seconds": json.loads(damage[4:])})
    path.write_text(damage)
    assert measuring.pass_costs(model(), ops, 9).points == {1: 1.0, 8: 3.0}
    assert measuring.pass_costs(model(), ops, 9).points == {1: 1.0, 8: 3.0}
    assert len(measured) == 2


def test_a_folder_that_cannot_be_written_is_no_error(home: Path, measured, ops) -> None:
    """The costs are measured at every start then."""
    (home / "costs").write_text("a file where the folder should be")
    for _ in range(2):
        assert measuring.pass_costs(model(), ops, 9).points
    assert len(measured) == 2


def test_figures_of_a_busy_machine_are_used_but_not_kept(home: Path, ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be believed at every later start."""
    monkeypatch.setattr(measuring, "measure", lambda *_: (Costs({1: 1.0}), False))
    assert measuring.pass_costs(model(), ops, 9).points == {1: 1.0}
    assert not (home / "costs").exists()


@pytest.mark.parametrize(("seconds", "later", "kept"), [
    ({1: 1.0, 8: 2.0}, {1: 1.0, 8: 2.0}, {1: 1.0, 8: 2.0}),
    ({1: 1.0, 8: 2.0}, {1: 3.0, 8: 9.0}, {1: 1.0, 8: 2.0}),  # it is busy now
    ({1: 3.0, 8: 9.0}, {1: 1.0, 8: 2.0}, {1: 1.0, 8: 2.0}),  # it was then
    ({1: 1.0, 8: 9.0}, {1: 1.1, 8: 2.0}, {1: 1.0, 8: 2.0}),
])  # fmt: skip
def test_figures_of_a_busy_machine_are_outdone_at_a_later_start(
    home: Path, ops, monkeypatch: pytest.MonkeyPatch, seconds: dict, later: dict, kept: dict
) -> None:
    """A neighbour that is busy all through a measurement leaves figures as steady as any, and of a wrong shape."""
    monkeypatch.setattr(measuring, "CHECK_LIMIT", 100.0)
    for now in (seconds, later):
        monkeypatch.setattr(
            measuring, "measure", lambda model, kernels, sizes, now=now, **_: (Costs({n: now[n] for n in (1, 8)}), True)
        )
        costs = measuring.pass_costs(model(), ops, 9)
    assert costs.points == kept
    monkeypatch.setattr(measuring, "outdone", lambda *_: False)
    assert measuring.pass_costs(model(), ops, 9).points == kept, "and they are kept"


def test_a_model_too_slow_for_a_check_is_not_checked(ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start would take seconds longer, every time."""
    monkeypatch.setattr(measuring, "measure", lambda *_, **__: pytest.fail("it was measured"))
    assert not measuring.outdone(model(), ops, Costs({1: 0.2, 8: 0.3}))


def test_many_starts_at_once_leave_one_whole_file(home: Path, measured, ops) -> None:
    """Processes that measure the same side by side replace each other's file and never read half of one."""
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: measuring.pass_costs(model(), ops, 9).points, range(32)))
    assert all(set(points) == {1, 8} for points in found)
    assert len(list((home / "costs").iterdir())) == 1


@given(st.dictionaries(st.integers(1, 40), st.floats(1e-4, 1.0), min_size=1, max_size=6), st.floats(1e-5, 3.0))
def test_rows_within_a_time_are_the_inverse(seconds: dict[int, float], limit: float) -> None:
    """So many rows take no longer, and one more does, also beyond what was measured and after passes ran slower."""
    costs = Costs(seconds)
    costs.follow(1, 2 * costs.seconds(1))
    rows = costs.rows(limit)
    if rows:
        assert costs.seconds(rows) <= limit * (1 + 1e-9)
    if rows < 1_000_000:
        assert costs.seconds(rows + 1) > limit * (1 - 1e-9)
