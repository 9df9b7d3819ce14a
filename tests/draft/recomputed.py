"""Recurrent heads with random weights, and their drafts as naively as can be: everything is recomputed for every node.

Of the drafter's code nothing is used but the modules of the head themselves; attention is a line of torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

import torch
from forward import attention_of, batch_of
from torch import Tensor

from specdec import kernels
from specdec.draft.candidates import candidates
from specdec.models.decoder import Decoder
from specdec.models.head_config import HeadConfig
from specdec.models.head_files import LoadedHead
from specdec.models.heads import RecurrentHead, make_head

KINDS = ("eagle", "eagle3", "mtp", "mtp3")
"""The last one has three modules, the others one."""

KERNELS = kernels.select("cpu")


def random_head(model: Decoder, kind: str, *, seed: int = 0, vocabulary: int | None = 100, **settings) -> LoadedHead:
    """An untrained head whose drafts depend on all that it sees. It drafts printable tokens, or all of them."""
    a = model.architecture
    config = HeadConfig(
        **{
            "kind": kind.rstrip("3") if kind != "eagle3" else kind,
            "hidden_size": a.hidden_size,
            "vocab_size": a.vocab_size,
            "taps": (0, 1) if kind == "eagle3" else (1,),
            "normed": kind == "eagle",
            "vocabulary": vocabulary,
            "depth": 3 if kind == "mtp3" else 1,
            "n_heads": 4,
            "n_kv_heads": 2,
            "head_dim": 16,
            "ffn_size": 96,
            "fc_bias": kind == "eagle",
            "hidden_first": kind == "mtp3",
            **settings,
        }
    )
    generator = torch.Generator().manual_seed(seed)
    head = make_head(config)
    assert isinstance(head, RecurrentHead)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2:
                # Without norms states would grow from depth to depth, and rounding errors with them.
                scale = (0.7 if kind == "eagle" else 1.4) / math.sqrt(parameter.shape[1])
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    ids = None if vocabulary is None else 27 + torch.randperm(vocabulary, generator=generator)
    return LoadedHead("random", head, ids)


def features_of(model: Decoder, config: HeadConfig, tokens: Many[int]) -> Tensor:
    """[n, taps * d] of all tokens, read in one pass through a fresh cache."""
    _, taps = model.forward(batch_of(list(tokens)), attention_of(model), config.taps)
    features = torch.cat([taps[tap] for tap in config.taps], 1)
    return torch.nn.functional.rms_norm(features, model.norm.shape, model.norm, 1e-5) if config.normed else features


def rotate(x: Tensor, theta: float) -> Tensor:
    """x [n, H, hd], row i at position i."""
    n, _, hd = x.shape
    angles = torch.arange(n)[:, None] * theta ** (-torch.arange(0, hd, 2) / hd)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def causal(config: HeadConfig):
    """Attention of rows [n, (H + 2 KV) * hd] over themselves, in order."""

    def attend(qkv: Tensor) -> Tensor:
        n, hd = len(qkv), config.head_dim
        q, k, v = qkv.view(n, -1, hd).split([config.n_heads, config.n_kv_heads, config.n_kv_heads], 1)
        q, k = rotate(q, config.rope_theta), rotate(k, config.rope_theta)
        k, v = (x.repeat_interleave(config.n_heads // config.n_kv_heads, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(hd)
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(n, -1)

    return attend


def logits_after(model: Decoder, loaded: LoadedHead, features: Tensor, tokens: Many[int], path: Many[int]) -> Tensor:
    """What the head says of the token after ``tokens`` and a drafted path, [Vd].

    Args:
        features: [L, ...] of the rows before the pending token, the last of ``tokens``, of which there are L + 1.
    """
    head, config = loaded.head, loaded.config
    text = torch.tensor([*tokens, *path])
    n, last = len(features), config.n_modules - 1
    attend = causal(config)
    states = head.start(features)
    for step in range(len(path) + 1):
        module = min(step, last)
        if step <= last:
            inputs, shift = states, 1 + step  # row i of module m takes the token at i + 1 + m
        else:
            inputs, shift = torch.cat([inputs, states[-1:]]), 1 + last
        states = head(model.embedding(text[shift : shift + len(inputs)]), inputs, attend, module)
    assert shift + len(inputs) == len(text), f"{n} rows do not end where the text does"
    ready = head.ready(states[-1:], module)
    return model.head(ready)[0] if loaded.vocabulary_ids is None else model.head(ready)[0, loaded.vocabulary_ids]


def tree_of(model: Decoder, loaded: LoadedHead, sequence, tokens: Many[int], depth: int, width: int, least: float, limit: int):
    """path -> value of the nodes that are to be drafted after ``tokens``, the last of which is pending; best first."""
    features = features_of(model, loaded.config, tokens[:-1])
    vocabulary = None if loaded.vocabulary_ids is None else loaded.vocabulary_ids.numpy()
    found: dict[tuple[int, ...], float] = {}
    level = {(): 1.0}
    for _ in range(depth):
        new: dict[tuple[int, ...], float] = {}
        for path, value in level.items():
            ended = bool(path) and path[-1] in sequence.end_tokens
            if ended or (len(path) < loaded.config.n_modules and len(path) > len(features)):
                continue
            logits = logits_after(model, loaded, features, tokens, path)
            position = len(tokens) + len(path)
            ids, chances = candidates(
                logits[None], [sequence.params.temperature], [sequence.seed], [position], width, KERNELS, vocabulary
            )
            for token, chance in zip(ids[0].tolist(), chances[0].tolist(), strict=True):
                new[*path, token] = value * chance
        new = {path: value for path, value in new.items() if value >= least}
        found |= new
        level = dict(sorted(new.items(), key=lambda item: -item[1])[:width])
    return dict(sorted(found.items(), key=lambda item: -item[1])[:limit])
