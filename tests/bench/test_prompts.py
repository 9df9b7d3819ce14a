"""Files of prompts: what is read, in which layouts, and what a bad line is told."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from pathlib import Path

import pytest

from specdec.bench import prompts
from specdec.bench.prompts import Prompt
from specdec.config import ConfigError


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_our_own_prompts() -> None:
    """Six tasks, four prompts each, no two alike: figures by task need all of them."""
    own = prompts.load(prompts.DEFAULT)
    tasks = ["chat", "code", "maths", "summarise", "question", "translate"]
    assert Counter(prompt.task for prompt in own) == dict.fromkeys(tasks, 4)
    assert len({prompt.request for prompt in own}) == 24


def test_layouts(tmp_path: Path) -> None:
    """A prompt, a conversation, HumanEval's layout; ids and tasks where given, empty lines skipped, other keys ignored."""
    path = written(
        tmp_path,
        '{"prompt": "Hello", "id": "a", "task": "chat", "more": 1}',
        "",
        '{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]}',
        '{"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "pass"}',
        '{"prompt": "x", "id": 7}',
        '{"turns": ["one", "two"]}',
        '{"text": "once"}',
    )
    assert prompts.load(path) == [
        Prompt("a", "chat", "Hello"),
        Prompt("line 3", "other", ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"})),
        Prompt("HumanEval/0", "code", "def f():"),
        Prompt("7", "other", "x"),
        Prompt("line 6", "other", "one"),
        Prompt("line 7", "other", "once", raw=True),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON object is expected"),
        ('{"said": "x"}', "one of prompt, messages, turns and text is needed, got the keys said"),
        ('{"prompt": "x", "messages": []}', "one of prompt, messages, turns and text is needed"),
        ('{"prompt": " "}', "prompt must be text that is not empty"),
        ('{"prompt": ["x"]}', "prompt must be text"),
        ('{"turns": []}', "turns must be text"),
        ('{"messages": []}', "messages must be a list of objects"),
        ('{"messages": [{"role": "user"}]}', "messages must be a list of objects"),
        ('{"prompt": "x", "task": 3}', "task must be text"),
        ('{"prompt": "x", "task": "all"}', "stands for the total"),
        ('{"prompt": "x", "id": true}', "id must be text"),
        ('{"prompt": "x", "id": "first"}', "the id 'first' is taken by an earlier line"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    """File, line and what is wrong; nothing is skipped in silence."""
    path = written(tmp_path, '{"prompt": "fine", "id": "first"}', line)
    with pytest.raises(
        ConfigError, match=re.escape(f"{path}: 1 of 2 lines cannot be used: line 2: ") + ".*" + re.escape(message)
    ):
        prompts.load(path)


def test_all_bad_lines_are_counted_and_five_named(tmp_path: Path) -> None:
    """Who has a large file to mend learns of more than the first fault."""
    path = written(tmp_path, '{"prompt": "fine"}', *["[1]"] * 6)
    with pytest.raises(ConfigError, match=r"6 of 7 lines .* line 2: .*; line 6: .*; and 1 more$"):
        prompts.load(path)


def test_no_prompts_and_no_text(tmp_path: Path) -> None:
    """An empty file, and one that is no text, are errors too."""
    with pytest.raises(ConfigError, match="holds no prompts"):
        prompts.load(written(tmp_path, ""))
    (tmp_path / "prompts.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        prompts.load(tmp_path / "prompts.jsonl")


def test_selection() -> None:
    """A limit takes from all tasks in turn and keeps the file's order; a task that is not there is an error."""
    some = [Prompt(f"{task}-{i}", task, "x") for task in ("chat", "code") for i in (1, 2, 3)]

    def ids(tasks: list[str], limit: int | None) -> list[str]:
        return [prompt.id for prompt in prompts.select(some, tasks, limit)]

    assert ids([], None) == [prompt.id for prompt in some]
    assert ids([], 3) == ["chat-1", "chat-2", "code-1"]
    assert ids(["code"], 2) == ["code-1", "code-2"]
    with pytest.raises(ConfigError, match="no prompt has the task 'cooking'; there are chat, code"):
        ids(["cooking"], None)
    with pytest.raises(ConfigError, match="limit must be"):
        ids([], 0)


def test_the_digest_is_of_what_is_asked() -> None:
    """Another word or another order is another set; where it was read from does not matter."""
    a, b = Prompt("1", "chat", "x"), Prompt("2", "chat", "y")
    assert prompts.digest([a, b]) == prompts.digest([Prompt("1", "chat", "x"), b])
    assert len({prompts.digest(some) for some in ([a, b], [b, a], [a], [a, Prompt("2", "chat", "z")])}) == 4


def test_compressed(tmp_path: Path) -> None:
    """HumanEval is handed out that way; half a file is told so."""
    whole = gzip.compress(b'{"task_id": "HumanEval/0", "prompt": "def f():"}\n')
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(whole)
    assert prompts.load(path) == [Prompt("HumanEval/0", "code", "def f():")]
    for broken in (whole[:-6], b"no gzip"):
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match=r"HumanEval\.jsonl\.gz is not a whole gzip file"):
            prompts.load(path)
