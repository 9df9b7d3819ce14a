"""What a precision costs in likelihood: mean loss per token against the same weights in fp32.

    python bench/likelihood.py --text shakespeare.txt --text speech.txt [--tokens 4096] [--json out.json]
    python bench/likelihood.py --text shakespeare.txt --kv-format int8 --kv-format int4 --window 1024

Each text is cut into windows of 256 tokens, spread evenly over the file; the loss of a window's tokens is averaged, the
first token of a window apart. Every precision sees the same windows. With --kv-format, formats of keys and values are
compared with bf16, under the weights of one precision; longer windows then say more, since each token reads all before it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from specdec import kernels
from specdec.audit.quality import WINDOW, cost, losses, windows
from specdec.bench.provenance import provenance
from specdec.config import PRECISIONS, Precision
from specdec.kv.codec import DTYPES
from specdec.models.load import load_model, load_tokenizer
from specdec.models.source import Source, resolve

Losses = dict[str, list[Tensor]]
"""Per text, what ``losses`` gives for its windows."""


def of_precisions(
    source: Source, precisions: list[Precision], texts: dict[str, list[list[int]]]
) -> Iterator[tuple[str, Losses]]:
    """fp32 first."""
    device = torch.device("cpu")
    ops = kernels.select(device)
    for precision in ("fp32", *precisions):
        model = load_model(source, precision, ops, device)
        yield precision, {name: losses(model, ops, cut) for name, cut in texts.items()}


def of_formats(
    source: Source, precision: Precision, formats: list[str], texts: dict[str, list[list[int]]]
) -> Iterator[tuple[str, Losses]]:
    """bf16 first."""
    device = torch.device("cpu")
    ops = kernels.select(device)
    model = load_model(source, precision, ops, device)
    for name in ("bf16", *formats):
        held = model.holding(DTYPES[name])
        yield name, {text: losses(held, ops, cut) for text, cut in texts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens taken from each text")
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens of a window")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="default: blocks, q8, q4, bf16")
    parser.add_argument("--kv-format", action="append", choices=[name for name in DTYPES if name != "bf16"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    source, formats = resolve(arguments.model), arguments.kv_format
    precisions = arguments.precision or (["blocks"] if formats else ["blocks", "q8", "q4", "bf16"])
    if formats and len(precisions) != 1:
        parser.error("--kv-format needs one --precision for the weights")
    tokenizer = load_tokenizer(source)
    texts = {path.name: windows(tokenizer, path.read_text(), arguments.tokens, arguments.window) for path in arguments.text}
    kind = "kv_format" if formats else "precision"
    measured = of_formats(source, precisions[0], formats, texts) if formats else of_precisions(source, precisions, texts)
    rows, reference = [], None
    print(f"{kind:10} {'text':24} {'loss':>8} {'added':>9} {'± s.e.':>8} {'same top-1':>11}")
    for subject, found in measured:
        reference = reference or found
        for name in texts:
            figures = dataclasses.asdict(cost(found[name], reference[name]))
            del figures["added_by_window"]
            r = {kind: subject, "text": name, **figures}
            rows.append(r)
            print(
                f"{subject:10} {name:24} {r['loss']:8.4f} {r['added']:+9.4f} {r['standard_error']:8.4f} {r['same_top1']:11.3f}",
                flush=True,
            )
    if arguments.json:
        told = provenance(window=arguments.window, **({"precision": precisions[0]} if formats else {}))
        arguments.json.write_text(json.dumps({"provenance": told, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
