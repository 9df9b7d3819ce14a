"""What keeps a server's answers from waiting.

A thread that does little, and that others wait for, should get onto a core at once. Linux lets whoever runs go on for some
milliseconds before a thread that wakes up has its turn, and passes keep all cores busy. A thread that asks for short turns is
given them at once (from Linux 6.12 on); its share of the time stays the same.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import struct
import sys

TURN_SECONDS = 0.003
"""Longest that a pass on two cores is put off for the event loop."""
TURN_NANOSECONDS = 100_000
"""The shortest that Linux takes."""
_SET, _GET = {"x86_64": (314, 315), "aarch64": (274, 275)}.get(platform.machine(), (None, None))
"""Numbers of the system calls sched_setattr and sched_getattr."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""size, policy, flags, nice, priority, turn in nanoseconds (called runtime there), deadline, period."""


def set_aside() -> None:
    """Have Python's collector of garbage never again go through what is there now: a model and its libraries, to be called once
    they are loaded. To do so takes it a good part of a second, in which no stream gets anything."""
    gc.collect()
    gc.freeze()


def turn_seconds(threads: int) -> float:
    """How long a pass is to be put off, at most, until what the one before it gave has been sent.

    Not at all where the event loop has a core for itself. Where it has none, one of the pass's would be taken from it: the more
    there are, the less that costs, and the more to let all of them wait.

    Args:
        threads: that a pass keeps busy.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return TURN_SECONDS / max(1, cores - 1) if threads >= cores else 0.0


def ask_for_short_turns() -> bool:
    """Ask for the calling thread; False where the system knows no such thing, and nothing changes."""
    attributes = _attributes()
    if attributes is None:
        return False
    *before, _, deadline, period = attributes
    raw = _ATTRIBUTES.pack(*before, TURN_NANOSECONDS, deadline, period)
    return not int(ctypes.CDLL(None).syscall(_SET, 0, ctypes.create_string_buffer(raw), 0))


def turn() -> int | None:
    """Nanoseconds of a turn of the calling thread; None where the system does not tell, or knows nothing of them."""
    attributes = _attributes()
    return attributes[-3] if attributes else None


def _attributes() -> tuple[int, ...] | None:
    if sys.platform != "linux" or _GET is None:
        return None
    raw = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if ctypes.CDLL(None).syscall(_GET, 0, raw, _ATTRIBUTES.size, 0):
        return None
    return _ATTRIBUTES.unpack(raw.raw)
