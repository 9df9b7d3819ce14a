"""Compiles the kernels for devices that are not there and prints, as JSON, what each became; run by ``test_triton.py``."""

from __future__ import annotations

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec.kernels import triton_attention, triton_products, triton_rows

CAPABILITIES = (80, 90, 100)
"""Of CUDA devices: A100, H100 and H200, B200."""

POINTERS = {
    "weight": "bf16", "keys": "bf16", "values": "bf16", "tables": "i32", "sequence": "i32", "slot": "i32", "prefix": "i32",
    "path": "i32", "n_path": "i32", "x": "fp32", "parts": "fp32", "q": "fp32", "k": "fp32", "v": "fp32", "sums": "fp32",
    "peaks": "fp32", "masses": "fp32", "out": "fp32", "gate_up": "fp32", "halves": "fp16", "cos": "fp32", "sin": "fp32",
}  # fmt: skip
FLOATS = {"eps", "scale"}
HEADS = {"KV": 3, "HD": 64, "HD_TILE": 64, "PART": 512}
KERNELS = [
    (triton_products.dense, {"K": 576, "STEPS": 3, "ROWS": 16, "COLUMNS": 32, "DEPTH": 64}, 4),
    (triton_products.blocks, {"K": 576, "STEPS": 6, "ROWS": 16, "COLUMNS": 32, "Q4": True}, 3),
    (triton_products.blocks, {"K": 576, "STEPS": 6, "ROWS": 16, "COLUMNS": 32, "Q4": False}, 3),
    (triton_products.add_parts, {"S": 3, "TILE": 1024}, 3),
    (triton_attention.attend, {**HEADS, "G": 3, "G_TILE": 16, "BLOCK": 16, "KEYS": 64, "WHOLE": False}, 2),
    (triton_attention.join, {"HEADS": 9, "HD": 64, "HEADS_TILE": 16, "HD_TILE": 64, "PART": 512}, 3),
    (triton_rows.rms_norm, {"D": 576, "TILE": 1024}, 3),
    (triton_rows.silu_mul, {"F": 1536, "TILE": 1024}, 3),
    (triton_rows.rope, {"H": 12, "HALF": 32, "H_TILE": 16, "TILE": 32}, 3),
    (triton_rows.store, {"KV": 3, "HD": 64, "TILE": 64, "BLOCK": 16}, 3),
]


def kind(name: str, constants: dict) -> str:
    if name in constants:
        return "constexpr"
    if name == "weight" and "Q4" in constants:
        return "*u8"
    return f"*{POINTERS[name]}" if name in POINTERS else "fp32" if name in FLOATS else "i32"


def compiled(function, constants: dict, stages: int, capability: int) -> dict:
    names = function.arg_names
    signature = {name: kind(name, constants) for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in POINTERS or name.endswith("stride")}
    source = ASTSource(function, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    options = {"num_warps": 4, "num_stages": stages, "enable_fp_fusion": False}
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm
    assert code["cubin"]
    return {
        "products": sorted(set(re.findall(r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.]*", code["ptx"]))),
        "wide_reads": len(re.findall(r"cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10", code["ptx"])),
    }


json.dump(
    [
        (function.__name__, compiled(function, constants, stages, capability))
        for function, constants, stages in KERNELS
        for capability in CAPABILITIES
    ],
    sys.stdout,
)
