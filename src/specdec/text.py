"""Tokens to text while they come: whole characters only, and nothing that might yet belong to a stop string.

The text that has been given out never has to be taken back, and all of it together is the final text, however the tokens
were grouped into bursts.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence as Many
from typing import Protocol


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    drops_first_space: bool
    """A space at the very beginning of a text is not part of it."""

    def text_bytes(self, token: int) -> bytes:
        """What a token adds to decoded text."""
        ...


class Detokenizer:
    """Text of a growing list of tokens, piece by piece; half a character waits for its other half.

    Args:
        decoder: the model's tokenizer.
        prompt: the tokens before them. Only where these have no text do the new ones begin a text, whose first space a
            tokenizer may drop; otherwise that space parts the new text from the prompt's.
    """

    def __init__(self, decoder: Decoder, prompt: Many[int]) -> None:
        self._decoder = decoder
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = decoder.drops_first_space and not any(map(decoder.text_bytes, prompt))

    def push(self, token: int) -> str:
        """The text that this token completes; often empty."""
        return self._trim(self._utf8.decode(self._decoder.text_bytes(token)))

    def flush(self) -> str:
        """What is left when no token will follow: half a character, as U+FFFD."""
        return self._trim(self._utf8.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


class StopStrings:
    """Cuts a stream of text before the first stop string in it.

    Args:
        stop: the stop strings; empty ones are ignored.
    """

    def __init__(self, stop: Many[str]) -> None:
        self._stop = tuple(string for string in stop if string)
        self._held = ""
        """Text that could be the beginning of a stop string."""
        self.stopped = False

    def push(self, text: str, *, may_stop: bool) -> str:
        """Take more text and return what can be given out.

        Args:
            text: what follows the text taken so far.
            may_stop: False passes over a stop string that is complete now; it is then ordinary text.
        """
        if not self._stop:
            return text
        before = len(self._held)
        text = self._held + text
        # Only a match that ends in the new text counts: one that was passed over before must not count now.
        places = [text.find(string, max(0, before - len(string) + 1)) for string in self._stop]
        if may_stop and any(at >= 0 for at in places):
            self.stopped, self._held = True, ""
            return text[: min(at for at in places if at >= 0)]
        held = max((_overlap(text, string) for string in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def release(self) -> str:
        """The text that was held back, when none will follow."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``string``, but not all of it."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if string[n - 1] == text[-1] and text.endswith(string[:n])), 0)


class TextStream:
    """The text of one sequence: decides where stop strings end it, and gives it out as it becomes final.

    The engine calls ``feed`` for each committed token, so a stop inside a burst ends the sequence at the same token as in
    plain decoding.

    Args:
        decoder: the model's tokenizer.
        stop: strings before which the text ends.
        min_tokens: a stop string that is complete within this many tokens is passed over.
        prompt: the tokens that the sequence continues.
    """

    def __init__(self, decoder: Decoder, stop: Many[str], min_tokens: int, prompt: Many[int]) -> None:
        self._detokenizer = Detokenizer(decoder, prompt)
        self._stops = StopStrings(stop)
        self._min_tokens = min_tokens
        self._n_tokens = 0
        self._ready: list[tuple[int, str]] = []
        self.text = ""
        """Everything given out so far."""

    def feed(self, token: int) -> bool:
        """Take one more token; True when it completes a stop string."""
        self._n_tokens += 1
        self._push(self._detokenizer.push(token))
        return self._stops.stopped

    def take(self) -> list[tuple[int, str]]:
        """The text that has become final since the last call, each piece with the index of the token that released it."""
        ready, self._ready = self._ready, []
        self.text += "".join(text for _, text in ready)
        return ready

    def finish(self) -> list[tuple[int, str]]:
        """As ``take``, when the sequence has ended for whatever reason: nothing is held back any more."""
        if not self._stops.stopped:
            self._push(self._detokenizer.flush())
            self._give(self._stops.release())
        return self.take()

    def _push(self, text: str) -> None:
        if text and not self._stops.stopped:
            self._give(self._stops.push(text, may_stop=self._n_tokens > self._min_tokens))

    def _give(self, text: str) -> None:
        if text:
            self._ready.append((self._n_tokens - 1, text))


class StopWatch:
    """Finds where stop strings end a sequence, as ``TextStream`` does, without keeping its text.

    For an engine whose text is put together on another thread: both find the same token.

    Args:
        decoder, stop, min_tokens, prompt: as for ``TextStream``.
    """

    def __init__(self, decoder: Decoder, stop: Many[str], min_tokens: int, prompt: Many[int]) -> None:
        self._detokenizer = Detokenizer(decoder, prompt)
        self._stops = StopStrings(stop)
        self._left = min_tokens

    def feed(self, token: int) -> bool:
        """Take one more token; True when it completes a stop string."""
        self._left -= 1
        if text := self._detokenizer.push(token):
            self._stops.push(text, may_stop=self._left < 0)
        return self._stops.stopped
