"""Which drafters are asked for which sequences, and when: what an ask takes against what it saves.

A drafter that saves less than it takes for a sequence is asked more and more seldom, but never so seldom that it would not be
noticed when the text begins to suit it. Between asks a sequence *rests*: it costs nothing but a decrement, since a step that
drafts nothing must take no longer than one with speculation off. What an ask saves depends on how many sequences share a pass
(the more, the less a token takes in plain decoding), so each such *crowd* has gates of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from specdec.draft.base import Drafter
from specdec.types import Sequence

Door = tuple[str, bool]
"""A drafter, and whether others have already made a good draft."""

PROBING = 0.005
"""Most of the time of plain decoding that may go into asking drafters where they do not pay, and into letting one watch."""

GLANCES = 4
"""Of the sequences for which a thrifty drafter was not asked, it observes so many in one pass of so many, or of more."""

GOOD = 0.75
"""Tokens of others' drafts expected to be accepted, from which on a drafter's worth is judged apart: behind a long copy of
the prompt the same drafter saves less than where nothing was found."""

TRIALS = 8
"""Asks over which the time that a drafter saves is averaged, and so many a drafter that never helps is given at first."""

MANY = 4
"""The crowd (of eight sequences) from which on asks that do not pay are limited for all sequences together: there are always
some that are new, and their first asks would never end."""

SCOUTS = 8
"""Of sequences so many together as a crowd of ``MANY`` has, one is still followed by a drafter that does not pay in it."""

MOST = 10
"""The largest crowd told apart, of 512 sequences or more."""

LATER = 4
"""Passes before a drafter is first asked for a new sequence where it has not paid for others."""


@dataclass(slots=True)
class Gate:
    """Is a drafter worth its time for a sequence, and if not, when is it asked again?"""

    saved: float
    """Running mean of the seconds that asking saved, what the asking itself took not deducted."""
    interval: int = 1
    """Passes from one ask to the next."""
    pays: bool = True
    """Is that at least what asking costs?"""
    waited: int = 0

    def close(self, saved: float, right: bool, price: float, longest: int) -> None:
        """After an ask: ``right`` if one of its tokens was the next one, ``price`` is what it costs, ``longest`` the most
        passes to wait."""
        self.waited = 0
        # One very good draft is enough to open: text that begins to repeat goes on repeating.
        self.saved += (min(saved, TRIALS * price) - self.saved) / TRIALS
        self.pays = self.saved >= price
        if self.pays:
            self.interval = 1
        else:
            self.interval = max(1, self.interval // 2 if right else min(2 * self.interval, longest))


_Key = tuple[str, bool, int]
"""A door, and the crowd for which it stands."""


@dataclass(slots=True)
class _Row:
    """The gates of one sequence."""

    gates: dict[_Key, Gate] = field(default_factory=dict)
    crowd: int = 0
    """In which it last asked or began to rest."""
    rest: int = 0
    """Passes left in which none of them can open."""
    rested: int = 0
    """Passes since the gates last counted."""


class Gates:
    """The gates of all sequences, and the prices of drafters."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._crowd = 1
        self._holding: set[str] = set()
        """Drafters that hold rows."""
        self._pays: dict[str, bool] = {}
        """Does a drafter pay in this crowd, for all that is known? Found out once for every pass."""
        self._asking: dict[str, float] = {}
        """Seconds of asking a drafter for one sequence, running mean."""
        self._watching: dict[str, float] = {}
        """Seconds in which a thrifty drafter observes one sequence, running mean: it does so seldom while it is not asked."""
        self._handling: float | None = None
        """Seconds of choosing among a sequence's nodes and scoring them, running mean; 0 in passes in which none is asked."""
        self._reading: dict[str, float] = {}
        """Seconds in which a drafter reads a row of a prompt, running mean."""
        self._saved: dict[_Key, float] = {}
        """Seconds that asking it saved, over all sequences; a new one starts from there."""
        self._gains: dict[_Key, float] = {}
        """What asking it gained, over all sequences: its price deducted, and nothing where a gate shuts. Text differs, and a
        drafter that does not pay for most sequences may pay well for some."""
        self._purse = 0.0
        """Seconds saved up for asking drafters which do not pay, and for prompts that these must read before, that it may be
        seen when they begin to. All sequences share them: a server has new ones all the time."""
        self._wanted = 0.0
        """The most that was needed at once: no more is saved up."""

    def __len__(self) -> int:
        """Sequences with gates."""
        return len(self._rows)

    def gather(self, n: int) -> None:
        """A pass for so many sequences begins. Crowds are 1, 2 to 3, 4 to 7 and so on."""
        self._crowd = min(n.bit_length(), MOST)
        self._pays.clear()

    def rests(self, sequence_id: int) -> bool:
        """Called once for every pass: can no gate of the sequence open in it?"""
        row = self._rows.get(sequence_id)
        if row is None or not row.rest:
            return False
        if row.crowd != self._crowd:
            row.rest = 0
            return False
        row.rest -= 1
        row.rested += 1
        return True

    def opens(self, sequence: Sequence, drafter: Drafter, behind_others: bool) -> bool:
        """Is the drafter to be asked? Called once for every pass in which it could be and the sequence does not rest."""
        if drafter.holds:
            self._holding.add(drafter.name)
            if not self.follows(sequence.id, drafter.name):
                return False
        row = self._rows.setdefault(sequence.id, _Row())
        if row.rested:
            for (_, behind, crowd), known in row.gates.items():
                known.waited += 0 if behind or crowd != row.crowd else row.rested
            row.rested = 0
        row.crowd = self._crowd
        door = drafter.name, behind_others, self._crowd
        gate = row.gates.get(door)
        if gate is None:
            # e times its price, where nothing is known, is what TRIALS asks in vain bring down to the price.
            cost = self.cost(drafter.name)
            saved = self._known(self._saved, door, math.e * cost)
            reading = drafter.unread(sequence) * self._reading.get(drafter.name, 0.0)
            if not (self._promises(door, reading, sequence.room) or self._spend(reading)):
                return False
            pays = saved >= cost
            gate = row.gates[door] = Gate(saved, 1 if pays else LATER, pays)
        gate.waited += 1
        if gate.waited < gate.interval:
            return False
        if gate.pays or self._crowd < MANY:
            return True
        cost = self.cost(drafter.name)
        return self._promises(door, TRIALS * cost, sequence.room) or self._spend(cost)

    def follows(self, sequence_id: int, name: str) -> bool:
        """Is a drafter that holds rows to hold those of a sequence?

        For many sequences that takes a share of every pass. Where the drafter does not pay it is done for one of a few only, by
        which it is seen when it begins to.
        """
        if self._crowd < MANY or sequence_id % SCOUTS == 0:
            return True
        row, key = self._rows.get(sequence_id), (name, False, self._crowd)
        if row and (gate := row.gates.get(key)) and gate.pays:
            return True
        if (pays := self._pays.get(name)) is None:
            cost = self.cost(name)
            pays = self._pays[name] = self._known(self._saved, key, math.e * cost) >= cost
        return pays

    def _promises(self, key: _Key, seconds: float, room: int) -> bool:
        """May so much be spent on finding out whether the drafter suits a sequence, for what it gains with others?

        A sequence may end long before it has no room left: within half of that it must have paid.
        """
        gain = self._known(self._gains, key, (math.e - 1) * self.cost(key[0]))
        return gain * room / 2 >= seconds

    def _known(self, means: dict[_Key, float], key: _Key, otherwise: float) -> float:
        """What is known of a door in this crowd, or else in the next smaller one, or in a larger one: among twice as many
        sequences a token takes half as long, and an ask saves half as much."""
        name, behind_others, crowd = key
        for other in (*range(crowd, 0, -1), *range(crowd + 1, MOST + 1)):
            if (known := means.get((name, behind_others, other))) is not None:
                return math.ldexp(known, other - crowd)
        return otherwise

    def _spend(self, seconds: float) -> bool:
        """Take so much from the purse, if it is there; else no less will be saved up."""
        if self._purse >= seconds:
            self._purse -= seconds
            return True
        self._wanted = max(self._wanted, seconds)
        return False

    def rest(self, sequence_id: int) -> None:
        """No gate of the sequence opened in this pass: none will until the first is due."""
        row = self._rows.get(sequence_id)
        if row is not None:
            waits = [
                gate.interval - gate.waited
                for (name, *at), gate in row.gates.items()
                if at == [False, self._crowd] and (name not in self._holding or self.follows(sequence_id, name))
            ]
            next_due = min(waits, default=LATER if row.gates else 1)
            row.rest = next_due - 1 if next_due > 0 else LATER  # it is due, and the purse was empty

    def close(self, sequence_id: int, door: Door, saved: float, right: bool, per_token: float) -> None:
        """After an ask that saved so many seconds; ``per_token`` are those that a token takes in plain decoding."""
        row = self._rows.get(sequence_id)
        if row is None:  # asked whether it pays or not
            return
        price = self.cost(door[0])
        key = *door, self._crowd
        gate = row.gates[key]
        gate.close(saved, right, price, math.ceil(price / (PROBING * per_token)))
        mean = self._known(self._saved, key, math.e * price)
        self._saved[key] = mean + (saved - mean) / (4 * TRIALS)
        mean, gain = self._known(self._gains, key, (math.e - 1) * price), max(0.0, gate.saved - price)
        self._gains[key] = mean + (gain - mean) / (4 * TRIALS)

    def cost(self, name: str) -> float:
        """Seconds that asking a drafter for a sequence brings with it."""
        return self._asking.get(name, 0.0) + self._watching.get(name, 0.0) + (self._handling or 0.0)

    def passed(self, seconds: float) -> None:
        """A pass took so long."""
        self._purse = min(self._purse + PROBING * seconds, self._wanted)

    def glances(self, seconds: float, n: int) -> int:
        """From one pass in which thrifty drafters watch sequences that did not ask them to the next such pass.

        Args:
            seconds: of a pass.
            n: its sequences.
        """
        watching = min(n, GLANCES) * max(self._watching.values(), default=0.0)
        return max(GLANCES, math.ceil(watching / (PROBING * seconds)))

    def asked(self, name: str, seconds: float) -> None:
        """Asking took so long for a sequence."""
        self._asking[name] = blend(self._asking.get(name), seconds)

    def read(self, name: str, seconds: float) -> None:
        """Reading a row of a prompt took so long."""
        self._reading[name] = blend(self._reading.get(name), seconds)

    def watched(self, name: str, seconds: float) -> None:
        """Observing took so long for a sequence."""
        self._watching[name] = blend(self._watching.get(name), seconds)

    def handled(self, seconds: float) -> None:
        """Choosing and scoring took so long for a sequence."""
        self._handling = blend(self._handling, seconds)

    def release(self, sequence_id: int) -> None:
        self._rows.pop(sequence_id, None)

    def clear(self) -> None:
        """Forget everything but what choosing takes."""
        self._rows, self._asking, self._watching, self._reading = {}, {}, {}, {}
        self._saved, self._gains = {}, {}
        self._purse = self._wanted = 0.0


def blend(mean: float | None, value: float) -> float:
    """A running mean of seconds that a single outlier moves little."""
    return mean + (min(value, 4 * mean) - mean) / 16 if mean else value
