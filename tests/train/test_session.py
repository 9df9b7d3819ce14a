"""From prompts to a drafter on a tiny model: answers, features, training, the folder that comes of it, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from checkpoints import tiny
from forward import attention_of, batch_of
from toys import Silent

from specdec.bench.prompts import Prompt
from specdec.config import ConfigError
from specdec.llm import LLM
from specdec.models.fingerprint import Fingerprint
from specdec.models.head_files import LoadedHead, load_head
from specdec.train import checkpoint, session, vocabulary
from specdec.train.data import Answer, held_out, make_answers, read_answers
from specdec.train.features import Store, Teacher, write
from specdec.train.settings import TrainConfig

PROMPTS = [Prompt(str(i), "ab"[i % 2], f"say {i} twice") for i in range(70)]
TEMPERATURES = (0.0, 1.0)


class Reporter(Silent):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def note(self, _: str) -> None: ...

    def trained(self, _progress, _speed, losses) -> None:
        self.losses.append(losses.by_step[0])


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tiny(tmp_path_factory.mktemp("tiny"))
    return LLM(str(folder), precision="fp32", speculation="off", self_test=False, max_len=100)


@pytest.fixture(scope="module")
def answers(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    make_answers(llm, PROMPTS, path, 16, lambda *_: None, TEMPERATURES)
    return path


def config(kind: str = "eagle3", **more) -> TrainConfig:
    return TrainConfig(**{"kind": kind, "steps": 2, "epochs": 4, "batch": 100, "vocabulary": 200, "held_out": 0.2, **more})


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp", "medusa"])
def test_a_run_makes_a_drafter_that_learned(kind, llm, answers, tmp_path) -> None:
    reporter = Reporter()
    trained = session.train(llm, config(kind), answers, tmp_path, tmp_path / "features", reporter)
    session.save(llm, trained, tmp_path)
    third = len(reporter.losses) // 3
    assert sum(reporter.losses[-third:]) < 0.97 * sum(reporter.losses[:third])
    loaded = load_head(tmp_path, Fingerprint.of(llm.engine.model, "tiny"))
    assert len(loaded.vocabulary_ids) == 200
    assert loaded.measured["tau"] == trained.measured["tau"] == max(entry["tau"] for entry in trained.history)
    assert [len(loaded.measured[key]) for key in ("own", "forced", "by_rank")] == [2, 2, 2]
    assert loaded.provenance["data"]["answers"] == trained.data["answers"]
    assert "tau" in loaded.measured
    report = (tmp_path / "report.md").read_text()
    assert str(loaded.head.config.taps[0]) in report
    learned = [entry["learned"] for entry in trained.history]
    assert learned == sorted(set(learned)), "the course of a run is drawn over what it has learned from"
    assert (learned[0], learned[-1]) == (0, trained.curve[-1][0])
    assert all(f"| {n:,} |" in report for n in learned)
    assert {entry["anchors"] for entry in trained.history} == {loaded.measured["anchors"]}, "what it is measured on stays"


def test_a_finished_run_is_not_run_again_and_other_settings_are_refused(llm, answers, tmp_path) -> None:
    first, again = Reporter(), Reporter()
    trained = session.train(llm, config(epochs=1), answers, tmp_path, tmp_path / "features", first)
    repeated = session.train(llm, config(epochs=1, cache_gb=1), answers, tmp_path, tmp_path / "features", again)
    assert first.losses
    assert not again.losses
    assert repeated.measured == trained.measured
    with pytest.raises(ConfigError, match="epochs was 1 and is now 2"):
        session.train(llm, config(epochs=2), answers, tmp_path, tmp_path / "features", again)
    (tmp_path / checkpoint.FILE).write_bytes(b"half of it")
    with pytest.raises(ConfigError, match="damaged"):
        session.train(llm, config(epochs=1), answers, tmp_path, tmp_path / "features", again)


def test_a_run_goes_on_from_a_head_that_was_trained_before(llm, answers, tmp_path) -> None:
    """It begins with its weights and its tokens, says so, and is taken up only as what it is."""

    def run(folder: str, before: LoadedHead | None = None, **more) -> session.Trained:
        settings = config(epochs=1, **more)
        return session.train(llm, settings, answers, tmp_path / folder, tmp_path / "features", Reporter(), before)

    session.save(llm, run("first"), tmp_path / "first")
    before = load_head(tmp_path / "first")
    before = dataclasses.replace(before, vocabulary_ids=before.vocabulary_ids.flip(0))  # not what counting would choose
    after = run("second", before, steps=3, seed=1)
    assert torch.equal(after.ids, before.vocabulary_ids)
    again = dataclasses.replace(before, vocabulary_ids=load_head(tmp_path / "first").vocabulary_ids)
    assert run("third", again).history[0]["tau"] == pytest.approx(before.measured["tau"], rel=0.02)  # in bfloat16 between
    session.save(llm, after, tmp_path / "second")
    (weights,) = tmp_path.glob("first/model-*.safetensors")
    origin = load_head(tmp_path / "second").provenance
    assert origin["started_from"] == weights.name
    assert f"| started from | {weights.name} |" in (tmp_path / "second" / "report.md").read_text()
    assert "started_from" not in load_head(tmp_path / "first").provenance
    assert run("second", before, steps=3, seed=1).history == after.history, "it is taken up"
    with pytest.raises(ConfigError, match=f"started_from was '{weights.name}' and is now None"):
        run("second", steps=3, seed=1)
    with pytest.raises(ConfigError, match="started_from was None and is now"):
        run("first", before)
    for odd, reason in (
        ({"vocabulary": 100}, "vocabulary is 200 there and 100 here"),
        ({"taps": (1,)}, r"taps is \(0, 1\) there and \(1,\) here"),
        ({"kind": "eagle"}, "kind is 'eagle3' there and 'eagle' here"),
        ({"kind": "draft"}, "a draft model starts as layers of its target"),
    ):
        with pytest.raises(ConfigError, match=reason):
            run("other", before, **odd)
    stranger = dataclasses.replace(before, target=dataclasses.replace(before.target, n_layers=9))
    with pytest.raises(ConfigError, match="this model is another"):
        run("other", stranger)
    assert not (tmp_path / "other").exists(), "refused before anything is written"


def test_too_few_answers_and_layers_that_are_not_there_are_refused(llm, answers, tmp_path) -> None:
    with pytest.raises(ConfigError, match="0 to 1"):
        session.train(llm, config(taps=(0, 5)), answers, tmp_path, tmp_path, Reporter())
    few = tmp_path / "few.jsonl"
    few.write_text("".join(answers.read_text().splitlines(keepends=True)[:9]))
    with pytest.raises(ConfigError, match="too few"):
        session.train(llm, config(), few, tmp_path, tmp_path, Reporter())


def test_features_and_opinions_are_the_models_own(llm, answers) -> None:
    """Together, in pieces of passes, or alone: row i's feature is what layer l gives for token i."""
    model = llm.engine.model
    several = read_answers(answers, model.shape.vocab_size)[:30]  # more rows than a pass
    for answer, example in zip(several, Teacher(model, llm.kernels, (0, 1), False).examples(several), strict=True):
        tokens = list(answer.tokens[:-1])
        logits, taps = model.forward(batch_of(tokens), attention_of(model), (0, 1))
        expected = torch.cat([taps[0], taps[1]], 1)[:-1].bfloat16()
        assert torch.equal(example.features, expected)
        rows = logits[answer.n_prompt :]
        assert torch.equal(example.top_ids[:, 0].long(), rows.argmax(1))
        assert torch.allclose(example.top_logp[:, 0].float(), rows.log_softmax(1).amax(1), atol=2e-3)
        if answer.temperature == 0:
            assert torch.equal(example.top_ids[:, 0].long(), example.tokens[answer.n_prompt + 1 :])


def test_hidden_states_are_kept_whole_or_made_anew(llm, answers, tmp_path) -> None:
    several = read_answers(answers, llm.engine.model.shape.vocab_size)
    teacher = Teacher(llm.engine.model, llm.kernels, (1,), True)
    made = Store(teacher, several, tmp_path, 2**30)[0]
    (file,) = tmp_path.glob("*.bin")
    whole = file.read_bytes()

    def same() -> bool:
        again = Store(teacher, several, tmp_path, 2**30)[0]
        return all(
            torch.equal(a.features, b.features) and torch.equal(a.top_ids, b.top_ids) for a, b in zip(made, again, strict=True)
        )

    made_anew = teacher.examples
    teacher.examples = lambda _: pytest.fail("was there and whole")
    assert same()
    teacher.examples = made_anew
    for damaged in (whole[:-100], whole[:-50] + bytes([whole[-50] ^ 1]) + whole[-49:], b"", b"no header"):
        file.write_bytes(damaged)
        assert same()
        assert file.read_bytes() == whole
    file.unlink()
    assert Store(teacher, several, tmp_path, len(whole) // 2)[0]
    assert not list(tmp_path.glob("*.bin"))  # past the bound nothing is kept


def test_a_killed_generation_goes_on_to_the_same_answers(llm, answers, tmp_path) -> None:
    whole = answers.read_text()
    lines = whole.splitlines(keepends=True)
    assert [json.loads(line)["index"] for line in lines] == list(range(70))
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(lines[:64]) + lines[64][:37])  # the last line was being written
    assert len(read_answers(path, 320)) == 64
    make_answers(llm, PROMPTS, path, 16, lambda *_: None, TEMPERATURES)
    assert path.read_text() == whole
    with pytest.raises(ConfigError, match="other prompts"):
        make_answers(llm, PROMPTS[1:], path, 16, lambda *_: None, TEMPERATURES)
    path.write_text('{"index": 0}\n')
    with pytest.raises(ConfigError, match="line 1: not an answer"):
        read_answers(path, 320)
    path.write_text(lines[0])
    with pytest.raises(ConfigError, match="vocabulary of 50"):
        read_answers(path, 50)


def test_prompts_too_long_for_the_model_are_left_out(llm, tmp_path) -> None:
    path = tmp_path / "answers.jsonl"
    make_answers(llm, [Prompt("1", "a", "x" * 200), Prompt("2", "a", "y", raw=True)], path, 4, lambda *_: None)
    (line,) = map(json.loads, path.read_text().splitlines())
    assert line["index"] == 1
    assert line["tokens"][: line["n_prompt"]] == [ord("y")]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path, monkeypatch) -> None:
    write(tmp_path / "file", b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        write(tmp_path / "file", b"new")
    assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [("file", b"old")]


def test_the_vocabulary_is_what_is_said_most_and_what_must_be_there() -> None:
    said = [Answer(0, "t", 0.0, 2, (9, 9, 5, 5, 6)), Answer(1, "t", 0.0, 1, (9, 6, 5, 7))]
    assert vocabulary.choose(said, 4, 20, {17}).tolist() == [5, 6, 7, 17]
    assert vocabulary.choose(said, 5, 20, {17}).tolist() == [5, 6, 7, 9, 17]  # said in prompts only
    assert vocabulary.choose(said, 0, 20, ()).tolist() == list(range(20))
    assert vocabulary.coverage(said, torch.tensor([5, 6])) == pytest.approx(5 / 6)


def test_copies_of_a_prompt_are_held_out_together() -> None:
    answers = [Answer(i, "t", t, 2, (i, i + 1, 5)) for i in range(400) for t in (0.0, 1.0)]
    kept = {a.index for a in answers if held_out(a, 0.1)}
    assert 20 < len(kept) < 60
    assert all(held_out(a, 0.1) == (a.index in kept) for a in answers)
