"""The comparison with other engines: what is said to workers, in which order, how it is counted, and what a failure costs."""

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import asked
import engines
import install
import pytest
import run
import workers
from asked import Asked
from engines import EngineKind
from protocol import Request
from run import Comparison, Plan
from workers import UnavailableError, Worker, WorkerError

from specdec.bench.result import Report, load, save
from specdec.bench.summary import summarise

FAKE = Path(__file__).with_name("fake_worker.py")
SOURCES = str(Path(run.__file__).parent)
PLAN = Plan(max_tokens=20, repeats=2, pause=0.0, prompt_processing=30, prompt_repeats=3)
PROMPTS = [Asked("a", "chat", "Hello", [1, 2, 3]), Asked("b", "code", "def", [4, 5])]


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Starts fake workers, and ends them after the test."""
    monkeypatch.setenv("PYTHONPATH", SOURCES)
    started = []

    def start(name="fake", **script):
        started.append(Worker(name, command(name, **script), tmp_path / f"{name}.log"))
        return started[-1]

    yield start
    for each in started:
        each.close()


def command(name, **script):
    script = json.dumps({"name": name, **script})
    return [sys.executable, str(FAKE), "--model", script, "--threads", "2", "--end-tokens", "0", "2"]


def comparison(*started, plan=PLAN):
    return Comparison({f"engine {i}": each for i, each in enumerate(started)}, plan, [])


def alive(pid):
    """Whether a process still runs; one that has ended may wait for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def gone(pid):
    """Whether a process ends soon: one that is killed may still be seen for a moment."""
    end = time.monotonic() + 10
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def requests(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_worker_answers_and_its_prints_do_not_mix_with_answers(worker):
    fake = worker()
    assert fake.modes == ["plain", "fast"]
    assert fake.versions == {
        "fake": "1",
        "threads": "2",
        "speed, plain": "plain",
        "speed, fast": "fast",
        "environment": "2 threads",
    }
    answer = fake.ask(Request("a", "Hello", [1, 2, 3], 5, "plain"))
    assert answer == {"id": "a", "tokens": [7] * 5, "seconds": 0.05, "first_token_seconds": 0.01, "text": "Hello"}


def test_engines_take_turns_prompt_by_prompt_and_every_second_turn_backwards(worker, tmp_path):
    log = tmp_path / "order"
    log.touch()
    both = comparison(worker("one", log=str(log)), worker("two", log=str(log)))
    both.measure(PROMPTS, lambda timing: None)
    forwards = [("one", "plain"), ("one", "fast"), ("two", "plain"), ("two", "fast")]
    expected = [(*pair, prompt) for order in (forwards, forwards[::-1]) for prompt in "ab" for pair in order]
    assert [tuple(request[:3]) for request in requests(log)] == expected
    assert {request[3] for request in requests(log)} == {20}
    assert [run.turn for run in both.runs] == [0] * 8 + [1] * 8


def test_each_mode_is_a_process_of_its_own_that_ends_with_the_worker(worker, tmp_path):
    """Two engines in one process share threads, which halved llama.cpp's speed."""
    log = tmp_path / "processes"
    log.touch()
    fake = worker("one", log=str(log))
    for mode in ("plain", "fast", "plain"):
        fake.ask(Request("a", "Hello", [1, 2, 3], 5, mode))
    plain, fast, again = (request[5] for request in requests(log))
    assert plain == again != fast
    fake.close()
    assert gone(plain)
    assert gone(fast)


def test_a_hanging_mode_ends_with_its_worker(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "ANSWER_SECONDS", 3.0)
    log = tmp_path / "processes"
    log.touch()
    fake = worker("one", log=str(log), hangs_at="a")
    with pytest.raises(WorkerError, match="said nothing for 3 s"):
        fake.ask(Request("a", "Hello", [1, 2, 3], 5, "fast"))
    (hanging,) = (request[5] for request in requests(log))
    fake.close()
    assert gone(hanging)


def test_a_pause_precedes_every_request(worker, tmp_path):
    log = tmp_path / "times"
    log.touch()
    one = comparison(worker("one", log=str(log)), plan=dataclasses.replace(PLAN, pause=0.05, repeats=1))
    one.measure(PROMPTS, lambda timing: None)
    times = [request[4] for request in requests(log)]
    assert min(after - before for before, after in itertools.pairwise(times)) >= 0.05


def test_the_counts_are_tokens_over_seconds_and_decoding_leaves_out_the_first(worker):
    one = comparison(worker())
    one.measure(PROMPTS, lambda timing: None)
    rows = {(row.mode, row.task): row for row in summarise(one.runs, one.modes)}
    plain, fast = rows["engine 0 plain", "all"], rows["engine 0 fast", "all"]
    assert (plain.prompts, rows["engine 0 plain", "chat"].prompts) == (2, 1)
    assert plain.tokens_per_second == pytest.approx(2 * 20 / 0.4)
    assert plain.decode_tokens_per_second == pytest.approx(2 * 19 / (0.4 - 0.02))
    assert fast.tokens_per_second == pytest.approx(200)
    assert plain.first_token_seconds == pytest.approx(0.01)


def test_prompts_are_timed_to_one_token_in_each_engines_first_mode(worker, tmp_path):
    log = tmp_path / "order"
    log.touch()
    both = comparison(worker("one", log=str(log)), worker("two", log=str(log)))
    both.measure_prompts([Asked(f"long-{i}", "", "", list(range(30))) for i in range(3)])
    assert [(name, mode, n) for name, mode, _, n, *_ in requests(log)] == [
        (name, "plain", 1) for name in ("one", "two", "two", "one", "one", "two")
    ]
    assert [(row.mode, row.prompt_tokens) for row in both.prompt_processing] == [("engine 0 plain", 30), ("engine 1 plain", 30)]
    assert both.prompt_processing[0].tokens_per_second == pytest.approx(30 / 0.01)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ({"dies_at": "b"}, r"ended with status 3 at prompt b \(plain\); its last words: .*out of luck"),
        ({"fails_at": "b"}, r"answered an error at prompt b \(plain\): ValueError: that prompt again"),
        ({"silent_at": "b"}, r"gave no answer at prompt b \(plain\)"),
        ({"hangs_at": "b"}, r"said nothing for 3 s at prompt b \(plain\)"),
    ],
)
def test_an_engine_that_fails_is_named_and_the_others_go_on(worker, monkeypatch, script, said):
    if "hangs_at" in script:
        monkeypatch.setattr(workers, "ANSWER_SECONDS", 3.0)
    both = comparison(worker("bad", **script), worker("good"))
    both.measure(PROMPTS, lambda timing: None)
    both.measure_prompts(PROMPTS[:1])
    (skip,) = both.skipped
    assert skip["engine"] == "engine 0"
    assert re.search(said, skip["reason"])
    assert both.modes == ["engine 1 plain", "engine 1 fast"]
    assert len(both.runs) == 8
    assert {run.mode for run in both.runs} == set(both.modes)
    assert [row.mode for row in both.prompt_processing] == ["engine 1 plain"]


def test_a_worker_that_cannot_run_here_gives_its_own_reason(worker, tmp_path):
    with pytest.raises(UnavailableError, match="needs another processor"):
        worker(skipped="needs another processor")
    with pytest.raises(WorkerError, match=r"fake ended with status 2 while it was loading; its last words: .*--threads"):
        Worker("fake", [sys.executable, str(FAKE), "--model", "{}"], tmp_path / "log")


def test_start_lists_what_cannot_be_started(worker, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_PEERS", str(tmp_path / "peers"))
    here = EngineKind("here", "Here", reads_gguf=True, own_environment=False)
    refusing = EngineKind("refusing", "Refusing", reads_gguf=True, own_environment=False)
    absent = EngineKind("absent", "Absent", reads_gguf=True)
    failed = EngineKind("failed", "Failed", reads_gguf=True)
    failed.environment.mkdir(parents=True)
    (failed.environment / engines.UNAVAILABLE).write_text("could not be installed: no wheel\n")
    scripts = {"here": {}, "refusing": {"skipped": "no"}}
    found, skipped = run.start(
        [here, absent, refusing, failed], lambda kind: command(kind.name, **scripts[kind.name]), tmp_path / "logs"
    )
    found["Here"].close()
    assert list(found) == ["Here"]
    assert skipped == [
        {"engine": "Absent", "reason": 'not installed: run make peers ENGINES="absent"'},
        {"engine": "Refusing", "reason": "no"},
        {"engine": "Failed", "reason": "could not be installed: no wheel"},
    ]


def test_results_keep_what_was_skipped_and_the_prompts(worker, tmp_path):
    one = comparison(worker())
    one.skipped.append({"engine": "Absent", "reason": "not installed"})
    one.measure(PROMPTS, lambda timing: None)
    one.measure_prompts(PROMPTS[:1])
    report = Report(
        provenance={},
        settings={},
        modes=tuple(one.modes),
        runs=tuple(one.runs),
        v={},
        summary=tuple(summarise(one.runs, one.modes)),
        peak_memory_bytes=None,
        prompt_processing=tuple(dataclasses.asdict(row) for row in one.prompt_processing),
        skipped=tuple(one.skipped),
    )
    save(report, tmp_path / "result.json")
    again = load(tmp_path / "result.json")
    assert again.skipped == report.skipped
    assert again.prompt_processing == (
        {"mode": "engine 0 plain", "prompt_tokens": 3, "seconds": 0.01, "tokens_per_second": 300.0},
    )


class Words:
    """A tokenizer whose tokens are words."""

    def decode(self, ids, *, skip_special):
        return " ".join(map(str, ids))


def test_long_prompts_have_the_length_asked_for_and_different_beginnings():
    long = asked.long_prompts(PROMPTS, Words(), 8, 3)
    assert [prompt.token_ids for prompt in long] == [
        [1, 2, 3, 4, 5, 1, 2, 3],
        [4, 5, 1, 2, 3, 4, 5, 1],
        [1, 2, 3, 4, 5, 1, 2, 3],
    ]


def test_install_makes_an_environment_once_and_names_what_cannot_be_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_PEERS", str(tmp_path))
    requirements = tmp_path / "requirements.txt"
    monkeypatch.setattr(EngineKind, "requirements", property(lambda kind: requirements))
    kind = EngineKind("nothing", "Nothing", reads_gguf=True)
    requirements.write_text("\n")
    assert install.install(kind) == "installed"
    assert engines.missing(kind) is None
    assert subprocess.run([kind.python, "-c", "pass"], check=False).returncode == 0
    assert install.install(kind) == "installed already"
    requirements.write_text(f"{tmp_path}/absent.whl\n")
    kept = shutil.copytree(kind.environment, tmp_path / "kept", symlinks=True)
    (kept / install.STAMP).unlink()

    def instead_of_another(command, **settings):
        if command[1:3] != ["-m", "venv"]:
            return run_program(command, **settings)
        shutil.move(kept, command[3])  # it takes seconds to make one, and this one has not been used
        return subprocess.CompletedProcess(command, 0)

    run_program = subprocess.run
    monkeypatch.setattr(install.subprocess, "run", instead_of_another)
    reason = install.install(kind)
    assert reason.startswith("could not be installed: ERROR:")
    assert "absent.whl" in reason
    assert engines.missing(kind) == reason
