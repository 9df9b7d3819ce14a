"""The arithmetic of the decoder. ``select`` gives the native kernels where they are built, portable ones elsewhere."""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import TYPE_CHECKING

import torch

from specdec.kernels.base import Kernels
from specdec.kernels.library import LIBRARY, REBUILD, KernelError, load

if TYPE_CHECKING:
    from specdec.kernels.tails import NativeTails

CHOICES = ("auto", "native", "torch")
_log = logging.getLogger(__name__)


def select(device: torch.device | str) -> Kernels:
    """The kernels for a device: native on the CPU if the library is built, Triton's on a CUDA device, portable torch otherwise.

    The environment variable ``SPECDEC_KERNELS`` decides otherwise: ``torch``, or ``native`` to make their absence an error.

    Raises:
        KernelError: native kernels were asked for and are not there, or those that are there do not fit this installation.
    """
    from specdec.kernels.cpu import NativeKernels
    from specdec.kernels.portable import PortableKernels

    device = torch.device(device)
    if _choice() == "auto" and device.type != "cpu":
        return _select_accelerator(device)
    reason = _why_portable(device)
    if reason is None:
        return NativeKernels(load())
    if _choice() == "native":
        raise KernelError(f"SPECDEC_KERNELS=native, but {reason}: {REBUILD}")
    if _choice() == "auto":
        _log.warning("kernels run in torch, many times slower: %s; %s", reason, REBUILD)
    return PortableKernels()


def _select_accelerator(device: torch.device) -> Kernels:
    from specdec.kernels.portable import PortableKernels

    reason = _why_no_triton(device)
    if reason is not None:
        _log.warning(
            "kernels run in torch: %s. Steps are many times slower, and a row's logits may depend on the rows beside it, so "
            "that speculation may change tokens that are nearly tied",
            reason,
        )
        return PortableKernels()
    from specdec.kernels.triton import TritonKernels

    if device.index is not None:
        torch.cuda.set_device(device)  # Triton launches on the current device, wherever the tensors lie
    return TritonKernels(select("cpu"))


def native_tails() -> NativeTails | None:
    """The native search for what followed the end of a text, on whatever device the model runs; None where it is not built."""
    from specdec.kernels.tails import NativeTails

    return None if _why_portable(torch.device("cpu")) else NativeTails(load())


def set_threads(n: int) -> None:
    """The most threads that a call may use, of torch and of the native library, in this process.

    It begins as torch's own number, which follows the cores that this process may run on and ``OMP_NUM_THREADS``.
    """
    torch.set_num_threads(n)
    if _why_portable(torch.device("cpu")) is None:
        load().set_threads(n)


def describe(device: torch.device | str) -> str:
    """One line for people: which kernels run on a device, and why if they are not the native ones."""
    device = torch.device(device)
    if _choice() == "auto" and device.type != "cpu":
        missing = _why_no_triton(device)
        return f"triton (sampler: {describe('cpu')})" if missing is None else f"torch ({missing})"
    reason = _why_portable(device)
    if reason is not None:
        return f"torch ({reason})"
    library = load()
    threads = "1 thread" if library.threads == 1 else f"{library.threads} threads"
    return f"{select(device).name} (native, {threads}, compiler {library.compiler})"


def _choice() -> str:
    choice = os.environ.get("SPECDEC_KERNELS") or "auto"
    if choice not in CHOICES:
        raise KernelError(f"SPECDEC_KERNELS must be one of {', '.join(CHOICES)}, got {choice!r}")
    return choice


def _why_portable(device: torch.device) -> str | None:
    """The reason why native kernels cannot or shall not run; None where they do."""
    if _choice() == "torch":
        return "SPECDEC_KERNELS=torch"
    if device.type != "cpu":
        return f"the native kernels run on the CPU, not on {device}"
    return None if LIBRARY.exists() else f"the native kernels are not built ({LIBRARY} is missing)"


def _why_no_triton(device: torch.device) -> str | None:
    """The reason why Triton's kernels cannot run on an accelerator; None where they can."""
    if device.type != "cuda":
        return f"there are no kernels for {device.type} devices"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'specdec[gpu]')"
    return None
