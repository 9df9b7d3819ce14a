"""Training makes heads that are right where they can be, a killed run ends like one that was not, and τ is what it says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from toys import CPU, KERNELS, Silent, classed, config, embed, output, periodic, trained

from specdec.models.heads import make_head
from specdec.train import loop
from specdec.train.batch import Batch
from specdec.train.evaluate import bursts, measure
from specdec.train.loop import Run
from specdec.train.settings import TrainConfig


@pytest.mark.parametrize(
    "shape",
    [
        config("medusa", depth=3, normed=True),
        config("medusa", depth=3, correction="markov", rank=8),
        config("medusa", depth=3, correction="hydra"),
        config("eagle"),
        config("eagle3"),
        config("mtp", depth=2),
    ],
    ids=lambda c: f"{c.kind}-{c.correction}",
)
def test_text_that_repeats_is_foreseen_at_every_step(shape, tmp_path) -> None:
    """A head whose shift is off by one can be right about no step: each must name its own position's token."""
    _, measured = trained(shape, [periodic(i) for i in range(7)], tmp_path, steps=3, epochs=40)
    assert min(measured.own) > 0.97, measured
    assert min(measured.forced) > 0.97, measured
    assert measured.chain_tau > 3.8


def test_training_on_its_own_states_makes_later_steps_right(tmp_path) -> None:
    """What a text goes on with depends on its class, which a state must hand on: trained for one step only, it does not."""
    examples = [classed(i) for i in range(12)]
    shape = config("eagle3")
    short, _ = trained(shape, examples, tmp_path / "one", steps=1, epochs=60)
    _, long = trained(shape, examples, tmp_path / "four", steps=4, epochs=60)
    alone = measure(short, [Batch.of(examples, CPU)], embed, output(), KERNELS, 4)
    assert alone.forced[0] > 0.9
    assert long.forced[0] > 0.9
    assert all(a > b + 0.1 for a, b in zip(long.forced[1:], alone.forced[1:], strict=True)), (long.forced, alone.forced)


class Killed(Exception):
    pass


class Killer(Silent):
    """Ends the process, as it were, after some steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def trained(self, *_) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


def _run(folder, clock) -> Run:
    torch.manual_seed(0)
    head = make_head(config("eagle3"))
    examples = [classed(i, 16) for i in range(40)]
    shards = [examples[i : i + 4] for i in range(0, 40, 4)]
    settings = TrainConfig(kind="eagle3", steps=2, epochs=3, batch=64, evaluations=3, noise=0.1)
    n = sum(e.n_anchors for e in examples)
    return Run(head, settings, embed, output(), KERNELS, shards, n, [Batch.of(examples[:5], CPU)], folder, clock)


@pytest.mark.parametrize("steps", [0, 1, 7, 23])
def test_a_killed_run_ends_with_the_same_weights(steps: int, tmp_path) -> None:
    """Wherever it is killed, and whether or not a checkpoint had just been written: noise, order and moments go on."""
    ticks = iter(range(10**9))
    whole = _run(tmp_path / "whole", lambda: 40.0 * next(ticks))
    whole.run(Silent())
    with pytest.raises(Killed):
        _run(tmp_path / "killed", lambda: 40.0 * next(ticks)).run(Killer(steps))
    resumed = _run(tmp_path / "killed", lambda: 40.0 * next(ticks))
    resumed.run(Silent())
    assert resumed.anchors == whole.anchors
    assert [entry["tau"] for entry in resumed.history] == [entry["tau"] for entry in whole.history]
    expected = whole.head.state_dict()
    for name, value in resumed.head.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_patience_begins_when_all_steps_are_trained(tmp_path, monkeypatch) -> None:
    """While the first step learns alone, whole chains get no better: that is no reason to give up."""
    monkeypatch.setattr(loop, "measure", lambda *_: SimpleNamespace(tau=1.0, as_dict=lambda: {"tau": 1.0}))
    settings = TrainConfig(kind="eagle3", steps=3, epochs=10, batch=64, alone=0.5, patience=2, evaluations=30)
    examples = [periodic(i) for i in range(7)]
    n_anchors = sum(example.n_anchors for example in examples)
    run = Run(make_head(config("eagle3")), settings, embed, output(), KERNELS, [examples], n_anchors, [], tmp_path)
    run.run(Silent())
    steps = [entry["steps"] for entry in run.history]
    assert steps.count(1) > 10
    assert steps.count(3) == 3
    assert 0.6 < run.progress < 0.95


def test_tau_is_what_a_walk_from_burst_to_burst_counts(tmp_path) -> None:
    """Counted anew by drafting greedily with the trained head from each burst's own start."""
    examples = [classed(i, 24) for i in range(12)]
    head, measured = trained(config("eagle3"), examples, tmp_path, steps=3, epochs=3)
    passes = emitted = 0
    for e in examples:
        said = measure(head, [Batch.of([e], CPU)], embed, output(), KERNELS, 3)
        passes += said.passes["all"]
        emitted += said.emitted["all"]
    assert measured.tau == pytest.approx(emitted / passes)
    assert 1 < measured.tau < 4
    assert bursts([3, 0, 0, 0, 1, 0, 0]) == 3
    assert bursts([0, 0]) == 2
    assert bursts([]) == 0
