"""What a precision costs in likelihood: mean loss per token against the same weights in fp32.

    python bench/likelihood.py --text shakespeare.txt --text speech.txt [--tokens 4096] [--json out.json]

Each text is cut into windows of 256 tokens, spread evenly over the file; the loss of a window's tokens is averaged, the
first token of a window apart. Every precision sees the same windows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch
from torch import Tensor

from specdec import kernels
from specdec.audit.quality import cost, losses, windows
from specdec.bench.provenance import provenance
from specdec.config import PRECISIONS, Precision
from specdec.models.load import load_model, load_tokenizer
from specdec.models.source import Source, resolve


def measure(source: Source, precision: Precision, texts: dict[str, list[list[int]]]) -> dict[str, list[Tensor]]:
    """Per text, what ``losses`` gives for its windows."""
    device = torch.device("cpu")
    ops = kernels.select(device)
    model = load_model(source, precision, ops, device)
    return {name: losses(model, ops, cut) for name, cut in texts.items()}


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
    texts = {path.name: windows(tokenizer, path.read_text(), arguments.tokens) for path in arguments.text}
    reference = measure(source, "fp32", texts)
    rows = []
    print(f"{'precision':10} {'text':24} {'loss':>8} {'added':>9} {'± s.e.':>8} {'same top-1':>11}")
    for precision in ["fp32", *(arguments.precision or ["blocks", "q8", "q4", "bf16"])]:
        found = reference if precision == "fp32" else measure(source, precision, texts)
        for name in texts:
            figures = dataclasses.asdict(cost(found[name], reference[name]))
            del figures["added_by_window"]
            rows.append({"precision": precision, "text": name, **figures})
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
