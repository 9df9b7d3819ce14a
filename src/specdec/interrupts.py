"""Ctrl-C waits for the end of a pass: what a pass changes in a dozen places is never left half changed."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import ClassVar


class Interrupts:
    """Holds SIGINT back for the time of a ``with`` block; at its end what came has the effect that it would have had.

    Blocks may lie within each other; what came takes effect at the end of the outermost, or at its ``deliver``. Python
    interrupts its main thread alone, so on others this does nothing.
    """

    _held: ClassVar[bool] = False
    """Does a block hold SIGINT back? Those within it have nothing to do, which saves most of a pass's calls of ``signal``."""

    def __init__(self) -> None:
        self._came: tuple[int, FrameType | None] | None = None
        self._before: object = None

    def __enter__(self) -> Interrupts:
        if not Interrupts._held and threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGINT)
            if callable(self._before):
                signal.signal(signal.SIGINT, self._hold)
                Interrupts._held = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if callable(self._before):
            Interrupts._held = False  # first: what comes after the next line may raise at once
            signal.signal(signal.SIGINT, self._before)
            self.deliver()

    def deliver(self) -> None:
        """Let what came so far have its effect, usually a KeyboardInterrupt."""
        came, self._came = self._came, None
        if came is not None and callable(self._before):
            self._before(*came)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame
