"""Small worlds whose next token is known, so that a head can be trained to be right in seconds."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specdec import kernels
from specdec.models.head_config import HeadConfig
from specdec.models.heads import Head, make_head
from specdec.train.batch import Batch, Example
from specdec.train.evaluate import Measured, measure
from specdec.train.loop import Run
from specdec.train.losses import Output
from specdec.train.settings import TrainConfig

D, VOCAB, CLASSES = 32, 24, 3
CPU = torch.device("cpu")
KERNELS = kernels.select(CPU)
EMBEDDING = torch.randn(VOCAB, D, generator=torch.Generator().manual_seed(1))


def embed(ids: Tensor) -> Tensor:
    return EMBEDDING[ids]


def output() -> Output:
    return Output.of(torch.randn(VOCAB, D, generator=torch.Generator().manual_seed(2)) / D**0.5, torch.arange(VOCAB), VOCAB)


def config(kind: str, **more) -> HeadConfig:
    shape = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "ffn_size": 64} if kind != "medusa" else {}
    return HeadConfig(kind=kind, hidden_size=D, vocab_size=VOCAB, **{"taps": (0,), "depth": 1, **shape, **more})


def example(tokens: list[int], n_prompt: int, features: Tensor, temperature: float = 0.0, task: str = "toy") -> Example:
    """A text whose every token was certain."""
    ids = torch.tensor(tokens)
    certain = ids[n_prompt + 1 :, None].int()  # the row of token i gives token i + 1
    others = (certain + 1) % VOCAB
    return Example(
        tokens=ids,
        n_prompt=n_prompt,
        temperature=temperature,
        seed=0,
        task=task,
        features=features[: len(tokens) - 2].bfloat16(),
        top_ids=torch.cat([certain, others], 1),
        top_logp=torch.tensor([[-0.001, -7.0]]).expand(len(certain), 2).half(),
    )


def random_example(n: int, n_prompt: int, seed: int, width: int = D) -> Example:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (n,), generator=generator).tolist()
    return example(tokens, n_prompt, torch.randn(n, width, generator=generator))


def periodic(seed: int, period: int = 7, n: int = 64) -> Example:
    """Text that repeats; the feature of a row says which token it holds."""
    start = seed % period
    tokens = [(start + i) % period for i in range(n)]
    return example(tokens, 5, 3 * EMBEDDING[tokens])


def classed(seed: int, n: int = 60) -> Example:
    """Token c + 1 times the position's: where a text goes depends on its class, which only the features of its rows know."""
    kind = seed % CLASSES
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(kind)).tolist()
    token = seed // CLASSES % VOCAB
    tokens = []
    for _ in range(n):
        tokens.append(token)
        token = order[(order.index(token) + 1) % VOCAB]
    signs = torch.randn(CLASSES, D, generator=torch.Generator().manual_seed(9))
    return example(tokens, 4, EMBEDDING[tokens] + 2 * signs[kind])


class Silent:
    """Watches nothing."""

    def trained(self, *_) -> None: ...

    def measured(self, *_) -> None: ...


def trained(head_config: HeadConfig, examples: list[Example], folder: Path, **settings) -> tuple[Head, Measured]:
    """A head after training on examples, and how it does on the same ones."""
    torch.manual_seed(0)
    head = make_head(head_config)
    kind = {"kind": head_config.kind, "batch": 128, "rate": 3e-3, "evaluations": 2, "patience": 0}
    run = Run(
        head, TrainConfig(**{**kind, **settings}), embed, output(), KERNELS, [examples], sum(e.n_anchors for e in examples),
        [Batch.of(examples, CPU)], folder,
    )  # fmt: skip
    run.run(Silent())
    return head, measure(head, [Batch.of(examples, CPU)], embed, output(), KERNELS, run.config.steps)
