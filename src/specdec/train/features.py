"""The target, run over finished answers: hidden states and opinions, computed in passes and kept on disk up to a bound."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Sequence as Many
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specdec import attention
from specdec.config import BLOCK_SIZE, ConfigError
from specdec.kernels.base import Kernels, Rows
from specdec.kv.blocks import blocks_for
from specdec.kv.pool import Pool
from specdec.models.base import Batch
from specdec.models.decoder import Decoder
from specdec.train.batch import Example
from specdec.train.data import Answer

TOP = 16
"""Likeliest tokens kept of the target's law in each row."""
_PASS = 256
"""Rows of a pass: more are no faster, and their logits take memory."""
_POOL = 16_384
"""Tokens of answers that are in the pool together, unless one alone is longer."""
SHARD = 64
"""Answers in a file."""


class Teacher:
    """The target in the precision it is served in.

    Args:
        taps: layers whose outputs, side by side, are the features.
        normed: the target's final norm is applied to them.
    """

    def __init__(self, model: Decoder, kernels: Kernels, taps: tuple[int, ...], normed: bool) -> None:
        self.model, self.kernels, self.taps, self.normed = model, kernels, taps, normed

    def examples(self, answers: Many[Answer]) -> list[Example]:
        """Run answers that have an anchor each."""
        done: list[Example] = []
        group: list[Answer] = []
        for answer in answers:
            if group and sum(len(a.tokens) + BLOCK_SIZE for a in [*group, answer]) > _POOL:
                done += self._run(group)
                group = []
            group.append(answer)
        return done + (self._run(group) if group else [])

    @torch.inference_mode()
    def _run(self, answers: list[Answer]) -> list[Example]:
        model, shape = self.model, self.model.shape
        blocks = [blocks_for(len(a.tokens)) for a in answers]
        pool = Pool(shape.n_layers, sum(blocks), shape.n_kv_heads, shape.head_dim, model.kv_dtype, model.device)
        attend = attention.select(pool, self.kernels)
        tables = torch.zeros(len(answers), max(blocks), dtype=torch.int32)
        for i, n in enumerate(blocks):
            tables[i, :n] = torch.arange(sum(blocks[:i]), sum(blocks[:i]) + n)
        # The last token's row says what follows the answer, which nobody needs.
        sizes = [len(a.tokens) - 1 for a in answers]
        tokens = torch.cat([torch.tensor(a.tokens[:-1]) for a in answers])
        owner = torch.repeat_interleave(torch.arange(len(answers)), torch.tensor(sizes))
        position = torch.cat([torch.arange(n) for n in sizes])
        n_prompt = torch.tensor([a.n_prompt for a in answers])[owner]
        features, top_ids, top_logp = [], [], []
        for start in range(0, len(tokens), _PASS):
            at = slice(start, start + _PASS)
            logits, taps = model.forward(
                self._batch(tokens[at], owner[at], position[at], n_prompt[at], tables), attend, self.taps
            )
            x = torch.cat([torch.empty(len(tokens[at]), 0, device=model.device), *(taps[tap] for tap in self.taps)], -1)
            if self.normed:
                x = self.kernels.rms_norm(x, model.norm, model.architecture.rms_eps)
            features.append(x.to("cpu", torch.bfloat16))
            if len(logits):
                values, ids = self.kernels.top(logits, min(TOP, shape.vocab_size))
                top_logp.append((values - logits.logsumexp(1, keepdim=True)).cpu())
                top_ids.append(ids.int().cpu())
        opinions = [n - a.n_prompt for n, a in zip(sizes, answers, strict=True)]
        parts = zip(
            answers,
            torch.split(torch.cat(features), sizes),
            torch.split(torch.cat(top_ids), opinions),
            torch.split(torch.cat(top_logp), opinions),
            strict=True,
        )
        return [_example(a, f[: len(a.tokens) - 2].clone(), ids.clone(), logp.clone()) for a, f, ids, logp in parts]

    def _batch(self, tokens: Tensor, owner: Tensor, position: Tensor, n_prompt: Tensor, tables: Tensor) -> Batch:
        device, n = self.model.device, len(tokens)
        lengths = torch.maximum(n_prompt, position + 1)
        rows = Rows(
            tables=tables.to(device),
            sequence=owner.int().to(device),
            slot=position.int().to(device),
            prefix=position.int().to(device) + 1,
            path=torch.empty(n, 0, dtype=torch.int32, device=device),
            n_path=torch.zeros(n, dtype=torch.int32, device=device),
        )
        wanted = (position >= n_prompt).nonzero().squeeze(1)
        return Batch(
            tokens.to(device), position.to(device), lengths.to(device), rows, wanted.to(device), longest=int(lengths.max())
        )

    def key(self, answers: Many[Answer]) -> str:
        """What the examples of these answers depend on, as a digest."""
        a = self.model.architecture
        some = torch.arange(0, a.vocab_size, max(1, a.vocab_size // 64), device=self.model.device)
        weights = [
            self.model.norm,
            self.model.head.rows(some),
            *(layer.down.rows(some[:8] % layer.down.n) for layer in self.model.layers),
        ]
        digest = hashlib.sha256(repr((a, self.model.precision, self.taps, self.normed, TOP)).encode())
        for weight in weights:
            digest.update(weight.float().cpu().numpy().tobytes())
        for answer in answers:
            digest.update(repr((answer.n_prompt, answer.temperature, answer.tokens)).encode())
        return digest.hexdigest()[:32]


def _example(answer: Answer, features: Tensor, top_ids: Tensor, top_logp: Tensor) -> Example:
    return Example(
        tokens=torch.tensor(answer.tokens),
        n_prompt=answer.n_prompt,
        temperature=answer.temperature,
        seed=answer.seed,
        task=answer.task,
        features=features,
        top_ids=top_ids,
        top_logp=top_logp.half(),
    )


class Store:
    """Examples by shards of some answers each: read from disk where they are there and whole, else made by the teacher.

    A file is named by all that its content depends on, so several runs, and answers that are added to, can share a folder.

    Args:
        folder: where files lie.
        bound: most bytes of all files there; shards past it are made anew each time.
    """

    def __init__(self, teacher: Teacher, answers: Many[Answer], folder: Path, bound: int) -> None:
        self.teacher, self.folder, self.bound = teacher, folder, bound
        self.shards = [answers[i : i + SHARD] for i in range(0, len(answers), SHARD)]
        folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, i: int) -> list[Example]:
        answers = self.shards[i]
        path = self.folder / f"{self.teacher.key(answers)}.bin"
        examples = _read(path, answers)
        if examples is None:
            examples = self.teacher.examples(answers)
            self._keep(path, examples)
        return examples

    def _keep(self, path: Path, examples: list[Example]) -> None:
        payload = b"".join(_bytes(t) for e in examples for t in (e.features, e.top_ids, e.top_logp))
        path.unlink(missing_ok=True)
        used = sum(file.stat().st_size for file in self.folder.glob("*.bin"))
        if used + len(payload) > self.bound:
            return
        shapes = [[list(t.shape) for t in (e.features, e.top_ids, e.top_logp)] for e in examples]
        header = json.dumps({"crc": zlib.crc32(payload), "shapes": shapes}).encode() + b"\n"
        write(path, header, payload)


def write(path: Path, *parts: bytes) -> None:
    """Write a file wholly or not at all.

    Raises:
        ConfigError: the disk is full or the place cannot be written.
    """
    half = path.with_name(path.name + ".part")
    try:
        with half.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written ({error.strerror}); what was there before is unharmed") from error


def _read(path: Path, answers: Many[Answer]) -> list[Example] | None:
    """The examples of a shard, or None where the file is not there, or is damaged."""
    try:
        with path.open("rb") as file:
            header, payload = json.loads(file.readline()), file.read()
        if header["crc"] != zlib.crc32(payload):
            return None
        shapes = header["shapes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    view, at, examples = np.frombuffer(bytearray(payload), np.uint8), 0, []

    def take(shape: list[int], dtype: torch.dtype) -> Tensor:
        nonlocal at
        size = int(np.prod(shape)) * dtype.itemsize
        at += size
        return torch.from_numpy(view[at - size : at]).view(dtype).view(shape)

    for answer, (features, ids, logp) in zip(answers, shapes, strict=True):
        examples.append(_example(answer, take(features, torch.bfloat16), take(ids, torch.int32), take(logp, torch.float16)))
    return examples


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()
