"""A request that the engine works on: its choices, and what of them has not been sent yet.

What the engine adds waits here until the client takes it. A slow client's deltas gather and go out as one; they are never
more than the answers are long, and nobody else waits for them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from specdec.engine import RequestError
from specdec.metrics.prometheus import ServerMetrics
from specdec.metrics.stats import Stats
from specdec.sampling import derive_seed
from specdec.serve.account import Account
from specdec.serve.errors import ApiError, too_slow
from specdec.serve.intake import Asked
from specdec.serve.worker import Job, Worker
from specdec.text import Decoder, StopWatch, TextStream
from specdec.types import Delta, FinishReason, Times, TokenLogprob


class Piece(NamedTuple):
    """What a client has not seen yet of a choice: its tokens ``[start, stop)`` and the text that became final with them."""

    choice: Choice
    start: int
    stop: int
    ready: list[tuple[int, str]]
    """The text in parts, each with the index of the token that released it."""
    text: str
    """All of them, joined."""
    finish_reason: FinishReason | None

    @property
    def texts(self) -> list[str]:
        """What of the text became final with each token; joined they are the text, unless its end came without a token."""
        texts = [""] * (self.stop - self.start)
        for at, text in self.ready if texts else ():
            texts[at - self.start] += text
        return texts

    @property
    def tokens(self) -> list[int]:
        return self.choice.tokens[self.start : self.stop]

    @property
    def sources(self) -> list[str | None]:
        return self.choice.sources[self.start : self.stop]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return self.choice.logprobs[self.start : self.stop]


class Choice:
    """One sequence: all that came of it, and how much of that was taken."""

    def __init__(self, generation: Generation, index: int, prompt: list[int], seed: int, text: TextStream) -> None:
        self._generation = generation
        self.asked_seed = generation.seed
        """The request's, from which this choice's own is derived."""
        self._text = text
        self.index = index
        self.prompt = prompt
        self.seed = seed
        self.tokens: list[int] = []
        self.sources: list[str | None] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob, ...] | None = None
        self.finish_reason: FinishReason | None = None
        self._counts: Stats | None = None
        """The engine's, once it has ended."""
        self._stats: dict[str, Any] = {}
        self.times = Times()
        self.passes: list[tuple[float, int]] = []
        """When each pass ended that gave it tokens (perf_counter), and how many tokens there were then."""
        self.end: str | None = None
        """How it ended, as the metrics count it; None while it has not."""
        self.complete = False
        """Everything has been taken, the finish reason too."""
        self._taken = 0
        self._measured = 0
        """Passes that the metrics have been told of."""
        self._told = False
        """They have been told of its end too."""

    @property
    def stats(self) -> dict[str, Any]:
        """What the engine counted of it, once it has ended; nothing before that."""
        if self._counts and not self._stats:
            self._stats = self._counts.as_dict()
        return self._stats

    def started(self) -> None:
        self._generation.started()

    def receive(self, delta: Delta, computed: float) -> None:
        self.tokens += delta.tokens
        if delta.tokens:
            self.passes.append((computed, len(self.tokens)))
        self.sources += delta.sources
        self.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self._counts = delta.stats
        self.finish_reason = delta.finish_reason
        self._generation.received(self, delta.error, computed)

    def flush(self) -> None:
        self._generation.flush()

    def failed(self, error: ApiError) -> None:
        self._generation.failed(error)

    def measure(self, metrics: ServerMetrics, arrived: float) -> None:
        """Tell the metrics of the passes since the last time, and of the whole once it has come to an end of its own.

        Args:
            arrived: when the request did.
        """
        for at in range(self._measured, len(self.passes)):
            computed, n = self.passes[at]
            if at:
                before, m = self.passes[at - 1]
                metrics.inter_token.observe((computed - before) / (n - m), n - m)
                continue
            begun = self.times.begun
            assert begun is not None
            metrics.first_token.observe(computed - arrived)
            metrics.queued.observe(begun - self.times.added)
            metrics.prefill.observe(computed - begun)
        self._measured = len(self.passes)
        if self.finish_reason not in (None, "error") and not self._told:
            self._told = True
            self._measure_whole(metrics, arrived)

    def _measure_whole(self, metrics: ServerMetrics, arrived: float) -> None:
        n, first, last = len(self.tokens), self.passes[0][0], self.passes[-1][0]
        metrics.latency.observe(last - arrived)
        metrics.decode.observe(last - first)
        if n > 1:
            metrics.per_token.observe((last - first) / (n - 1))
        metrics.prompt_length.observe(len(self.prompt))
        metrics.output_length.observe(n)

    def take(self, limit: int | None = None) -> Piece | None:
        """What was not taken yet, of at most ``limit`` tokens; None where there is nothing new."""
        start, stop = self._taken, len(self.tokens)
        if limit is not None:
            stop = min(stop, start + limit)
        reason = self.finish_reason if stop == len(self.tokens) else None
        if reason == "error":
            reason = None  # what broke off has no end of its own: the error follows
        if self.complete or (start == stop and reason is None):
            return None
        for token in self.tokens[start:stop]:
            self._text.feed(token)
        ready = self._text.take() if reason is None else self._text.finish()
        self._taken, self.complete = stop, reason is not None
        return Piece(self, start, stop, ready, "".join([text for _, text in ready]), reason)


class Generation:
    """A request in the engine. Close it in any case; that ends what has not ended.

    Args:
        asked: what to run.
        worker: runs it.
        metrics: counts it.
        decoder: the model's tokenizer.
        account: of the request.
        streamed: whether the client wants to see every delta, or only the whole.
    """

    def __init__(
        self, asked: Asked, worker: Worker, metrics: ServerMetrics, decoder: Decoder, account: Account, *, streamed: bool
    ) -> None:
        self.asked = asked
        self._account = account
        self._worker = worker
        self._metrics = metrics
        self._decoder = decoder
        self._streamed = streamed
        self._news = asyncio.Event()
        self._fresh = False
        """Something came that neither ``write`` nor ``wait`` has been told of."""
        self._fault: Exception | None = None
        """Raised by ``write``."""
        self.write: Callable[[], bool] | None = None
        """Writes what is new of a stream there and then; False where it cannot, or where that was the end: whoever waits is
        woken then."""
        self._timer: asyncio.TimerHandle | None = None
        self._ids: list[int] = []
        self._left = 0
        """Sequences that the engine has and that have not ended."""
        self._computed: float | None = None
        """When the oldest delta was computed that nobody has woken up for; of an answer that is sent whole, the last one."""
        self._sending: float | None = None
        """The same of what is being sent."""
        self._deliveries: list[float] = []
        """Seconds of each that the metrics have not been told of."""
        self.error: ApiError | None = None
        self.closed = False
        params = asked.params
        self.seed = secrets.randbelow(2**63) if params.seed is None else params.seed
        """Asked for again, it gives the same tokens."""
        self.choices = [
            Choice(
                self,
                at * params.n + choice,
                prompt,
                derive_seed(self.seed, choice),
                TextStream(decoder, params.stop, params.min_tokens, prompt),
            )
            for at, prompt in enumerate(asked.prompts)
            for choice in range(params.n)
        ]

    async def start(self, end_tokens: frozenset[int], seconds: float) -> None:
        """Give all sequences to the engine, for at most so many seconds.

        Raises:
            ApiError: it cannot be served.
        """
        asked, params = self.asked, self.asked.params
        jobs = [
            Job(
                choice.prompt,
                params,
                end_tokens,
                choice.seed,
                StopWatch(self._decoder, params.stop, params.min_tokens, choice.prompt) if params.stop else None,
                asked.salt,
                asked.speculation,
                choice.times,
            )
            for choice in self.choices
        ]
        self._timer = asyncio.get_running_loop().call_later(seconds, lambda: self.cut(too_slow(seconds)))
        try:
            self._ids = await self._worker.add(jobs, self.choices)
        except RequestError as error:
            param = asked.text_field if error.field == "prompt" else error.field
            raise ApiError(400, str(error), param=param) from error
        finally:
            if not self._ids:
                self.close()
        if self.error:  # its time was up before the engine had it
            self._end("abort")

    def started(self) -> None:
        """The engine has one more of its sequences."""
        self._left += 1
        self._metrics.started.inc()

    async def wait(self) -> None:
        """Wait until there is something to take: anything at all of a stream, everything otherwise; or until it is over."""
        await self._news.wait()
        self._news.clear()
        if self._fault:
            raise self._fault
        self.sending()

    def sending(self) -> None:
        """What has come is being sent."""
        self._sending, self._computed = self._computed, None

    def delivered(self) -> None:
        """What was taken has been written to the client."""
        if self._sending is not None:
            self._deliveries.append(time.perf_counter() - self._sending)
            self._sending = None

    @property
    def finished(self) -> bool:
        """Has everything been taken?"""
        return all(choice.complete for choice in self.choices)

    def measure(self) -> None:
        """Tell the metrics what has been noted since the last time. While tokens come it is only noted: a pass leaves cold
        caches behind, in which this would take several times as long."""
        for choice in self.choices:
            choice.measure(self._metrics, self._account.arrived)
        for seconds in self._deliveries:
            self._metrics.delivery.observe(seconds)
        self._deliveries.clear()

    def received(self, choice: Choice, error: str | None, computed: float) -> None:
        """A choice got a delta."""
        if self._computed is None or not self._streamed:
            self._computed = computed
        if choice.finish_reason is not None:
            self._left -= 1
            choice.end = choice.finish_reason
            self._metrics.finished.labels(choice.finish_reason).inc()
        if choice.finish_reason == "error":
            self._break_off(ApiError(500, f"the answer broke off: {error}", code="generation_failed"), "abort")
        elif self._streamed or not self._left:
            self._fresh = True

    def flush(self) -> None:
        """All that a pass has given has been received."""
        if self._fresh:
            self._fresh = False
            try:
                written = self.write is not None and self.write()
            except Exception as fault:  # which is for whoever waits
                self._fault, written = fault, False
            if not written:
                self._news.set()

    def failed(self, error: ApiError) -> None:
        """The engine will say nothing more."""
        if self._left:
            self._break_off(error, "error")

    def cut(self, error: ApiError) -> None:
        """End it with an error, unless all of it has been computed."""
        if self._left or not self._ids:
            self._break_off(error, "abort")

    def close(self) -> None:
        """End what has not ended, in the engine too; idempotent."""
        if not self.closed:
            self.closed = True
            if self._timer:
                self._timer.cancel()
            self._end("abort")
            self.measure()
            self._news.set()

    def _break_off(self, error: ApiError, reason: str) -> None:
        if self.error is None:
            self.error = error
            self._end(reason)
            self._news.set()

    def _end(self, reason: str) -> None:
        if self._left:
            self._metrics.finished.labels(reason).inc(self._left)
            self._left = 0
            for choice in self.choices:
                choice.end = choice.end or reason
            self._worker.abort(self._ids)
