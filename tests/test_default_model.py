"""The promise on the real model: drafts, batches and chunks change no token and no bit of a logit.

In blocks and in bf16, with keys and values in bf16 and in int8.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from harness import Request, make_engine, run, serve, truth_of

from specdec import kernels
from specdec.config import DEFAULT_MODEL, SamplingParams
from specdec.kv.codec import DTYPES
from specdec.models.gguf import read
from specdec.models.source import resolve
from specdec.models.tokenizer import Tokenizer
from specdec.runner.invariance import check_invariance
from specdec.testing import Thicket

pytestmark = [pytest.mark.model, pytest.mark.slow]

TEXTS = (
    "Write the word list again in capital letters: red, green, blue, red, green, yellow.",
    "What is the capital of France, and what is it known for?",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return",
    "Repeat after me: the bridge is closed, the road is closed, the school is closed.",
)
PARAMETERS = (
    {},
    {"top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1},
    {"min_p": 0.05, "frequency_penalty": 0.4, "logprobs": 2},
    {"presence_penalty": 0.5, "min_tokens": 12, "logit_bias": {198: 1.5}},
)


def ops():
    return kernels.select(torch.device("cpu"))


def requests(temperature: float) -> list[Request]:
    tokenizer = Tokenizer.from_gguf(read(resolve(DEFAULT_MODEL).path).metadata)
    return [
        Request(
            tuple(tokenizer.chat([{"role": "user", "content": text}])),
            SamplingParams(temperature=temperature, max_tokens=28 - 4 * i, **settings),
            seed=i,
            end_tokens=frozenset({2}),
        )
        for i, (text, settings) in enumerate(zip(TEXTS, PARAMETERS, strict=True))
    ]


HELD = pytest.mark.parametrize(("precision", "kv_format"), [("blocks", "bf16"), ("bf16", "bf16"), ("blocks", "int8")])


@HELD
def test_rows_are_bitwise_independent(default_model, precision: str, kv_format: str) -> None:
    """The start-up self-test finds no difference at all, and would say so if it did."""
    found = check_invariance(default_model(precision).holding(DTYPES[kv_format]), ops())
    assert found.exact, found.describe()
    assert set(found.differences) == {"burst width", "tree shape", "chunking", "batch"}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@HELD
def test_drafts_change_nothing(default_model, precision: str, kv_format: str, temperature: float) -> None:
    """Each request alone without drafts; then all in one batch with drafts of every kind, narrow and wide."""
    model, asked = default_model(precision).holding(DTYPES[kv_format]), requests(temperature)
    alone = [serve(model, ops(), [request])[0] for request in asked]
    for kind, max_nodes in (("auto", 8), ("ngram", 3), ("recycling", 16)):
        answers = serve(model, ops(), asked, kind, max_nodes=max_nodes, prefill_rows=50)
        assert [a.same for a in answers] == [a.same for a in alone], kind
    drafter = Thicket(truth_of(asked, alone), model.shape.vocab_size, seed=1)
    answers = run(make_engine(model, ops(), drafter=drafter, max_nodes=12, max_sequences=3), asked)
    assert [a.same for a in answers] == [a.same for a in alone]
    assert sum(a.stats["accepted"] for a in answers) > 10


def test_decoding_many_tokens_takes_less_than_half_a_gigabyte() -> None:
    """Of the whole process, at its peak, with all drafters of ``auto``; also where text goes round in circles and every pass is
    as wide as it may be, whose logits once came to lie side by side instead of one in the place of the other. Pages of files,
    torch's libraries above all, are other processes' as well and left out: how many are mapped is the system's choice.
    Nor does it load libraries that this model has no use for, the slowest of which takes a sixth of a second to import."""
    script = (
        "import sys\n"
        "from specdec import LLM, SamplingParams\n"
        "params = SamplingParams(temperature=0, max_tokens=1200, ignore_eos=True)\n"
        "LLM(speculation='auto').generate('Tell me a long story about a dragon.', params)\n"
        "told = dict(line.split()[:2] for line in open('/proc/self/status') if line.startswith(('VmHWM', 'RssFile')))\n"
        "needless = {'gguf', 'rich', 'transformers', 'fastapi'} & sys.modules.keys()\n"
        "print(int(told['VmHWM:']) - int(told['RssFile:']), *needless)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    kilobytes, *modules = done.stdout.split()
    assert int(kilobytes) < 430_000
    assert not modules
