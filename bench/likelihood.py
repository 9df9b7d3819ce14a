"""What a precision costs in likelihood: mean loss per token against the same weights in fp32.

    python bench/likelihood.py --text shakespeare.txt --text speech.txt [--tokens 4096] [--json out.json]

Each text is cut into windows of 256 tokens, spread evenly over the file; the loss of a window's tokens is averaged, the
first token of a window apart. Every precision sees the same windows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec import attention, kernels
from specdec.bench.provenance import provenance
from specdec.config import PRECISIONS, Precision, SamplingParams
from specdec.kernels.base import Kernels
from specdec.kv.blocks import BlockAllocator, BlockTable
from specdec.kv.pool import Pool
from specdec.metrics.stats import Stats
from specdec.models.base import Model
from specdec.models.load import load_model, load_tokenizer
from specdec.models.source import Source, resolve
from specdec.models.tokenizer import Tokenizer
from specdec.runner.pack import pack
from specdec.sampling import History
from specdec.types import Sequence, Span, Step

WINDOW = 256


def windows(tokenizer: Tokenizer, path: Path, n_tokens: int) -> list[list[int]]:
    """Windows of tokens, evenly spread over a text."""
    ids = tokenizer.encode(path.read_text(), add_special=False)
    n = max(1, min(n_tokens // WINDOW, len(ids) // WINDOW))
    starts = [i * (len(ids) - WINDOW) // max(1, n - 1) for i in range(n)]
    return [ids[start : start + WINDOW] for start in starts]


def all_logits(model: Model, ops: Kernels, tokens: list[int]) -> Tensor:
    """[n, V] logits of every row of a text."""
    shape = model.shape
    pool = Pool(shape.n_layers, WINDOW // 16, shape.n_kv_heads, shape.head_dim, model.kv_dtype, model.device)
    table = BlockTable(BlockAllocator(pool.n_blocks))
    table.reserve(len(tokens))
    n = len(tokens)
    sequence = Sequence(0, tokens, n, SamplingParams(), 0, n + 1, frozenset(), table, History.of(tokens, n), Stats())
    batch, *_ = pack(Step((Span(sequence, 0, n),)), model.device)
    every_row = dataclasses.replace(batch, wanted=torch.arange(n, device=model.device))
    with torch.inference_mode():
        return model.forward(every_row, attention.select(pool, ops))[0]


def measure(source: Source, precision: Precision, texts: dict[str, list[list[int]]]) -> dict[str, list[Tensor]]:
    """Per text and window: [n - 1] losses and [n] argmax, stacked as [2, n - 1]."""
    device = torch.device("cpu")
    ops = kernels.select(device)
    model = load_model(source, precision, ops, device)
    results: dict[str, list[Tensor]] = {}
    for name, cut in texts.items():
        results[name] = []
        for tokens in cut:
            logp = all_logits(model, ops, tokens)[:-1].double().log_softmax(-1)
            loss = -logp.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
            results[name].append(torch.stack([loss, logp.argmax(-1).double()]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens taken from each text")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="default: blocks, q8, q4, bf16")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    source = resolve(arguments.model)
    tokenizer = load_tokenizer(source)
    texts = {path.name: windows(tokenizer, path, arguments.tokens) for path in arguments.text}
    reference = measure(source, "fp32", texts)
    rows: list[dict[str, Any]] = []
    print(f"{'precision':10} {'text':24} {'loss':>8} {'added':>9} {'± s.e.':>8} {'same top-1':>11}")
    for precision in ["fp32", *(arguments.precision or ["blocks", "q8", "q4", "bf16"])]:
        found = reference if precision == "fp32" else measure(source, precision, texts)
        for name in texts:
            ours, theirs = torch.cat(found[name], 1), torch.cat(reference[name], 1)
            added = ours[0] - theirs[0]
            rows.append({
                "precision": precision,
                "text": name,
                "tokens": added.numel(),
                "loss": ours[0].mean().item(),
                "added": added.mean().item(),
                "standard_error": added.std().item() / math.sqrt(added.numel()),
                "same_top1": (ours[1] == theirs[1]).double().mean().item(),
            })  # fmt: skip
            r = rows[-1]
            print(
                f"{precision:10} {name:24} {r['loss']:8.4f} {r['added']:+9.4f} {r['standard_error']:8.4f} "
                f"{r['same_top1']:11.3f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
