"""Other processes: do they compute the same bits as this one?

Every engine of an audit runs the one model of its process, so what a process got for itself at its start, such as a table or
the code that a library chose, is the same in all that the audit compares. A process of its own loads the model anew.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import torch

from specdec.audit.report import Check, Status
from specdec.llm import LLM
from specdec.runner.probe import Probe, probe_text
from specdec.types import Span

PROCESSES = 2
"""Others that are started. What happens in one of ten is seen in every fifth audit."""

TOKENS = 700
"""Read in each."""

CHUNK = 128
"""Of them in a pass."""


def check_processes(llm: LLM, load: Callable[[], LLM] | None, enough: Callable[[float], bool]) -> Iterator[Check]:
    """Each process that is started, one after the other.

    Args:
        load: loads the same model again; a function that can be pickled, such as a ``functools.partial``.
        enough: is the time for this up, or would it be in so many seconds?
    """
    if load is None:
        yield _check(1, "left out", "nobody said how another process is to load the model")
        return
    mine, took = digest(llm), 0.0
    for number in range(1, PROCESSES + 1):
        if enough(took):
            yield _check(number, "left out", "no time was left")
            return
        started = time.perf_counter()
        try:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                theirs = pool.submit(_digest_of, load).result()
        except Exception as error:  # whatever keeps a process from loading a model: memory, a file that has gone
            yield _check(number, "not reached", f"it ended with {type(error).__name__}: {error}")
            return
        took = time.perf_counter() - started
        if theirs == mine:
            yield _check(number, "passed", "it computes the same bits", took)
        else:
            summary = "the same text gives other logits there, so tokens differ where two are nearly tied"
            yield _check(number, "failed", summary, took)


def digest(llm: LLM) -> str:
    """Of the logits of all tokens of a text that is read from nothing."""
    model = llm.engine.model
    n = min(TOKENS, model.shape.context - 1)
    probe = Probe(model, llm.kernels, n)
    sequence = probe.sequence(probe_text(n, model.shape.vocab_size), n, every_row=True)
    found = hashlib.sha256()
    for start in range(0, n, CHUNK):
        (logits,) = probe.run(Span(sequence, start, min(start + CHUNK, n)))
        found.update(logits.cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _digest_of(load: Callable[[], LLM]) -> str:
    return digest(load())


def _check(number: int, status: Status, summary: str, seconds: float = 0.0) -> Check:
    return Check("processes", f"process {number}", status, summary, seconds)
