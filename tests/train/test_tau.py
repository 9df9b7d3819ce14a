"""The τ that training predicts is the one that the engine reaches with the drafter that comes of it."""

from __future__ import annotations

import pytest
import torch
from checkpoints import chain
from harness import Request, make_engine, run
from test_session import Reporter

from specdec.bench.prompts import Prompt
from specdec.config import SamplingParams, SpeculationConfig
from specdec.draft.base import Target
from specdec.draft.recurrent import RecurrentDrafter
from specdec.llm import LLM
from specdec.models.head_files import load_head
from specdec.train import session
from specdec.train.data import held_out, make_answers, read_answers
from specdec.train.settings import TrainConfig

STEPS, SIZE, MAX_TOKENS = 3, 12, 60


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_the_engine_needs_as_many_passes_as_predicted(kind: str, tmp_path) -> None:
    """Answers held out are given again, with chains of the trained drafter: off by a row or a step, it could not be close."""
    law = (3 * torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(4), dtype=torch.float64)).softmax(1)
    folder = chain(tmp_path / "model", law, [chr(ord("a") + i) for i in range(SIZE)])
    llm = LLM(str(folder), precision="fp32", speculation="off", self_test=False)
    model = llm.engine.model
    prompts = [
        Prompt(str(i), "t", "".join(chr(ord("a") + (i // SIZE**p) % SIZE) for p in range(3)), raw=True) for i in range(60)
    ]
    path = tmp_path / "answers.jsonl"
    make_answers(llm, prompts, path, MAX_TOKENS, lambda *_: None)
    # At three steps, EAGLE-1 learns on its own states too.
    config = TrainConfig(kind=kind, steps=STEPS, epochs=3, batch=128, vocabulary=0, held_out=0.2, rate=3e-3, patience=0)
    trained = session.train(llm, config, path, tmp_path, tmp_path / "features", Reporter())
    session.save(llm, trained, tmp_path)

    kept = [a for a in read_answers(path, SIZE) if held_out(a, 0.2)]
    params = SamplingParams(max_tokens=MAX_TOKENS)
    requests = [Request(a.tokens[: a.n_prompt], params.replace(temperature=a.temperature), seed=a.seed) for a in kept]
    speculation = SpeculationConfig(
        trained_precision="fp32", trained_depth=STEPS, trained_width=1, trained_nodes=STEPS, trained_min_probability=1e-9
    )
    drafter = RecurrentDrafter(load_head(tmp_path), Target(model, llm.kernels, 64), speculation)
    engine = make_engine(model, llm.kernels, drafter=drafter, kv_tokens=64 * 16, max_len=128)
    answers = run(engine, requests)
    assert [tuple(answer.tokens) for answer in answers] == [a.tokens[a.n_prompt :] for a in kept]
    assert engine.stats.tokens_per_pass > 1.5
    assert trained.measured["tau"] == pytest.approx(engine.stats.tokens_per_pass, rel=0.03)
