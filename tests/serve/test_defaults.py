"""What a model's generation_config.json asks for holds for requests that say nothing themselves, in the server as on the
command line; the library takes it when it is given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import tiny
from serving import ROUTES, Running, asking, one_of, serving
from typer.testing import CliRunner

from specdec.cli import app
from specdec.config import SamplingParams
from specdec.llm import LLM
from specdec.models.generation_config import FILE

SAYS = {"do_sample": True, "temperature": 0.7, "top_k": 3, "repetition_penalty": 1.3, "max_new_tokens": 12}
DEFAULTS = {"temperature": 0.7, "top_k": 3, "repetition_penalty": 1.3, "max_tokens": 12}
TEXT = "tick tock tick tock"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY, whose makers recommend something."""
    folder = tiny(tmp_path_factory.mktemp("recommended"))
    path = folder / FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | SAYS))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with serving(LLM(str(folder), precision="fp32", self_test=False)) as running:
        yield running


@pytest.mark.parametrize("route", ROUTES)
def test_a_silent_request_gets_the_defaults(server: Running, tiny_server: Running, route: str) -> None:
    """The tokens are those of a server without defaults that is asked for the same by name; each field is for a request to
    change, and null is silence."""
    body = asking(route, TEXT, seed=3, return_token_ids=True, ignore_eos=True)
    silent = one_of(server.ask(route, **body))
    assert silent == one_of(tiny_server.ask(route, **body, **DEFAULTS))
    assert silent == one_of(server.ask(route, **body, temperature=None, top_k=None, max_tokens=None))
    assert len(silent["token_ids"]) == 12
    for changed in ({"temperature": 0}, {"top_k": 0}, {"repetition_penalty": 1.0}, {"max_tokens": 20}):
        answer = one_of(server.ask(route, **body, **changed))
        assert answer == one_of(tiny_server.ask(route, **body, **DEFAULTS | changed))
        assert answer != silent, changed


def test_what_is_in_force_is_shown(server: Running, tiny_server: Running) -> None:
    (model,) = server.http.get("/v1/models").json()["data"]
    assert model["default_sampling_params"] == DEFAULTS
    (model,) = tiny_server.http.get("/v1/models").json()["data"]
    assert model["default_sampling_params"] == {}


def test_the_library_takes_what_it_is_given(server: Running, folder: Path) -> None:
    """Nothing by itself; the defaults are there to be given, and an engine without speculation has the same."""
    llm = server.llm
    assert llm.get_default_sampling_params() == SamplingParams(**DEFAULTS)  # type: ignore[arg-type]
    assert llm.without_speculation().get_default_sampling_params() == llm.get_default_sampling_params()
    without = LLM(str(folder), precision="fp32", self_test=False, generation_config="none")
    assert without.get_default_sampling_params() == SamplingParams()


def test_another_folder_ends_answers_too(folder: Path, tmp_path: Path) -> None:
    """A chat template may end turns by a token of which the model's own files know nothing."""
    (tmp_path / FILE).write_text('{"temperature": 0, "eos_token_id": [5, 6]}')
    llm = LLM(str(folder), precision="fp32", self_test=False, generation_config=tmp_path)
    assert llm.end_tokens > {5, 6}
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0)


def test_the_command_line(folder: Path) -> None:
    """Greedy unless the file or an option says otherwise; none switches the file off; info shows what is in force."""

    def run(*arguments: str) -> dict:
        result = CliRunner().invoke(app, [*arguments, "--model", str(folder), "--precision", "fp32", "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def tokens(*options: str) -> list[int]:
        return run("generate", TEXT, "--raw", "--seed", "3", "--ignore-eos", *options)["tokens"]

    off = ("--generation-config", "none")
    named = ("--temperature", "0.7", "--top-k", "3", "--repetition-penalty", "1.3", "--max-tokens", "12")
    assert tokens() == tokens(*off, *named)
    assert tokens("--temperature", "0", "--repetition-penalty", "1") == tokens(*off, "--max-tokens", "12")
    assert run("info")["generation_defaults"] == DEFAULTS
    assert run("info", *off)["generation_defaults"] == {}


def test_a_bad_file_is_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.serve.logs.configure", lambda form: None)  # this process keeps its own
    (tmp_path / FILE).write_text('{"top_p": 7}')
    for command in (["generate", "x"], ["chat"], ["info"], ["serve", "--port", "0"]):
        result = CliRunner().invoke(app, [*command, "--model", str(folder), "--generation-config", str(tmp_path)])
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert f"{tmp_path / FILE}: top_p must be in (0, 1], got 7" in line
