"""The command line on a tiny checkpoint: what goes to which stream, strict JSON, exit codes, one-line errors, Ctrl-C."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from checkpoints import chain, path_law, tiny
from rich.console import Console
from typer.testing import CliRunner

from specdec.cli import app, render
from specdec.cli.chat import Conversation
from specdec.config import SamplingParams
from specdec.llm import LLM, Stream
from specdec.models.decoder import Decoder
from specdec.models.fingerprint import Fingerprint
from specdec.models.head_config import HeadConfig
from specdec.models.head_files import save_head
from specdec.models.heads import make_head
from specdec.results import Chunk

PROMPT = "tick tock tick tock"
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def run(folder: Path) -> Callable[..., Any]:
    """Run a command on the tiny model."""

    def run(command: str, *arguments: str, stdin: str | bytes | None = None) -> Any:
        return CliRunner().invoke(app, [command, *arguments, "--model", str(folder), "--precision", "fp32"], input=stdin)

    return run


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), precision="fp32", self_test=False)


def strict(text: str) -> Any:
    """JSON as the standard has it: one value, and neither NaN nor Infinity."""

    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def failure(result: Any, code: int = 2) -> str:
    """The one line of a failed command."""
    assert result.exit_code == code
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    (line,) = result.stderr.splitlines()
    return line


def test_help_does_not_load_torch() -> None:
    """Help must come at once."""
    code = "import sys, specdec.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_version() -> None:
    """Installed or not."""
    assert re.fullmatch(r"specdec \d+.*\n", CliRunner().invoke(app, ["--version"]).stdout)


def test_the_package_runs_as_a_module() -> None:
    """Where the script's folder is not on the path, ``python -m specdec`` is what people try."""
    done = subprocess.run([sys.executable, "-m", "specdec", "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"specdec \d+.*\n", done.stdout)


def test_every_verb_has_help() -> None:
    """Each command says what it does, and generate says when the chat template is used."""
    for verb in ("generate", "chat", "pull", "info", "bench"):
        result = CliRunner().invoke(app, [verb, "--help"])
        assert result.exit_code == 0
    words = " ".join(CliRunner(env={"COLUMNS": "200"}).invoke(app, ["generate", "--help"]).stdout.split())
    assert "--raw continues the text instead" in words
    assert "greedy" in words


def test_answer_and_summary_go_to_their_own_streams(run: Callable[..., Any], llm: LLM) -> None:
    """stdout holds the answer as the library gives it and nothing else; the summary is on stderr."""
    result = run("generate", PROMPT, "--raw", "--max-tokens", "12")
    (expected,) = llm.generate(PROMPT, GREEDY.replace(max_tokens=12))
    assert result.exit_code == 0
    assert result.stdout == expected.text + "\n"
    assert re.search(r"12 tokens in \d+ passes, \d\.\d\d per pass, [\d.]+ tokens/s", result.stderr)


def test_json_is_one_strict_object_with_everything(run: Callable[..., Any], llm: LLM) -> None:
    """Also with every sampling option, with log-probabilities, and with half characters in the text."""
    options = (
        "--temperature 1.5 --top-k 300 --top-p 0.99 --min-p 0.001 --repetition-penalty 1.1 --frequency-penalty 0.1 "
        "--presence-penalty 0.1 --logit-bias 65=-2 --logit-bias 66=1.5 --bad-word zz --bad-word yy "
        "--min-tokens 3 --max-tokens 20 --stop qqqq --stop rrrr --stop-token-id 300 --ignore-eos --seed 5 --logprobs 3"
    )
    result = run("generate", PROMPT, "--json", *options.split())
    assert result.exit_code == 0
    assert result.stderr == ""
    answer = strict(result.stdout)
    params = SamplingParams(
        temperature=1.5,
        top_k=300,
        top_p=0.99,
        min_p=0.001,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        logit_bias={65: -2.0, 66: 1.5},
        bad_words=("zz", "yy"),
        min_tokens=3,
        max_tokens=20,
        stop=("qqqq", "rrrr"),
        stop_token_ids=(300,),
        ignore_eos=True,
        seed=5,
        logprobs=3,
    )
    (expected,) = llm.chat([{"role": "user", "content": PROMPT}], params)
    assert (answer["text"], tuple(answer["tokens"]), answer["seed"]) == (expected.text, expected.tokens, 5)
    assert (answer["usage"], answer["finish_reason"], answer["error"]) == (expected.usage, expected.finish_reason, None)
    assert [entry["token"] for entry in answer["logprobs"]] == answer["tokens"]
    assert all(len(entry["top"]) == 3 for entry in answer["logprobs"])
    assert answer["precision"] == answer["kv_format"] == "fp32"
    assert answer["speculation"] == ["suffix", "recycling"]
    assert answer["exact"] is True
    assert answer["stats"]["tokens_per_pass"] == len(answer["tokens"]) / answer["stats"]["target_passes"]


@pytest.fixture(scope="module")
def head(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained head for the tiny model, that was never trained."""
    config = HeadConfig(
        kind="mtp", hidden_size=64, vocab_size=320, taps=(1,), n_heads=4, n_kv_heads=2, head_dim=16, ffn_size=96, depth=1
    )
    model = LLM(str(folder), precision="fp32", speculation="off", self_test=False).engine.model
    assert isinstance(model, Decoder)
    place, tau = tmp_path_factory.mktemp("head"), {"chat": 3.125, "code": 2.5}
    save_head(
        place,
        make_head(config),
        target=Fingerprint.of(model, "tiny"),
        provenance={"hours": 1.5, "command": "specdec train mtp"},
        measured={"tau": tau, "accuracy": [[0.5]]},
    )
    return place


def test_a_trained_drafter_runs_and_shows(run: Callable[..., Any], head: Path, llm: LLM) -> None:
    """It changes no token; --json names it, and info shows what it is, how it was made and its figures."""
    (expected,) = llm.generate(PROMPT, GREEDY)
    answer = strict(run("generate", PROMPT, "--raw", "--max-tokens", "8", "--json", "--drafter", str(head)).stdout)
    assert answer["speculation"] == ["suffix", "mtp", "recycling"]
    assert tuple(answer["tokens"]) == expected.tokens
    result = run("info", "--drafter", str(head))
    words = " ".join(result.stdout.split())
    assert result.exit_code == 0
    for part in (
        "mtp, ",
        "parameters",
        "drafts 320 tokens",
        "hours 1.5",
        "specdec train mtp",
        "tau chat 3.125",
        "tau code 2.5",
    ):
        assert part in words
    facts = strict(run("info", "--json", "--drafter", str(head)).stdout)
    assert facts["drafter"]["measured"]["accuracy"] == [[0.5]]
    assert strict(run("info", "--json").stdout)["drafter"] is None


def test_a_trained_drafter_that_is_not_there_is_one_line(run: Callable[..., Any], head: Path) -> None:
    """So is one that speculation leaves no place for."""
    assert "trained drafter: there is no model 'nothing'" in failure(run("generate", PROMPT, "--drafter", "nothing"))
    assert "has no effect unless" in failure(run("generate", PROMPT, "--drafter", str(head), "--speculation", "suffix"))
    assert "no trained drafter ships for this model" in failure(run("generate", PROMPT, "--speculation", "trained"))


def test_another_rule_of_acceptance_shows(run: Callable[..., Any], head: Path) -> None:
    """In the summary, in --json and in info; what is lossy says so. The default is not spoken of."""
    options = ("--raw", "--max-tokens", "8", "--ignore-eos", "-t", "1", "--seed", "1", "--speculation")
    result = run("generate", PROMPT, *options, "ngram", "--acceptance", "typical")
    assert result.exit_code == 0, result.output
    assert "accepted by typical (LOSSY)" in result.stderr
    drawn = (*options, "trained", "--drafter", str(head), "--acceptance", "traversal")
    answer = strict(run("generate", PROMPT, *drawn, "--json").stdout)
    for facts in (answer, answer["stats"]):
        assert (facts["acceptance"], facts["lossy"]) == ("traversal", False)
    assert answer["stats"]["drafted"] > 0
    assert answer["tokens"] == strict(run("generate", PROMPT, *drawn, "--json").stdout)["tokens"]
    assert "accepted by block" in run("info", "--speculation", "ngram", "--acceptance", "block").stdout
    assert "acceptance" not in strict(run("generate", PROMPT, *options, "ngram", "--json").stdout)["stats"]


def test_rules_that_cannot_keep_their_promise_are_refused_in_one_line(run: Callable[..., Any], head: Path) -> None:
    refused = failure(run("generate", PROMPT, "--drafter", str(head), "--acceptance", "rejection"))
    assert "cannot be merged with those of suffix, recycling" in refused
    assert "--speculation trained" in refused
    by_chance = ("--speculation", "ngram", "--acceptance", "block")
    assert "--compare asks for the tokens of plain decoding" in failure(
        run("generate", PROMPT, "--compare", "-t", "1", *by_chance)
    )
    assert run("generate", PROMPT, "--compare", "--max-tokens", "4", *by_chance).exit_code == 0
    assert "ask for temperature 0" in failure(run("generate", PROMPT, "-t", "1", "--acceptance", "greedy"))


def test_json_of_several_answers(run: Callable[..., Any]) -> None:
    """n answers are a list of n different ones; one seed gives all of them again."""
    first, second = (
        strict(run("generate", PROMPT, "--json", "--n", "3", "--seed", "7", "-t", "1", "--max-tokens", "9").stdout)
        for _ in "ab"
    )
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    assert texts == [choice["text"] for choice in second["choices"]]
    shown = run("generate", PROMPT, "--n", "3", "--seed", "7", "-t", "1", "--max-tokens", "9").stdout
    assert shown == "".join(f"[{i}] {text}\n" for i, text in enumerate(texts))


def test_logprobs_of_tokens_that_are_ruled_out_are_numbers(tmp_path: Path) -> None:
    """Minus infinity is no JSON: what top_k leaves out, and what the model gives no chance at all, are finite all the same."""
    folder = chain(tmp_path, path_law(range(6), 6), list("abcdef"))
    options = "--raw --json --precision fp32 -t 1 --top-k 1 --logprobs 5 --max-tokens 3"
    result = CliRunner().invoke(app, ["generate", "a", "-m", str(folder), *options.split()])
    entries = strict(result.stdout)["logprobs"]
    assert [entry["text"] for entry in entries] == ["b", "c", "d"]
    for entry in entries:
        values = [entry["logprob"], *(top["logprob"] for top in entry["top"])]
        assert len(values) == 6
        assert all(math.isfinite(value) for value in values)


WILD = ["a\tb\r", "\x0c\x07:warning:\x1b[1m", "[bold]\r\n\x00\u2028", "  end "]


@pytest.fixture(scope="module")
def wild(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """Arguments that make a model say everything that a terminal would take for a command, and what it says."""
    folder = chain(tmp_path_factory.mktemp("wild"), path_law(range(4), 4), WILD)
    arguments = [WILD[3], "--raw", "-m", str(folder), "--precision", "fp32", "--max-tokens", "9"]
    return arguments, "".join(WILD) * 2 + WILD[0]


def test_the_answer_on_stdout_is_the_model_s_text_byte_for_byte(wild: tuple[list[str], str]) -> None:
    """Tabs, carriage returns, control characters, markup and emoji names pass as they are, in one answer and in several."""
    arguments, text = wild
    result = CliRunner().invoke(app, ["generate", *arguments])
    assert result.stdout_bytes == text.encode() + b"\n"
    result = CliRunner().invoke(app, ["generate", *arguments, "--n", "2"])
    assert result.stdout_bytes == f"[0] {text}\n[1] {text}\n".encode()


def test_a_chat_answer_is_the_model_s_text_byte_for_byte(wild: tuple[list[str], str]) -> None:
    """The same in a chat from a pipe."""
    arguments, text = wild
    result = CliRunner().invoke(app, ["chat", *arguments[2:]], input=WILD[3] + "\n")
    assert result.stdout_bytes == text.encode() + b"\n"


def test_colours_leave_the_text_as_it_is() -> None:
    """Escape codes stand around each piece of text; taken out, they leave the text."""
    pieces = tuple((text, source) for text in [*WILD, ""] for source in (None, "suffix", "mine"))
    for style in ({"color_system": "truecolor"}, {"color_system": "standard", "no_color": True}):
        console = Console(file=io.StringIO(), force_terminal=True, **style)  # type: ignore[arg-type]
        render.print_chunk(console, Chunk(pieces, (), (), 0))
        written = console.file.getvalue()  # type: ignore[attr-defined]
        assert re.sub(r"\x1b\[(36|33|0)m", "", written) == "".join(text for text, _ in pieces)
        assert ("\x1b[36m" in written) != ("no_color" in style)


def test_emoji_names_in_notes_stay_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that quotes an input quotes it as it was."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    render.notes().print("error: :warning: [bold]")
    assert stream.getvalue() == "error: :warning: [bold]\n"


def test_prompts_come_from_argument_file_or_standard_input(run: Callable[..., Any], tmp_path: Path) -> None:
    """Four ways to say the same thing."""
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    answers = [
        run("generate", PROMPT, "--max-tokens", "6"),
        run("generate", "-", "--max-tokens", "6", stdin=PROMPT),
        run("generate", "--prompt-file", str(file), "--max-tokens", "6"),
        run("generate", "--prompt-file", "-", "--max-tokens", "6", stdin=PROMPT),
    ]
    assert [a.exit_code for a in answers] == [0] * 4
    assert len({a.stdout for a in answers}) == 1


def test_template_and_system_message(run: Callable[..., Any], llm: LLM) -> None:
    """The chat template lays the prompt out unless it is raw; a system message goes before it."""
    count = {
        flags: strict(run("generate", "hi", "--json", "--max-tokens", "1", *flags).stdout)["usage"]["prompt_tokens"]
        for flags in [(), ("--raw",), ("--system", "Be brief.")]
    }
    chat = llm.tokenizer.chat([{"role": "user", "content": "hi"}])
    both = llm.tokenizer.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    assert count == {(): len(chat), ("--raw",): 2, ("--system", "Be brief."): len(both)}


def test_compare_says_identical(run: Callable[..., Any]) -> None:
    """The same request without speculation: same tokens, exit code 0, both costs shown."""
    result = run("generate", PROMPT, "--compare", "--max-tokens", "24", "-t", "0.7", "--ignore-eos")
    assert result.exit_code == 0
    assert "identical: all 24 tokens" in result.stderr
    report = strict(run("generate", PROMPT, "--compare", "--json", "--n", "2", "-t", "1", "--max-tokens", "24").stdout)[
        "compare"
    ]
    assert report["identical"] is True
    assert report["first_difference"] is None
    assert report["plain_passes"] > 0


def test_compare_would_have_noticed(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Against another model's tokens the same command says where they differ and fails."""
    other = LLM(str(tiny(tmp_path, seed=1)), precision="fp32", self_test=False)
    monkeypatch.setattr(LLM, "without_speculation", lambda self: other)
    result = run("generate", PROMPT, "--compare", "--max-tokens", "24")
    assert result.exit_code == 1
    assert re.search(r"DIFFERENT from plain decoding at token \d+", result.stderr)
    assert strict(run("generate", PROMPT, "--compare", "--json", "--max-tokens", "24").stdout)["compare"]["identical"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([PROMPT, "--temperature", "-1"], "temperature must be"),
        ([PROMPT, "--speculation", "telepathy"], "speculation must be one of off, auto"),
        ([PROMPT, "--acceptance", "hope"], "acceptance must be one of coupled, greedy"),
        ([PROMPT, "--kv-format", "int3"], "kv_format must be one of auto, fp32, bf16, int8, int4"),
        ([PROMPT, "--max-nodes", "0"], "max_nodes must be"),
        ([PROMPT, "--logit-bias", "65:1"], "ID=VALUE"),
        ([PROMPT, "--logit-bias", "9999=1"], "vocabulary"),
        ([PROMPT, "--logprobs", "2"], "--json"),
        ([PROMPT, "--system", "x", "--raw"], "chat template"),
        ([PROMPT, "--prompt-file", "x"], "not both"),
        ([], "not both"),
        (["--prompt-file", "/nowhere/at/all"], "/nowhere/at/all"),
        (["x" * 300], "context of 256"),
        (["", "--raw"], "empty"),
        ([PROMPT, "--speculation", "auto,ngram"], "off and auto stand alone"),
        ([PROMPT, "--device", "gpu"], "device"),
        (["\udcff"], "lone surrogate at character 0"),
        (["\udcff", "--raw"], "lone surrogate at character 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run: Callable[..., Any], arguments: list[str], message: str) -> None:
    """No traceback, nothing on stdout."""
    assert message in failure(run("generate", *arguments))


def test_input_that_is_no_text_is_one_line_too(run: Callable[..., Any], tmp_path: Path) -> None:
    """Bytes that are no UTF-8, from wherever a prompt can come; the error names the place."""
    file, wrong = tmp_path / "prompt.txt", b"caf\xe9 \xff"
    file.write_bytes(wrong)
    assert f"{file} is not UTF-8" in failure(run("generate", "--prompt-file", str(file)))
    assert "standard input is not UTF-8" in failure(run("generate", "-", stdin=wrong))
    assert "standard input is not UTF-8" in failure(run("generate", "--prompt-file", "-", stdin=wrong))
    assert "standard input is not UTF-8" in failure(run("chat", stdin=wrong))
    assert str(tmp_path) in failure(run("generate", "--prompt-file", str(tmp_path)))


def test_unknown_models_are_one_line_too() -> None:
    """The error says what would work."""
    for verb in (["generate", "x", "-m"], ["chat", "-m"], ["info"], ["pull"]):
        assert "there is no model" in failure(CliRunner().invoke(app, [*verb, "/nowhere"], input=""))


def test_our_own_faults_are_not_disguised(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that no user can help keeps its traceback."""

    def broken(*_: object) -> NoReturn:
        raise ValueError("a bug")

    monkeypatch.setattr(LLM, "stream", broken)
    result = run("generate", PROMPT)
    assert isinstance(result.exception, ValueError)


def test_a_failed_sequence_is_told_and_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error inside a sequence is no success, in text or in JSON."""
    from specdec.acceptance import Acceptance
    from specdec.sampling import SamplingError

    def fail(*_: object, **__: object) -> NoReturn:
        raise SamplingError("logits are not finite")

    monkeypatch.setattr(Acceptance, "verdict", fail)
    folder = chain(tmp_path, path_law(range(3), 3), ["a", "b", "c"])
    arguments = ["generate", "a", "--raw", "-m", str(folder), "--precision", "fp32"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "error: logits are not finite" in result.stderr
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 1
    assert strict(result.stdout)["error"] == "logits are not finite"


def test_interrupting_a_command_is_exit_code_130(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C leaves without a traceback."""

    def press(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", press)
    result = run("generate", PROMPT)
    assert result.exit_code == 130
    assert "Traceback" not in result.stderr


def test_chat_from_a_pipe(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line is a message, earlier ones are remembered until /reset, blank lines are skipped, /quit ends."""
    asked: list[list[dict[str, str]]] = []
    stream = LLM.stream

    def record(self: LLM, messages: list[dict[str, str]], params: SamplingParams) -> Stream:
        asked.append(messages)
        return stream(self, messages, params)

    monkeypatch.setattr(LLM, "stream", record)
    lines = "one\n\ntwo\n/dance\n/reset\nthree\n/quit\nfour\n"
    result = run("chat", "--max-tokens", "5", "--system", "Be brief.", stdin=lines)
    assert result.exit_code == 0
    system = {"role": "system", "content": "Be brief."}
    first = [system, {"role": "user", "content": "one"}]
    assert asked[0] == first
    assert asked[1][:2] == first
    assert [m["role"] for m in asked[1][2:]] == ["assistant", "user"]
    assert asked[2:] == [[system, {"role": "user", "content": "three"}]]
    assert result.stdout.startswith(asked[1][2]["content"] + "\n")
    assert result.stderr.count("5 tokens in") == 3
    assert "unknown command /dance" in result.stderr


def test_a_message_that_does_not_fit_is_told_and_forgotten(run: Callable[..., Any]) -> None:
    """The conversation goes on without it."""
    result = run("chat", "--max-tokens", "3", stdin="x" * 400 + "\nhi\n")
    assert result.exit_code == 0
    assert "context of 256" in result.stderr
    assert result.stderr.count("3 tokens in") == 1


def test_interrupting_an_answer_stops_that_answer_only(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Ctrl-C in mid-answer: the pass ends, the sequence is freed, what was said is remembered, the next message is answered."""
    conversation = Conversation(llm, GREEDY.replace(ignore_eos=True, max_tokens=40), None)
    show, shown = render.print_chunk, []

    def press_at_the_third(console: Console, chunk: Chunk) -> None:
        shown.append(chunk.text)
        show(console, chunk)
        if len(shown) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(render, "print_chunk", press_at_the_third)
    before = signal.getsignal(signal.SIGINT)
    conversation._answer("hi")
    assert len(shown) == 3
    assert conversation._messages[-1] == {"role": "assistant", "content": "".join(shown)}
    assert not llm.engine.has_work
    assert signal.getsignal(signal.SIGINT) == before
    conversation._answer("again")
    captured = capsys.readouterr()
    assert "stopped" in captured.err
    assert "40 tokens in" in captured.err


@pytest.mark.parametrize("error", [KeyboardInterrupt, EOFError])
def test_interrupting_the_prompt_ends_cleanly(llm: LLM, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    """Ctrl-C or Ctrl-D at the prompt is the end of the conversation, not an error."""

    def press(prompt: str) -> NoReturn:
        raise error

    monkeypatch.setattr("builtins.input", press)
    Conversation(llm, GREEDY, None).run(interactive=True)


def test_colours_name_the_drafter_of_each_piece() -> None:
    """On a terminal accepted drafts stand out, and the legend explains it; in a pipe there are no escapes at all."""
    chunk = Chunk((("a[b]", None), ("c", "suffix"), ("d", "ngram"), ("e", "mine")), (1, 2, 3, 4), (None,) * 4, 0)
    for terminal, text in ((True, "a[b]\x1b[36mc\x1b[0m\x1b[32md\x1b[0m\x1b[33me\x1b[0m"), (False, "a[b]cde")):
        console = Console(
            file=io.StringIO(), force_terminal=terminal, color_system="standard" if terminal else None, markup=False
        )
        render.print_chunk(console, chunk)
        assert console.file.getvalue() == text  # type: ignore[attr-defined]
    assert "suffix" in render.legend(["suffix", "ngram"]).plain


def test_info_tells_what_would_run(run: Callable[..., Any], folder: Path) -> None:
    """For people and for programs."""
    facts = strict(run("info", "--json").stdout)
    assert facts["precision"] == "fp32"
    assert facts["invariance"]["exact"] is True
    assert facts["weights_bytes"] > 0
    assert facts["pool_tokens"] >= facts["context"] == 256
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["info", str(folder), "--speculation", "off"])
    assert result.exit_code == 0
    assert re.search(r"speculation +off", result.stdout)
    assert re.search(r"exactness +rows are bitwise independent", result.stdout)


def test_info_shows_one_model(run: Callable[..., Any], folder: Path) -> None:
    """Two names that differ are an error, not a choice; the same name twice is none."""
    assert "two models are given" in failure(run("info", "another"))
    assert run("info", str(folder)).exit_code == 0


def test_pull_prints_where_a_model_lies(folder: Path) -> None:
    """The one line that scripts want."""
    result = CliRunner().invoke(app, ["pull", str(folder)])
    assert (result.exit_code, result.stdout) == (0, f"{folder}\n")


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """--threads is a setting of the whole process."""
    import torch

    from specdec import kernels

    before = torch.get_num_threads()
    yield
    kernels.set_threads(before)
