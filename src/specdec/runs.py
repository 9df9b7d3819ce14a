"""Requests under way: what each sequence has given so far, and the passes that all of them share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from specdec.config import SamplingParams
from specdec.engine import Engine
from specdec.interrupts import Interrupts
from specdec.results import Chunk, Result
from specdec.sampling import derive_seed
from specdec.text import Decoder, TextStream
from specdec.types import Delta, FinishReason, TokenLogprob


@dataclass(slots=True)
class Run:
    """A sequence in the engine and what it has given so far."""

    sequence_id: int
    prompt_index: int
    choice: int
    seed: int
    prompt_tokens: int
    text: TextStream
    tokens: list[int] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    first_token_seconds: float | None = None
    chunks: list[Chunk] = field(default_factory=list)
    """What has not been fetched yet."""
    result: Result | None = None

    def take(self, delta: Delta) -> None:
        """Turn a delta into a chunk, and the last one into a result too."""
        seconds = time.perf_counter() - self.started
        if self.first_token_seconds is None:
            self.first_token_seconds = seconds
        self.tokens += delta.tokens
        self.sources += delta.sources
        self.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        ready = self.text.take()
        if delta.finish_reason is not None:
            ready += self.text.finish()
            self.result = self._finish(delta, delta.finish_reason, seconds)
        pieces = tuple((text, self.sources[index]) for index, text in ready)
        self.chunks.append(Chunk(pieces, delta.tokens, delta.sources, self.choice, delta.logprobs, self.result))

    def _finish(self, delta: Delta, reason: FinishReason, seconds: float) -> Result:
        return Result(
            text=self.text.text,
            tokens=tuple(self.tokens),
            sources=tuple(self.sources),
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            seed=self.seed,
            prompt_index=self.prompt_index,
            choice=self.choice,
            stats=delta.stats.as_dict() if delta.stats else {},
            seconds=seconds,
            first_token_seconds=self.first_token_seconds or seconds,
            logprobs=tuple(self.logprobs) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
            error=delta.error,
        )


class Runs:
    """The sequences that have been asked for and not given up, and the engine that they run in.

    Threads take turns at it, a pass at a time; whoever runs one runs it for all. An interrupt waits for the end of the pass.

    Args:
        engine: runs what is added here and nothing else.
        decoder: the model's tokenizer.
        end_tokens: after which a sequence ends unless it says otherwise.
    """

    def __init__(self, engine: Engine, decoder: Decoder, end_tokens: frozenset[int]) -> None:
        self.engine = engine
        self.lock = threading.RLock()
        """Held by whoever uses the engine or what is open."""
        self._decoder = decoder
        self._end_tokens = end_tokens
        self.open: dict[int, Run] = {}
        """By their sequences."""
        self._abandoned: list[Run] = []
        """Those of streams that were dropped without being closed; they end before the next pass."""

    def add(self, index: int, ids: list[int], params: SamplingParams, seed: int) -> list[Run]:
        """Give the engine all ``n`` sequences of a prompt, or none of them.

        Args:
            index: which of the prompts this is.
            ids: its tokens.
            seed: each sequence gets one of its own, derived from this one.

        Raises:
            RequestError: the engine cannot serve it.
        """
        runs: list[Run] = []
        with self.lock:
            try:
                for choice in range(params.n):
                    text = TextStream(self._decoder, params.stop, params.min_tokens, ids)
                    own = derive_seed(seed, choice)
                    sequence_id = self.engine.add(ids, params, self._end_tokens, own, text)
                    run = self.open[sequence_id] = Run(sequence_id, index, choice, own, len(ids), text)
                    runs.append(run)
            except BaseException:
                self.drop(runs)
                raise
        return runs

    def step(self) -> None:
        """One pass, and what it gave to each sequence."""
        with Interrupts(), self.lock:
            abandoned, self._abandoned = self._abandoned, []
            self.drop(abandoned)
            for delta in self.engine.step():
                if run := self.open.get(delta.sequence_id):
                    run.take(delta)

    def drop(self, runs: Iterable[Run]) -> None:
        """Forget sequences, ending those that have not ended."""
        with Interrupts(), self.lock:
            for run in runs:
                if self.open.pop(run.sequence_id, None) and run.result is None:
                    self.engine.abort(run.sequence_id)

    def abandon(self, runs: Iterable[Run]) -> None:
        """Drop sequences before the next pass; this may be called in the middle of one."""
        self._abandoned += runs


class Stream(Iterator[Chunk]):
    """The chunks of one request as they come. Closing it, or leaving its ``with`` block, abandons what has not ended."""

    def __init__(self, runs: Runs, own: list[Run]) -> None:
        self._runs = runs
        self._own = own
        self._open = True

    def __next__(self) -> Chunk:
        while self._open:
            with self._runs.lock:
                for run in self._own:
                    if run.chunks:
                        return run.chunks.pop(0)
                if all(run.result for run in self._own):
                    self.close()
                else:
                    self._runs.step()
        raise StopIteration

    @property
    def ready(self) -> bool:
        """Is a chunk there, so that the next one comes without a pass?"""
        return any(run.chunks for run in self._own)

    @property
    def results(self) -> list[Result]:
        """The answers that have ended so far."""
        return [run.result for run in self._own if run.result]

    def close(self) -> None:
        if self._open:
            self._open = False
            self._runs.drop(self._own)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Garbage is collected anywhere, also in the middle of a pass: the engine must not be touched here.
        if self._open:
            self._runs.abandon(self._own)
