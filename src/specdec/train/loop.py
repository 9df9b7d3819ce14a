"""The training loop: batches, steps, measurements, checkpoints. What a run does is a function of its settings and its data."""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specdec.kernels.base import Kernels
from specdec.models.heads import RecurrentHead
from specdec.train import checkpoint
from specdec.train.batch import Batch, Example
from specdec.train.evaluate import Measured, measure
from specdec.train.losses import Losses, Output, Weighing, losses
from specdec.train.settings import TrainConfig
from specdec.train.unroll import Embed, Learner

_WINDOW = 4
"""Shards whose answers are shuffled among each other."""
_SAVE_SECONDS = 60.0
_FLOOR = 0.05
"""Share of the highest rate at which a run ends."""


class Watch(Protocol):
    """Is told how a run goes."""

    def trained(self, progress: float, anchors_per_second: float, losses: Losses) -> None: ...

    def measured(self, progress: float, measured: Measured, best: bool) -> None: ...


class Shards(Protocol):
    """Examples in pieces (features.Store, or a list of lists)."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> list[Example]: ...


class Run:
    """One head in training.

    Args:
        output: the target's output matrix, cut to what the head can draft.
        kernels: the arithmetic of drafting on the CPU.
        shards: what is learned from; ``n_anchors`` in all.
        held_out: what is measured on.
        folder: of the checkpoint, which is taken up where there is one.
    """

    def __init__(
        self,
        head: Learner,
        config: TrainConfig,
        embed: Embed,
        output: Output,
        kernels: Kernels,
        shards: Shards,
        n_anchors: int,
        held_out: Many[Batch],
        folder: Path,
        clock: Any = time.monotonic,
    ) -> None:
        self.head, self.config, self.embed, self.output, self.kernels = head, config, embed, output, kernels
        self.shards, self.n_anchors, self.held_out, self.folder = shards, n_anchors, held_out, folder
        self._clock = clock
        self._weighing = Weighing(config.decay, config.hard, config.regression)
        self._optimiser = torch.optim.AdamW(_groups(head, config.weight_decay), lr=config.rate, betas=(0.9, 0.95))
        self.place = [0, 0, 0]
        """Epoch, window and batch that come next."""
        self.anchors = 0
        """Trained so far."""
        self.seconds = 0.0
        self.history: list[dict[str, Any]] = []
        """One entry per measurement: made on ``anchors`` held-out ones when ``learned`` anchors had been trained on."""
        self.curve: list[list[float]] = []
        """Anchors, loss and accuracy of the first step, now and then."""
        self.best: dict[str, Tensor] = {}
        self.finished = False
        torch.manual_seed(config.seed)
        if state := checkpoint.load(folder):
            self._restore(state)

    def run(self, watch: Watch) -> None:
        """Train until the epochs, the minutes or the patience end, and leave the head with the best weights seen."""
        last_saved = last = self._clock()
        if not self.history:
            self._measure(watch)
        while not self.finished:
            for batch in self._window():
                self._set_rate()
                found = self._step(batch)
                self.place[2] += 1
                now = self._clock()
                self.seconds += now - last
                speed, last = sum(batch.n_anchors()) / max(1e-9, now - last), now
                watch.trained(self.progress, speed, found)
                self.curve.append([self.anchors, sum(found.by_step) / len(found.by_step), found.accuracy[0]])
                if self.progress >= len(self.history) / self.config.evaluations and self.progress < 1:
                    self._measure(watch)
                    last_saved = last = self._clock()
                    self._save()
                elif now - last_saved > _SAVE_SECONDS:
                    last_saved = now
                    self._save()
                if self.finished or self.progress >= 1:
                    break
            else:
                self._next_window()
            if self.progress >= 1 and not self.finished:
                self._measure(watch)
                self.finished = True
        self._save()
        self.head.load_state_dict(self.best)

    @property
    def progress(self) -> float:
        """Share of the run that is done."""
        by_epochs = self.anchors / (self.config.epochs * self.n_anchors)
        return max(by_epochs, self.seconds / (60 * self.config.minutes)) if self.config.minutes else by_epochs

    def _step(self, batch: Batch) -> Losses:
        config = self.config
        self._optimiser.zero_grad(set_to_none=True)
        found = losses(self.head, batch, self.embed, self.output, self._steps(), self._weighing, config.noise)
        found.total.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.head.parameters(), config.clip)
        self._optimiser.step()
        self.anchors += sum(batch.n_anchors())
        return found

    def _steps(self) -> int:
        """How many steps are trained now; all of them after half of what is left when the first was trained alone."""
        steps, alone = self.config.steps, self.config.alone
        if not isinstance(self.head, RecurrentHead):
            return steps
        joined = (self.progress - alone) / (0.5 * (1 - alone))  # 0 to 1 while the others join
        return min(steps, max(1, 1 + math.ceil((steps - 1) * joined)))

    def _set_rate(self) -> None:
        config, progress = self.config, min(1.0, self.progress)
        rise = min(1.0, (progress + 1e-3) / (config.warmup + 1e-3))
        fall = (1 + math.cos(math.pi * max(0.0, progress - config.warmup) / (1 - config.warmup))) / 2
        for group in self._optimiser.param_groups:
            group["lr"] = config.rate * rise * (_FLOOR + (1 - _FLOOR) * fall)

    def _window(self) -> Iterator[Batch]:
        """The batches of the present window that are still to come."""
        epoch, window, done = self.place
        order = list(range(len(self.shards)))
        random.Random(f"{self.config.seed}/{epoch}").shuffle(order)
        chosen = order[window * _WINDOW : (window + 1) * _WINDOW]
        examples = [example for i in chosen for example in self.shards[i]]
        random.Random(f"{self.config.seed}/{epoch}/{window}").shuffle(examples)
        device = self.output.matrix.device
        for group in list(grouped(examples, self.config.batch))[done:]:
            yield Batch.of(group, device)

    def _next_window(self) -> None:
        epoch, window, _ = self.place
        more = (window + 1) * _WINDOW < len(self.shards)
        self.place = [epoch, window + 1, 0] if more else [epoch + 1, 0, 0]

    def _measure(self, watch: Watch) -> None:
        self.head.eval()
        found = measure(self.head, self.held_out, self.embed, self.output, self.kernels, self.config.steps)
        self.head.train()
        best = not self.history or found.tau > max(entry["tau"] for entry in self.history)
        done = {"progress": self.progress, "learned": self.anchors, "seconds": self.seconds, "steps": self._steps()}
        self.history.append({**done, **found.as_dict()})
        if best:
            self.best = copy.deepcopy(self.head.state_dict())
        # While steps are still to join, what is predicted of whole chains need not rise.
        taus = [entry["tau"] for entry in self.history if entry["steps"] == self.config.steps]
        since = len(taus) - 1 - taus.index(max(taus)) if taus else 0
        self.finished = bool(self.config.patience) and since >= self.config.patience
        watch.measured(self.progress, found, best)

    def _save(self) -> None:
        state = {
            "head": self.head.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "rng": torch.get_rng_state(),
            "best": self.best,
            **{name: getattr(self, name) for name in _PLAIN},
        }
        checkpoint.save(self.folder, state)

    def _restore(self, state: dict[str, Any]) -> None:
        self.head.load_state_dict(state["head"])
        self._optimiser.load_state_dict(state["optimiser"])
        torch.set_rng_state(state["rng"])
        self.best = state["best"]
        for name in _PLAIN:
            setattr(self, name, state[name])


_PLAIN = ("place", "anchors", "seconds", "history", "curve", "finished")


def grouped(examples: Many[Example], n_anchors: int) -> Iterator[list[Example]]:
    """Examples in order, as many together as reach a number of anchors."""
    group: list[Example] = []
    for example in examples:
        group.append(example)
        if sum(e.n_anchors for e in group) >= n_anchors:
            yield group
            group = []
    if group:
        yield group


def _groups(head: Learner, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors (norms and biases) do not."""
    parameters = list(head.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
