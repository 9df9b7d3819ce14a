"""The event loop's thread gets onto a core at once; the engine's, which keeps cores busy, does not ask for that."""

import threading

import pytest

from specdec.serve import promptness
from specdec.serve.promptness import TURN_NANOSECONDS, ask_for_short_turns, turn


def in_a_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_asks_for_itself_alone():
    before = turn()
    if before is None:
        pytest.skip("this system tells nothing of turns")
    asked = in_a_thread(lambda: (ask_for_short_turns(), turn()))
    assert turn() == before
    if before == 0:
        pytest.skip("this kernel knows no turns of threads' own")
    assert asked == (True, TURN_NANOSECONDS)


def test_where_there_is_no_such_thing_nothing_changes(monkeypatch):
    before = turn()
    monkeypatch.setattr(promptness, "_GET", None)
    assert not ask_for_short_turns()
    monkeypatch.undo()
    assert turn() == before
