"""How far ahead a head foresees what the target really said, and what that makes of a burst."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec.draft.candidates import candidates
from specdec.kernels.base import Kernels
from specdec.models.heads import MedusaHead
from specdec.train.batch import Batch
from specdec.train.losses import Output
from specdec.train.unroll import Embed, Learner, StepOut, unroll

RANKS = 4
_CHUNK = 512


@dataclass(slots=True)
class Measured:
    """Figures of a head on answers that training did not see. A step is right where it names the token that was said."""

    right: list[list[int]]
    """Per step and rank: how often the token said was the one of that rank, the tokens before it being those said."""
    asked: list[int]
    """Per step: how often there was a token to foresee."""
    chain: list[int]
    """Per step: how often it and all before it were right, each the likeliest."""
    chained: list[int]
    """Per step: how often all before it were right and there was a token to foresee."""
    passes: dict[str, int] = field(default_factory=dict)
    """Per group: passes that answers take with chains of drafts, each walked from burst to burst; the prompt's is the first."""
    emitted: dict[str, int] = field(default_factory=dict)
    """Per group: tokens that these passes emit."""

    @classmethod
    def empty(cls, steps: int) -> Measured:
        return cls([[0] * RANKS for _ in range(steps)], [0] * steps, [0] * steps, [0] * steps)

    @property
    def forced(self) -> list[float]:
        """Accuracy of each step with true history: the tokens before are those said, whatever the head would have drafted."""
        return [sum(ranks[:1]) / max(1, n) for ranks, n in zip(self.right, self.asked, strict=True)]

    @property
    def own(self) -> list[float]:
        """Accuracy of each step with the head's own history, where that was accepted: acceptance by depth."""
        return [n / max(1, of) for n, of in zip(self.chain, self.chained, strict=True)]

    @property
    def by_rank(self) -> list[list[float]]:
        """Per step, the share of tokens said that were the likeliest, the second likeliest and so on."""
        return [[n / max(1, of) for n in ranks] for ranks, of in zip(self.right, self.asked, strict=True)]

    @property
    def tau(self) -> float:
        """Tokens per pass of a chain of drafts, from bursts that begin where the one before ended."""
        return self.tau_of("all")

    def tau_of(self, group: str) -> float:
        return self.emitted.get(group, 0) / max(1, self.passes.get(group, 0))

    @property
    def chain_tau(self) -> float:
        """1 + sum over d of the product of the first d accuracies: the same from bursts that begin anywhere."""
        tau, product = 1.0, 1.0
        for accuracy in self.own:
            product *= accuracy
            tau += product
        return tau

    def as_dict(self) -> dict[str, Any]:
        return {
            "forced": self.forced,
            "own": self.own,
            "by_rank": self.by_rank,
            "tau": self.tau,
            "chain_tau": self.chain_tau,
            "tau_by_group": {group: self.tau_of(group) for group in sorted(self.passes)},
            "anchors": self.asked[0] if self.asked else 0,
        }


@torch.inference_mode()
def measure(head: Learner, batches: Iterable[Batch], embed: Embed, output: Output, kernels: Kernels, steps: int) -> Measured:
    """Run a head over batches; its candidates are ranked as drafting ranks them, with the noise of the answer's own seed.

    Groups of τ are ``all``, ``greedy``, ``sampled`` and the tasks.
    """
    measured = Measured.empty(steps)
    for batch in batches:
        leading = torch.zeros(sum(batch.n_anchors()), dtype=torch.int64)  # steps right from the first one on
        for out in unroll(head, batch, embed, steps):
            hits = _hits(head, out, batch, output, kernels)  # [N, RANKS]
            here = batch.at(out.step).cpu()
            alive = leading[here] == out.step
            measured.asked[out.step] += len(hits)
            measured.chained[out.step] += int(alive.sum())
            for rank in range(RANKS):
                measured.right[out.step][rank] += int(hits[:, rank].sum())
            right = hits[:, 0] & alive
            measured.chain[out.step] += int(right.sum())
            leading[here[right]] += 1
        _walk(batch, leading, measured)
    return measured


def _hits(head: Learner, out: StepOut, batch: Batch, output: Output, kernels: Kernels) -> Tensor:
    """bool [N, RANKS]: is the token that was said the candidate of that rank?"""
    sizes, ids = batch.n_anchors(out.step), output.ids.cpu().numpy()
    truth = batch.ahead(out.step, out.step + 2).cpu()
    positions = batch.positions(sizes, [n + 1 + out.step for n in batch.n_prompt]).tolist()
    temperatures = [t for t, size in zip(batch.temperatures, sizes, strict=True) for _ in range(size)]
    seeds = [seed for seed, size in zip(batch.seeds, sizes, strict=True) for _ in range(size)]
    k = min(RANKS, len(ids))
    parts = []
    for start in range(0, len(truth), _CHUNK):
        at = slice(start, start + _CHUNK)
        logits = out.state[at] @ output.matrix.t()
        if isinstance(head, MedusaHead) and (bias := head.bias(out.previous[at])) is not None:
            logits += bias
        best, _ = candidates(logits.cpu(), temperatures[at], seeds[at], positions[at], k, kernels, ids)
        parts.append(torch.from_numpy(best) == truth[at, None])
    return torch.nn.functional.pad(torch.cat(parts), (0, RANKS - k))


def _walk(batch: Batch, leading: Tensor, measured: Measured) -> None:
    """Count the passes of each answer: the prompt's gives its first token, each burst starts where the one before ended."""
    parts = torch.split(leading, batch.n_anchors())
    for ahead, temperature, task in zip(parts, batch.temperatures, batch.tasks, strict=True):
        passes = bursts(ahead.tolist())
        for group in ("all", "sampled" if temperature else "greedy", task):
            measured.passes[group] = measured.passes.get(group, 0) + 1 + passes
            measured.emitted[group] = measured.emitted.get(group, 0) + 1 + len(ahead)


def bursts(leading: Many[int]) -> int:
    """Passes that an answer takes, ``leading[i]`` being how many drafted tokens are right if a burst starts at anchor i."""
    at = passes = 0
    while at < len(leading):
        at += 1 + leading[at]
        passes += 1
    return passes
