"""The paths of an accelerator, on TINY: rows are independent of their company, recorded passes are the launched ones, drafts
change no token."""

from __future__ import annotations

import pytest
import torch
from checkpoints import tiny
from harness import Request, make_engine, serve

from specdec import kernels
from specdec.config import SamplingParams
from specdec.kernels.base import Kernels
from specdec.kernels.portable import PortableKernels
from specdec.models.base import Model
from specdec.models.load import load_model
from specdec.models.source import resolve
from specdec.runner.compiled import RecordedRunner
from specdec.runner.invariance import check_invariance
from specdec.runner.runner import Runner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda")
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16", "q8", "q4"])
TEXT = tuple(b"the cat sat on the mat, the cat sat on ")
REQUESTS = [
    Request(TEXT[i:], SamplingParams(temperature=t, max_tokens=48, logprobs=5), seed=i) for i, t in enumerate((0, 0, 0.7, 1))
]


def loaded(folder, precision, family: str = "llama") -> tuple[Model, Kernels]:
    ops = kernels.select(CUDA)
    assert ops.name == "triton", "without Triton's kernels nothing here holds"
    return load_model(resolve(str(tiny(folder, family))), precision, ops, CUDA), ops


@PRECISIONS
def test_rows_are_independent_of_their_company(tmp_path, precision: str) -> None:
    """The self-test at start-up finds bitwise equality, in recorded passes, on this device."""
    found = check_invariance(*loaded(tmp_path, precision))
    assert found.exact, found.describe()


@PRECISIONS
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_drafts_change_no_token(tmp_path, precision: str, family: str) -> None:
    """Greedy and sampled requests with drafts equal those without, tokens and log-probabilities."""
    model, ops = loaded(tmp_path, precision, family)
    plain, drafted = (serve(model, ops, REQUESTS, kind) for kind in ("off", "auto"))
    assert [answer.same for answer in drafted] == [answer.same for answer in plain]


@PRECISIONS
def test_recorded_passes_are_the_launched_ones(tmp_path, precision: str) -> None:
    """An engine whose small passes are replayed gives the tokens of one that launches kernel by kernel."""
    model, ops = loaded(tmp_path, precision)
    recorded, launched = (make_engine(model, ops, "auto") for _ in range(2))
    assert type(recorded._runner) is RecordedRunner
    launched._runner = Runner(model, launched._runner._attention, launched.drafter.taps)
    for engine in (recorded, launched):
        for request in REQUESTS:
            engine.add(list(request.prompt), request.params, request.end_tokens, request.seed)
    while recorded.has_work:
        mine, its = recorded.step(), launched.step()
        assert [(d.tokens, d.logprobs) for d in mine] == [(d.tokens, d.logprobs) for d in its]
    assert not launched.has_work


@pytest.mark.parametrize(("precision", "close"), [("fp32", 1e-3), ("bf16", 1e-2)])
def test_a_device_agrees_with_the_cpu(tmp_path, precision: str, close: float) -> None:
    """Log-probabilities of a prompt, on the device and by the portable kernels on the CPU."""
    model, ops = loaded(tmp_path, precision)
    cpu = PortableKernels()
    reference = load_model(resolve(str(tmp_path)), precision, cpu, torch.device("cpu"))
    request = [Request(TEXT, SamplingParams(max_tokens=1, prompt_logprobs=0))]
    (mine,), (its,) = serve(model, ops, request), serve(reference, cpu, request)
    for a, b in zip(mine.prompt_logprobs, its.prompt_logprobs, strict=True):
        assert abs(a.logprob - b.logprob) < close
