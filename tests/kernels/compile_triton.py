"""Compiles what TritonKernels launches, for a device that is not there, and prints what each kernel became, as JSON.

    python compile_triton.py CAPABILITY

``test_triton.py`` runs it. Every call goes through Triton's own launcher up to the launch, on tensors of the CPU: with 1 to
33 rows, in the widths of the default model. A kernel that were compiled anew for another number of rows would be listed twice.
"""

from __future__ import annotations

import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from specdec.kernels.base import Rows
from specdec.kernels.portable import PortableKernels
from specdec.kernels.triton import TritonKernels
from specdec.kv.pool import Pool
from specdec.quant.blocks import from_float
from specdec.quant.linear import pack_dense

D, HEADS, KV, HD = 576, 9, 3, 64
compiled: dict[tuple[str, str], set] = {}


class NoDevice:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


launch = JITFunction.run


def compile_only(self, *arguments, grid, warmup, **options):
    kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
    types = {str(a.dtype) for a in arguments if isinstance(a, torch.Tensor)} - {"torch.float32", "torch.int32"}
    assert kernel.asm["cubin"]
    bits = arguments[-2] if self.__name__ in ("attend", "store_codes") else 0  # of codes
    name = f"{self.__name__} int{bits}" if bits else self.__name__
    compiled.setdefault((name, " ".join(sorted(types))), set()).add(kernel.asm["ptx"])
    return kernel


def rows_of(m: int, width: int) -> Rows:
    one = torch.ones(m, dtype=torch.int32)
    return Rows(torch.zeros(m, width, dtype=torch.int32), one, one, one, torch.zeros(m, m % 3, dtype=torch.int32), one)


def launch_all(kernels: TritonKernels, m: int) -> None:
    qkv = torch.randn(m, HEADS + 2 * KV, HD)
    kernels.rms_norm(torch.randn(m, D), torch.ones(D), 1e-5)
    kernels.silu_mul(torch.randn(m, 2 * 1536))
    kernels.rope(qkv[:, : HEADS + KV], torch.randn(m, HD // 2), torch.randn(m, HD // 2))
    kernels.dense_linear(torch.randn(m, D), DENSE)
    for weight in BLOCKS:
        kernels.block_linear(torch.randn(m, D), weight)
    for width in (64, 64 + 2 * m):  # tokens enough for several parts
        rows = rows_of(m, width)
        for pool in POOLS:
            keys, values = pool.keys[0], pool.values[0]
            kernels.store(qkv[:, HEADS : HEADS + KV], qkv[:, HEADS + KV :], keys, values, rows)
            kernels.attend(qkv[:, :HEADS], keys, values, rows, HD**-0.5, 0)


triton.runtime.driver.set_active(NoDevice())
JITFunction.run = compile_only
DENSE = pack_dense(torch.randn(D, D), torch.bfloat16)
BLOCKS = [from_float(torch.randn(D, D), kind) for kind in ("q4", "q8")]
POOLS = [Pool(1, 4, KV, HD, dtype, torch.device("cpu")) for dtype in (torch.bfloat16, torch.int8, torch.uint8)]
for m in (1, 2, 16, 33):
    launch_all(TritonKernels(PortableKernels()), m)
json.dump(
    [
        {
            "kernel": name,
            "programs": len(codes),
            "products": sorted(
                {p for code in codes for p in re.findall(r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.]*", code)}
            ),
            "wide_reads": min(
                len(re.findall(r"cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10", code)) for code in codes
            ),
        }
        for (name, _), codes in compiled.items()
    ],
    sys.stdout,
)
