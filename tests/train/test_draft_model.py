"""A draft model cut from its target: the same arithmetic in floats, the right rows to learn from, and a folder that loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny
from forward import logits_of
from test_session import PROMPTS, TEMPERATURES, Reporter

from specdec import kernels
from specdec.config import ConfigError, SamplingParams
from specdec.llm import LLM
from specdec.models.decoder import Decoder
from specdec.models.draft_notes import FILE, read_notes
from specdec.models.errors import ModelError
from specdec.models.load import load_model
from specdec.models.source import resolve
from specdec.train import session
from specdec.train.batch import Batch
from specdec.train.cut import CutModel
from specdec.train.data import make_answers, read_answers
from specdec.train.evaluate import measure
from specdec.train.features import Teacher
from specdec.train.losses import Output
from specdec.train.settings import TrainConfig

CPU = torch.device("cpu")


def load(folder: Path, precision: str = "fp32") -> Decoder:
    return load_model(resolve(str(folder)), precision, kernels.select(CPU), CPU)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tiny(tmp_path_factory.mktemp("target"), num_hidden_layers=4, tie_word_embeddings=True)
    return LLM(str(folder), precision="fp32", speculation="off", self_test=False, max_len=100)


@pytest.fixture(scope="module")
def answers(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    make_answers(llm, PROMPTS, path, 16, lambda *_: None, TEMPERATURES)
    return path


def config(**more: Any) -> TrainConfig:
    settings = {"kind": "draft", "steps": 3, "epochs": 4, "batch": 100, "vocabulary": 200, "held_out": 0.2, "layers": (0, 3)}
    return TrainConfig(**{**settings, **more})


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": 7}),
        ("qwen2", {}),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}}),
    ],
)
def test_uncut_it_is_the_model(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    """All layers kept, several texts side by side: the engine's own logits, but for rounding."""
    model = load(tiny(tmp_path, family, **settings))
    uncut = CutModel(model, (0, 1))
    texts = [[(7 * i + j) % 250 for i in range(n)] for j, n in enumerate((30, 1, 12))]
    with torch.no_grad():
        states = uncut(model.embedding(torch.tensor([token for t in texts for token in t])), [len(t) for t in texts], [5, 1, 3])
        found = model.head(states)
    torch.testing.assert_close(found, torch.cat([logits_of(model, t) for t in texts]), atol=2e-4, rtol=1e-4)


def test_its_rows_are_those_that_foresee(llm: LLM, answers: Path) -> None:
    """The uncut model foresees every token of the target's greedy answers, at every step: no row is off by one."""
    model = llm.engine.model
    assert isinstance(model, Decoder)
    several = [a for a in read_answers(answers, 320) if a.temperature == 0 and len(a.tokens) - a.n_prompt > 6][:20]
    batch = Batch.of(Teacher(model, llm.kernels, (), False).examples(several), CPU)
    output = Output.of(model.head.rows(torch.arange(320)), torch.arange(320), 320)
    measured = measure(CutModel(model, (0, 1, 2, 3)).eval(), [batch], model.embedding, output, llm.kernels, 4)
    assert measured.own == measured.forced == [1.0] * 4
    cut = measure(CutModel(model, (0, 1, 3)).eval(), [batch], model.embedding, output, llm.kernels, 4)
    assert cut.tau < measured.tau


def test_a_run_makes_a_model_that_drafts(llm: LLM, answers: Path, tmp_path: Path) -> None:
    """It learns, its folder is a model and a drafter, and what it drafts changes no text."""
    reporter, out = Reporter(), tmp_path / "out"
    trained = session.train(llm, config(), answers, out, tmp_path / "features", reporter)
    session.save(llm, trained, out)
    third = len(reporter.losses) // 3
    assert sum(reporter.losses[-third:]) < 0.9 * sum(reporter.losses[:third])
    assert trained.measured["tau"] > trained.history[0]["tau"]

    notes = read_notes(out, 320)
    assert len(notes.vocabulary_ids) == 200
    assert notes.measured["tau"] == trained.measured["tau"]
    assert "layers kept | 0, 3" in (out / "report.md").read_text()
    model, target = load(out), llm.engine.model
    assert isinstance(target, Decoder)
    tokens = list(b"say 5 twice")
    with torch.no_grad():
        states = trained.head.eval()(target.embedding(torch.tensor(tokens)), [len(tokens)], [len(tokens)])
    torch.testing.assert_close(logits_of(model, tokens), target.head(states), atol=0.15, rtol=0.05)  # bf16 weights

    alone = LLM(str(out), speculation="off", self_test=False)
    assert alone.generate("say 5", SamplingParams(temperature=0, max_tokens=8))[0].tokens
    drafted = LLM(llm.name, precision="fp32", speculation="trained", drafter=str(out), self_test=False, max_len=100)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=40, seed=3)
        prompts = ["say 5 twice", "Ask me."]
        assert [r.tokens for r in drafted.generate(prompts, params)] == [r.tokens for r in llm.generate(prompts, params)]
    assert drafted.engine.stats.accepted > 0


def test_layers_that_are_not_there_are_refused(llm: LLM, answers: Path, tmp_path: Path) -> None:
    for layers in ((0, 4), (2, 1), (-1, 2)):
        with pytest.raises(ConfigError, match="0 to 3, in increasing order"):
            session.train(llm, config(layers=layers), answers, tmp_path, tmp_path, Reporter())


def test_notes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for ids in ([3, 2], [], [1, 320], [1.5], "all"):
        (tmp_path / FILE).write_text(json.dumps({"vocabulary_ids": ids}))
        with pytest.raises(ModelError, match="0 to 319, in order"):
            read_notes(tmp_path, 320)
