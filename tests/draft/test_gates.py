"""When drafters are asked: exactly counted, and never for more than a small share of the time where they do not pay."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Many

import pytest
from drafting import sequence

from specdec.draft.base import Drafter
from specdec.draft.gates import GLANCES, LATER, PROBING, Gates
from specdec.types import Draft, Sequence

PASS, PRICE, ROW = 4.0, 0.5, 0.01
"""Seconds of a pass, of an ask, and of reading a row of a prompt."""


class Reader(Drafter):
    """Has so many rows of every prompt to read; it is asked by nobody here."""

    def __init__(self, name: str, rows: int = 0) -> None:
        self.name, self.rows = name, rows

    def unread(self, sequence: Sequence) -> int:
        return self.rows

    def propose(self, sequences: Many[Sequence], budgets: Many[int]) -> list[Draft]:
        raise AssertionError("not asked here")


def gates_of(saved: float) -> Gates:
    """Where a drafter is known to save so much by an ask."""
    gates = Gates()
    gates.asked("a", PRICE)
    gates.read("a", ROW)
    for number in range(-200, 0):
        row = sequence([1], number=number)
        assert gates.opens(row, Reader("a"), False) or saved < PRICE
        gates.close(number, ("a", False), saved, False, PASS)
        gates.release(number)
    assert len(gates) == 0, "nothing is kept of sequences that ended"
    return gates


@pytest.mark.parametrize("room", [20, 200, 400, 2000])
@pytest.mark.parametrize("rows", [100, 1000, 10_000])
def test_a_prompt_is_read_where_that_can_be_expected_to_pay(rows: int, room: int) -> None:
    """By what half the tokens that may still come would gain."""
    saved = 0.9
    opens = gates_of(saved).opens(sequence([1], room=room), Reader("a", rows), False)
    assert opens == ((saved - PRICE) * room / 2 >= rows * ROW)


@pytest.mark.parametrize("well", [2, 8])
def test_a_prompt_is_read_for_a_drafter_that_pays_for_few_but_pays_well(well: int) -> None:
    """It saves less than it costs on average, but falls silent where it does not pay: what it gains elsewhere counts, and
    nothing is taken off it."""
    gates = Gates()
    gates.asked("a", PRICE)
    gates.read("a", ROW)
    for number in range(-200, 0):
        row, saved = sequence([1], number=number), well * PRICE if number % 10 == 0 else 0.0
        for _ in range(30):
            if gates.opens(row, Reader("a"), False):
                gates.close(number, ("a", False), saved, saved > 0, PASS)
        gates.release(number)
    row, reader = sequence([1], room=200), Reader("a", 500)
    assert sum(gates.opens(row, reader, False) for _ in range(LATER))
    hopeless, row = gates_of(0.0), sequence([1], room=200)
    assert not sum(hopeless.opens(row, reader, False) for _ in range(LATER))


def test_reading_for_a_drafter_that_does_not_pay_takes_no_larger_share_than_probing() -> None:
    """Sequences of 50 tokens, all of them new: reading the prompt of each would take half as long again. It is never read for
    so many that it shows, and never for none at all: else nobody would see that the drafter has begun to pay."""
    gates, reader = gates_of(0.0), Reader("a", 1000)
    n_read = n_passes = 0
    for number in range(400):
        row = sequence([1], room=50, number=number)
        for _ in range(50):
            if gates.opens(row, reader, False):
                n_read += 1
                break
            gates.passed(PASS)
            n_passes += 1
        gates.release(number)
    assert 10 < n_read <= 1 + PROBING * n_passes * PASS / (reader.rows * ROW)


def test_what_a_long_prompt_takes_is_saved_up_whatever_shorter_ones_ask_for_meanwhile() -> None:
    gates = gates_of(0.0)
    long, short = (sequence([1], room=50, number=number) for number in (1, 2))
    assert not gates.opens(long, Reader("a", 1000), False)
    assert not gates.opens(short, Reader("a", 100), False)
    for _ in range(1 + math.ceil(1000 * ROW / (PROBING * PASS))):
        gates.passed(PASS)
    assert sum(gates.opens(long, Reader("a", 1000), False) for _ in range(LATER))


def test_new_sequences_together_ask_a_drafter_that_does_not_pay_no_more_than_probing_allows() -> None:
    """A busy server has new sequences all the time: were each given its first asks for nothing, they would never end."""
    gates, drafter = gates_of(0.0), Reader("a")
    n_asks = n_passes = 0
    for number in range(0, 400, 16):
        rows = [sequence([1], room=50, number=number + i) for i in range(16)]
        for _ in range(50):
            gates.gather(16)
            for row in rows:
                if gates.rests(row.id):
                    continue
                if gates.opens(row, drafter, False):
                    n_asks += 1
                    gates.close(row.id, ("a", False), 0.0, False, PASS / 16)
                else:
                    gates.rest(row.id)
            gates.passed(PASS)
            n_passes += 1
        for row in rows:
            gates.release(row.id)
    assert 10 < n_asks <= 1 + PROBING * n_passes * PASS / PRICE


def test_what_an_ask_saves_is_learned_for_each_crowd() -> None:
    """Alone it pays, among sixteen it does not: a sequence that rests among many asks as soon as the others have ended."""
    gates, drafter, row = gates_of(2 * PRICE), Reader("a"), sequence([1], room=10_000)

    def passes(n: int, saved: float, count: int) -> int:
        asks = 0
        for _ in range(count):
            gates.gather(n)
            if not gates.rests(row.id):
                if gates.opens(row, drafter, False):
                    asks += 1
                    gates.close(row.id, ("a", False), saved, saved > 0, PASS / n)
                else:
                    gates.rest(row.id)
        return asks

    assert passes(1, 2 * PRICE, 10) == 10
    assert passes(16, 0.0, 400) < 20
    assert passes(1, 2 * PRICE, 10) == 10
    assert passes(16, 0.0, 100) == 0, "what was learned among many stays, too"


def test_a_crowd_of_which_nothing_is_known_begins_with_what_the_next_smaller_one_knows() -> None:
    gates = gates_of(0.0)
    gates.gather(16)
    assert not gates.opens(sequence([1], room=50), Reader("a"), False)


class Holder(Reader):
    holds = True


def test_among_many_a_drafter_that_does_not_pay_holds_the_rows_of_few() -> None:
    """Holding rows takes a share of every pass. It goes on for one sequence of eight, which alone ask the drafter, and for all
    again where few are left or it begins to pay."""
    drafter, rows = Holder("a"), [sequence([1], number=i, room=10_000) for i in range(32)]

    def followed(gates: Gates, n: int) -> list[int]:
        gates.gather(n)
        return [row.id for row in rows if gates.follows(row.id, "a")]

    gates, everyone = gates_of(0.0), list(range(32))
    assert followed(gates, 32) == [0, 8, 16, 24]
    assert followed(gates, 7) == everyone
    assert followed(gates_of(40 * PRICE), 32) == everyone, "a 16th of what it saves a sequence alone is more than it costs"
    gates.gather(32)
    assert not any(gates.opens(row, drafter, False) for row in rows if row.id % 8)
    for _ in range(400):  # those that are followed show that it pays
        gates.gather(32)
        for row in rows[::8]:
            if gates.opens(row, drafter, False):
                gates.close(row.id, ("a", False), 4 * PRICE, True, PASS)
        gates.passed(PASS)
    assert followed(gates, 32) == everyone


def test_a_drafter_that_no_longer_follows_a_sequence_does_not_keep_it_awake() -> None:
    """Its gate stands shut and is not counted on, so it may not be what the rest of the sequence is measured by."""
    for drafters in ([Reader("a"), Holder("b")], [Holder("b")]):
        gates, row = Gates(), sequence([1], number=1, room=10_000)
        for drafter in drafters:
            gates.asked(drafter.name, PRICE)
        rested = 0
        for _ in range(400):
            gates.gather(32)
            if gates.rests(row.id):
                rested += 1
            elif asked := [drafter for drafter in drafters if gates.opens(row, drafter, False)]:
                for drafter in asked:
                    gates.close(row.id, (drafter.name, False), 0.0, False, PASS / 32)
            else:
                gates.rest(row.id)
            gates.passed(PASS)
        assert rested > 200


def test_a_sequence_rests_exactly_as_long_as_its_gates_stay_shut() -> None:
    """Resting is a shortcut: who is asked when is what counting every gate in every pass would give. A drafter that is asked
    behind others only has no part in it: it waits for passes in which they drafted well."""
    for seed in range(40):
        rng = random.Random(seed)
        rested, counted = Gates(), Gates()
        row, drafters, behind = sequence([1], number=1), [Reader(name) for name in "abc"], Reader("d")
        for gates in (rested, counted):
            for name in "abcd":
                gates.asked(name, 0.5)
        slept = False
        for _ in range(300):
            resting = rested.rests(1)
            opened = [(drafter, False) for drafter in drafters if counted.opens(row, drafter, False)]
            if opened and counted.opens(row, behind, True):
                opened.append((behind, True))
            if resting:
                assert not opened
                slept = True
                continue
            found = [(drafter, False) for drafter in drafters if rested.opens(row, drafter, False)]
            if found and rested.opens(row, behind, True):
                found.append((behind, True))
            assert found == opened
            assert found or not slept, "it could have rested longer"
            slept = False
            for drafter, last in opened:
                saved, right = rng.choice([0.0, 0.0, 3.0]), rng.random() < 0.2
                for gates in (rested, counted):
                    gates.close(1, (drafter.name, last), saved, right, 4.0)
            if not opened:
                rested.rest(1)
        assert rested.rests(2) is False, "a sequence that nothing is known of"


def test_the_price_of_asking_is_all_that_comes_with_it() -> None:
    """Making the draft, watching what becomes of it, and choosing among the nodes."""
    gates = Gates()
    gates.asked("a", 0.5)
    gates.asked("b", 2.0)
    gates.watched("a", 0.25)
    gates.handled(0.1)
    assert gates.cost("a") == pytest.approx(0.85)
    assert gates.cost("b") == pytest.approx(2.1)


def test_one_slow_ask_moves_the_price_little() -> None:
    """A machine that was busy for a moment must not silence a drafter."""
    gates = Gates()
    gates.asked("a", 0.5)
    gates.asked("a", 100.0)
    assert gates.cost("a") == pytest.approx(0.5 + 3 * 0.5 / 16)
    gates.asked("a", 0.0)
    assert gates.cost("a") < 0.6


def test_a_cleared_engine_knows_as_little_as_a_new_one() -> None:
    """What choosing takes apart, which is of the machine: no price, no saving, nothing saved up, no sequence."""
    gates = gates_of(0.0)
    gates.handled(0.1)
    long = Reader("a", 10_000)
    assert not gates.opens(sequence([1], room=20), long, False)
    for _ in range(1 + math.ceil(long.rows * ROW / (PROBING * PASS))):
        gates.passed(PASS)
    gates.clear()
    assert (len(gates), gates.cost("a")) == (0, 0.1)
    gates.asked("a", PRICE)
    gates.read("a", ROW)
    assert not gates.opens(sequence([1], room=20), long, False)
    assert gates.opens(sequence([1], room=20), Reader("a"), False), "nobody has seen it save nothing"


def test_watching_takes_no_larger_share_than_probing() -> None:
    """A drafter that watches dearly does so in fewer passes."""
    gates = Gates()
    assert gates.glances(4.0, 1) == GLANCES
    gates.watched("a", 0.4)
    assert gates.glances(4.0, 1) == math.ceil(0.4 / (PROBING * 4.0)) > GLANCES
    for n in (2, GLANCES, 3 * GLANCES):
        watched = min(n, GLANCES)  # in one such pass
        assert gates.glances(4.0, n) == pytest.approx(watched * 0.4 / (PROBING * 4.0))
