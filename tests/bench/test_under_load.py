"""Servers under load: whose turn it is, what is counted, and that whoever fails is named with the reason."""

import json
import re
import socket
import sys
import time
from pathlib import Path

import pytest
import run
from asked import Asked
from listening import Listener
from server_process import Server, ServerError
from under_load import Comparison, free_port, summarise

FAKE = Path(__file__).with_name("fake_peer.py")
PROMPTS = [Asked("a", "chat", "Hello", [1, 2, 3]), Asked("b", "code", "def", [4, 5])]
WARM_UP = 4
"""Tokens that servers are asked for before their turns."""


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Starts fake servers, and ends them after the test."""
    monkeypatch.setenv("PYTHONPATH", str(Path(run.__file__).parent))
    started = []

    def start(**script):
        port = free_port()
        command = [sys.executable, str(FAKE), "--model", json.dumps(script), "--threads", "1", "--port", str(port)]
        started.append(Server([*command, "--slots", "4"], port, tmp_path / f"{port}.log", seconds=60))
        return started[-1]

    yield start
    for each in started:
        each.close()


def halted(server):
    """Whether a server is halted, or soon will be: signals take a moment."""
    end = time.monotonic() + 20
    while Path(f"/proc/{server._process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_a_server_runs_in_its_turns_and_is_halted_between_them(server):
    one = server()
    assert halted(one)
    with one:
        assert one.answer({"prompt": [1, 2, 3], "max_tokens": 8})[0] == 3
    assert halted(one)
    one.close()
    assert one._process.returncode is not None


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ({"dies_at": 8}, "it ended with status 3; its last words: no more memory"),
        ({"fails_at": 8}, "it answered 500: .*ValueError: this one not"),
    ],
)
def test_a_server_that_fails_is_named_and_what_it_did_before_stays(server, script, said):
    both = Comparison({"good": server(), "bad": server(**script)}, [], [])
    told = []
    both.measure(PROMPTS, [(1, 1), (2, 3)], 1, 7, told.append)
    assert not both.skipped
    both.measure(PROMPTS, [(2, 3)], 2, 8, told.append)
    (skipped,) = both.skipped
    assert skipped["server"] == "bad"
    assert skipped["reason"].startswith("with 2 in flight, ")
    assert re.search(said, skipped["reason"])
    assert [(turn.server, turn.in_flight) for turn in told] == [
        ("good", 1), ("bad", 1), ("good", 2), ("bad", 2), ("good", 2), ("good", 2),
    ]  # fmt: skip
    assert told == both.turns


def test_servers_take_turns_level_by_level_and_every_second_turn_backwards(server):
    both = Comparison({"one": server(), "two": server()}, [], [])
    both.measure(PROMPTS, [(1, 2), (2, 4)], 2, 8, lambda turn: None)
    order = [(turn.turn, turn.in_flight, turn.server) for turn in both.turns]
    assert order == [
        (0, 1, "one"), (0, 1, "two"), (0, 2, "one"), (0, 2, "two"),
        (1, 1, "two"), (1, 1, "one"), (1, 2, "two"), (1, 2, "one"),
    ]  # fmt: skip
    assert {(turn.in_flight, turn.requests, turn.prompt_tokens, turn.tokens) for turn in both.turns} == {
        (1, 2, 5, 5),
        (2, 4, 10, 10),
    }
    rows = summarise(both.turns)
    assert [(row["server"], row["in_flight"], row["turns"]) for row in rows] == [
        ("one", 1, 2), ("two", 1, 2), ("one", 2, 2), ("two", 2, 2),
    ]  # fmt: skip
    rates = [turn.tokens_per_second for turn in both.turns if (turn.server, turn.in_flight) == ("one", 2)]
    assert rows[2]["tokens_per_second"] == pytest.approx(sum(rates) / 2)


def test_a_server_that_does_not_come_up_says_why(server):
    with pytest.raises(ServerError, match="ended with status 1 before it was ready; its last words: no room"):
        server(refuses="no room")


def test_many_connections_may_come_at_once():
    """Python's listeners let five wait; of 32 clients at once some were reset, and their engine was thought broken."""
    listener = Listener(("127.0.0.1", 0), lambda *_: None)
    waiting = []
    try:
        waiting += [socket.create_connection(listener.server_address, timeout=1) for _ in range(64)]
    finally:
        for connection in waiting:
            connection.close()
        listener.server_close()
