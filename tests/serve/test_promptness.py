"""The event loop's thread gets onto a core at once; the engine's, which keeps cores busy, does not ask for that."""

import gc
import threading

import pytest

from specdec.serve import promptness
from specdec.serve.promptness import TURN_NANOSECONDS, TURN_SECONDS, ask_for_short_turns, set_aside, turn, turn_seconds


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


@pytest.mark.parametrize(
    ("cores", "threads", "turns"),
    [(2, 2, 1.0), (1, 1, 1.0), (1, 2, 1.0), (2, 1, 0.0), (4, 4, 1 / 3), (16, 8, 0.0), (8, 0, 0.0)],
)
def test_passes_wait_only_where_they_keep_all_cores(monkeypatch, cores, threads, turns):
    monkeypatch.setattr(promptness.os, "sched_getaffinity", lambda process: range(cores), raising=False)
    assert turn_seconds(threads) == pytest.approx(turns * TURN_SECONDS)


def test_what_is_set_aside_is_gone_through_no_more():
    """Garbage that was there is freed first; what comes later is collected as ever."""
    before = len(gc.get_objects())
    loop = []
    loop.append(loop)
    del loop
    set_aside()
    try:
        assert gc.get_freeze_count() > 0.9 * before
        assert len(gc.get_objects()) < 0.1 * before
        late = [[] for _ in range(3)]
        for one in late:
            one.append(one)
        del one, late
        assert gc.collect() >= 3
    finally:
        gc.unfreeze()
