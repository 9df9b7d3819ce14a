"""``specdec roofline`` and ``specdec plan`` as a user meets them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny, tiny_config
from test_planning import measured
from typer.testing import CliRunner

from specdec.bench import roofline
from specdec.bench.result import save
from specdec.cli import app
from specdec.config import ConfigError
from specdec.llm import LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def saved(folder: Path) -> Path:
    """A result of the tiny model."""
    path = folder / "roofline.json"
    result = run("roofline", "--model", str(folder), "--precision", "fp32", "--json", str(path))
    assert result.exit_code == 0, result.output
    return path


def run(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, list(arguments))


def refused(*arguments: str) -> str:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    return line


def test_the_sizes_of_a_model_are_those_of_its_tensors(folder: Path) -> None:
    """Every weight of a product once; an embedding that is not the output matrix is looked up and not multiplied."""
    llm = LLM(str(folder), precision="fp32", speculation="off", self_test=False)
    sizes = roofline.sizes_of(llm.engine.model)
    a = tiny_config()
    d, ffn, q, kv = a["hidden_size"], a["intermediate_size"], 4 * 16, 2 * 16
    assert sizes.layer_weights == 2 * (d * (q + 2 * kv) + q * d + 3 * d * ffn)
    assert sizes.head_weights == 320 * d
    assert sizes.weight_bytes == 4 * (sizes.layer_weights + sizes.head_weights)
    assert sizes.kv_bytes == 2 * 2 * 2 * 16 * 4


def test_roofline_end_to_end(saved: Path) -> None:
    """Measured, saved, read back and shown again; what is derived agrees with what was measured."""
    result = run("roofline", "--from", str(saved))
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    for word in ("memory", "ridge", "decode", "verify", "prefill", "v(M)", "nearly free:"):
        assert word in result.stdout
    read = roofline.load(saved)
    kinds = [(one.kind, one.rows) for one in read.passes]
    assert kinds[:2] == [("decode", 1), ("verify", 2)]
    assert ("prefill", 128) in kinds
    assert str(saved.parent) not in saved.read_text()
    for one in read.passes:
        assert one.rate <= read.machine.roof(one.intensity) * one.share(read.machine) * 1.001
    costs = read.costs
    assert costs.seconds(read.nearly_free) <= 1.2 * costs.seconds(1) * 1.001
    if read.nearly_free < 1_000_000:  # which stands for any number, on a machine where no size that was measured costs more
        assert costs.seconds(read.nearly_free + 1) > 1.2 * costs.seconds(1) * 0.999


@pytest.mark.parametrize("text", ["", "{", "[]", '{"layout": "other"}', '{"layout": "specdec roofline 1"}', "null"])
def test_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no result of specdec roofline"):
        roofline.load(path)


def test_the_textbook_on_the_command_line(tmp_path: Path) -> None:
    result = run("plan", "--alpha", "0.8", "--gamma", "5", "--cost", "0.05", "--json", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.output
    assert "5 drafted: 3.69 tokens a pass, 2.95 times the speed" in result.stdout
    assert "rows are free" in result.stdout
    facts = json.loads((tmp_path / "plan.json").read_text())
    assert round(facts["chains"][5]["speedup"], 2) == 2.95
    assert facts["best"]["depth"] == 8
    assert facts["prices"]["v"] is None


def test_a_plan_from_results(saved: Path, tmp_path: Path) -> None:
    """Acceptance from a bench, costs from it or from a roofline; the plan stands beside what was measured."""
    save(measured(), tmp_path / "bench.json")
    result = run("plan", "--bench", str(tmp_path / "bench.json"), "--json", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "drafting stops paying at" in result.stdout
    assert "speed-up planned" in result.stdout
    facts = json.loads((tmp_path / "plan.json").read_text())
    assert facts["prices"]["v"] == {"1": 1.0, "2": 1.2, "3": 1.5}
    assert facts["checked"][0]["measured"] == pytest.approx(10 / 7)
    run("plan", "--bench", str(tmp_path / "bench.json"), "--roofline", str(saved), "--json", str(tmp_path / "plan.json"))
    facts = json.loads((tmp_path / "plan.json").read_text())
    assert facts["prices"]["v"] == {str(m): v for m, v in roofline.load(saved).costs.relative().items()}


def test_a_plan_with_a_tree_and_costs_measured_now(folder: Path) -> None:
    """Further candidates behind a plus; the tree is drawn."""
    target = "--measure", "--model", str(folder), "--precision", "fp32"
    result = run("plan", "--acceptance", "0.4+0.3,0.5+0.2", "--budget", "4", *target)
    assert result.exit_code == 0, result.output
    assert "best tree:" in result.stdout
    result = run("plan", "--acceptance", "0.4+0.3,0.5+0.2", "--budget", "4", "--v", "1:1,8:1.01")
    assert "best tree: 4 nodes, 2.05 tokens a pass" in result.stdout
    assert "candidate 2" in result.stdout


def test_memory_alone(folder: Path) -> None:
    result = run("plan", "--kv", str(folder), "--tokens", "1024", "--kv-format", "fp32", "--batch", "1,4")
    assert result.exit_code == 0, result.output
    assert "512 bytes a token, 2 query heads to a key head" in result.stdout
    assert "2.0 MiB" in result.stdout


@pytest.mark.parametrize("name", ["roof.png", "roof.svg"])
def test_plots(saved: Path, tmp_path: Path, name: str) -> None:
    """The same result gives the same picture, byte for byte."""
    pytest.importorskip("matplotlib")
    save(measured(), tmp_path / "bench.json")
    for number in ("1", "2"):
        (tmp_path / number).mkdir()
        assert run("roofline", "--from", str(saved), "--plot", str(tmp_path / number / name)).exit_code == 0
        plot = str(tmp_path / number / f"plan-{name}")
        assert run("plan", "--bench", str(tmp_path / "bench.json"), "--plot", plot).exit_code == 0
    for made in (name, f"plan-{name}"):
        one, two = ((tmp_path / number / made).read_bytes() for number in ("1", "2"))
        assert one == two
        assert one[:4] == (b"\x89PNG" if name.endswith("png") else b"<?xm")


def test_without_matplotlib(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is measured, with what to do."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for command in (("roofline", "--from", str(saved)), ("plan", "--alpha", "0.5")):
        assert "pip install 'specdec[bench]'" in refused(*command, "--plot", str(tmp_path / "x.svg"))


@pytest.mark.parametrize(("arguments", "message"), [
    ("plan", "nothing to plan"),
    ("plan --alpha 1.5", "--alpha must be in [0, 1]"),
    ("plan --alpha 0.5 --acceptance 0.5", "--alpha and --acceptance contradict"),
    ("plan --alpha 0.5 --gamma 17", "--gamma must be in [0, 16]"),
    ("plan --alpha 0.5 --gamma -1", "--gamma must be in [0, 16]"),
    ("plan --acceptance 0.5 --gamma 1", "--gamma has no effect without --alpha"),
    ("plan --acceptance 0.5,x", "--acceptance needs numbers"),
    ("plan --acceptance 0.5+0.6", "depth 1 must be shares"),
    ("plan --alpha 0.5 --cost -1", "--cost must be in"),
    ("plan --alpha 0.5 --v 1:0", "--v needs rows and costs"),
    ("plan --alpha 0.5 --v nan", "--v needs rows and costs"),
    ("plan --alpha 0.5 --v 1:1 --measure", "--v and --measure contradict"),
    ("plan --alpha 0.5 --threads 2", "--threads has no effect without --measure"),
    ("plan --alpha 0.5 --task chat", "--task has no effect without --bench"),
    ("plan --alpha 0.5 --tokens 8", "--tokens has no effect without --kv"),
    ("plan --alpha 0.5 --batch 0", "--batch needs numbers"),
    ("plan --alpha 0.5 --plot x.pdf", "--plot must end in .png or .svg"),
    ("plan --alpha 0.5 --json no/such/x.json", "--json: the folder no/such does not exist"),
    ("plan --kv no-such-model", "no model"),
    ("plan --kv no-such-model --v 1:1", "--v has no effect without"),
    ("roofline --from x.json --threads 2", "--threads has no effect beside --from"),
    ("roofline --from no-such.json", "no-such.json"),
])  # fmt: skip
def test_refusals(arguments: str, message: str) -> None:
    """One line that names what is wrong; nothing is left without effect in silence."""
    assert message in refused(*arguments.split())


def test_a_model_whose_products_cannot_be_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.testing import TableModel

    llm = LLM(str(folder), precision="fp32", speculation="off", self_test=False)
    monkeypatch.setattr(llm.engine, "model", TableModel(torch.zeros(4, 4), 64))
    with pytest.raises(ConfigError, match="TableModel is none"):
        roofline.measure_roofline(llm)
