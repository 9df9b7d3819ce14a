"""What a precision costs in likelihood: the loss of a text's tokens, against the same weights in fp32 on the same windows.

What a format of keys and values costs is told apart, against bf16 under the same weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from specdec.audit.report import Check
from specdec.bench import prompts as texts
from specdec.encoding import TextTokenizer
from specdec.kernels.base import Kernels
from specdec.kv import codec
from specdec.llm import LLM
from specdec.models.base import Model
from specdec.runner.probe import Probe

WINDOW = 256
"""Tokens of a window; its first token is not scored."""

FP32_COST = 5
"""Times as long that a window may take in fp32, the loading of its weights included."""

KV_CHECK = "keys and values"

SPREAD = 8
"""Times the memory of its blocks that a model may need in fp32."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Means over tokens, in nats."""

    tokens: int
    loss: float
    added: float
    """Loss beyond that of what it is compared with."""
    standard_error: float
    same_top1: float
    """Share of the tokens at which the most likely one is the same."""
    added_by_window: tuple[float, ...]


def shipped_text() -> str:
    """The prompts that ship, one after the other."""
    prompts = texts.load(texts.DEFAULT)
    return "\n\n".join(prompt.request for prompt in prompts if isinstance(prompt.request, str))


def windows(tokenizer: TextTokenizer, text: str, n_tokens: int, length: int = WINDOW) -> list[list[int]]:
    """Windows of ``length`` tokens, evenly spread over a text; one shorter window where the text is shorter."""
    ids = tokenizer.encode(text, add_special=False)
    n = max(1, min(n_tokens // length, len(ids) // length))
    starts = [i * (len(ids) - length) // max(1, n - 1) for i in range(n)] if len(ids) > length else [0]
    return [ids[start : start + length] for start in starts]


def losses(model: Model, kernels: Kernels, cut: Many[Many[int]]) -> list[Tensor]:
    """Per window [2, n - 1]: the loss of each token but the first, and the most likely token there."""
    probe = Probe(model, kernels, max(map(len, cut)))
    found = []
    for tokens in cut:
        logp = probe.read_all(list(tokens))[:-1].double().log_softmax(-1)
        loss = -logp.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        found.append(torch.stack([loss, logp.argmax(-1).double()]))
    return found


def cost(found: Many[Tensor], reference: Many[Tensor]) -> Cost:
    """Compare what ``losses`` gave for two precisions."""
    ours, theirs = torch.cat(list(found), 1), torch.cat(list(reference), 1)
    added = ours[0] - theirs[0]
    return Cost(
        tokens=added.numel(),
        loss=ours[0].mean().item(),
        added=added.mean().item(),
        standard_error=added.std().item() / math.sqrt(added.numel()),
        same_top1=(ours[1] == theirs[1]).double().mean().item(),
        added_by_window=tuple((a[0] - b[0]).mean().item() for a, b in zip(found, reference, strict=True)),
    )


def check_quality(llm: LLM, in_fp32: Callable[[], Model], text: Path | None, n_tokens: int, seconds: float) -> Check:
    """Measure the audited precision, on as much of the text as there are seconds for; there is no right or wrong about it."""
    if llm.precision == "fp32":
        return Check("quality", "likelihood", "measured", "the model runs in fp32: its precision costs nothing", 0.0, {})
    need, free = SPREAD * llm.engine.model.n_bytes, psutil.virtual_memory().available
    if need > free:
        summary = f"fp32 may take {need / 1e9:.1f} GB beside the model, and {free / 1e9:.1f} GB are free"
        return Check("quality", "likelihood", "left out", summary, details={"need": need, "free": free})
    subject = llm.precision + (f" with {llm.kv_format} keys and values" if _quantised_kv(llm) else "")
    return _check(llm, "likelihood", subject, "fp32", in_fp32, FP32_COST, text, n_tokens, seconds)


def check_kv_format(llm: LLM, text: Path | None, n_tokens: int, seconds: float) -> Check:
    """The same of the format of keys and values, against bf16 under the same weights."""
    if not _quantised_kv(llm):
        summary = f"keys and values are held in {llm.kv_format}: they are not quantised"
        return Check("quality", KV_CHECK, "measured", summary, 0.0, {})

    def in_bf16() -> Model:
        return llm.engine.model.holding(torch.bfloat16)

    return _check(llm, KV_CHECK, f"{llm.kv_format} for keys and values", "bf16", in_bf16, 1, text, n_tokens, seconds)


def _quantised_kv(llm: LLM) -> bool:
    return codec.quantised(llm.engine.model.kv_dtype)


def _check(
    llm: LLM,
    name: str,
    subject: str,
    against: str,
    other: Callable[[], Model],
    other_cost: float,
    text: Path | None,
    n_tokens: int,
    seconds: float,
) -> Check:
    """Compare the audited model with another one, which takes ``other_cost`` times as long, its making included."""
    started = time.perf_counter()
    source = text.name if text else "the prompts that ship"
    length = min(WINDOW, llm.engine.model.shape.context)
    content = text.read_text(encoding="utf-8") if text else shipped_text()
    cut = windows(llm.tokenizer, content, n_tokens, length)
    if len(cut[0]) < 2 or max(map(max, cut)) >= llm.engine.model.shape.vocab_size:
        return Check("quality", name, "left out", f"{source} cannot be written in this model's vocabulary")
    began = time.perf_counter()
    ours = losses(llm.engine.model, llm.kernels, cut[:1])
    affordable = int(seconds / ((time.perf_counter() - began) * (1 + other_cost)))
    if affordable < 1:
        return Check("quality", name, "left out", "no time was left")
    cut = cut[:affordable]
    ours += losses(llm.engine.model, llm.kernels, cut[1:]) if len(cut) > 1 else []
    reference = losses(other(), llm.kernels, cut)
    found = cost(ours, reference)
    summary = (
        f"{subject} adds {found.added:+.4f} ± {found.standard_error:.4f} nats a token to the "
        f"{found.loss - found.added:.3f} of {against}; the most likely token is the same at {found.same_top1:.1%} "
        f"of {found.tokens} places in {source}"
    )
    details = {
        "text": source,
        "precision": llm.precision,
        "kv_format": llm.kv_format,
        "against": against,
        "tokens": found.tokens,
        "loss": found.loss,
        "added": found.added,
        "standard_error": found.standard_error,
        "same_top1": found.same_top1,
        "added_by_window": list(found.added_by_window),
    }
    return Check("quality", name, "measured", summary, time.perf_counter() - started, details)
