"""Frames in the middle of a stream are written as soon as a pass is over, past the application's layers and without waking a
task: the same frames, in order, however the client reads."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as Reference
from serving import PATIENCE, frames_of, slowed, until

from specdec.config import SamplingParams, ServeConfig
from specdec.llm import LLM
from specdec.metrics.histogram import Histogram
from specdec.serve.app import create_app
from specdec.serve.generation import Piece
from specdec.serve.schema import ChatBody, CompletionBody
from specdec.serve.shapes import ChatShape, CompletionShape, dump
from specdec.serve.stream import STRAIGHT

TEXTS = ["a", '"\\\n', "\u2028é\x00", "😀", " "]


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_frames_of_text_alone_are_those_of_the_general_kind(chat: bool, usage: bool, counted: bool) -> None:
    """They are put together from prepared parts, and no byte may tell."""
    asked = {"stream": True, "stream_options": {"include_usage": usage}, "return_token_ids": counted}
    shape: Any
    if chat:
        shape = ChatShape(ChatBody(messages=[{"role": "user", "content": "x"}], **asked), 'a "name"', None)  # type: ignore[arg-type]
    else:
        shape = CompletionShape(CompletionBody(prompt="x", **asked), 'a "name"', None)  # type: ignore[arg-type]
    choice: Any = SimpleNamespace(index=3, tokens=[5] * 9, prompt=[1], sources=[], logprobs=[])
    shape.frames(Piece(choice, 0, 1, [(0, "first")], "first", None))
    for text in ["", *TEXTS]:
        piece = Piece(choice, 1, 2, [(1, text)], text, None)
        frames = shape.frames(piece)
        assert frames == [dump(frame) for frame in shape._chunks(piece)]
        assert bool(frames) == bool(text or counted)
        assert all(frame.isascii() for frame in frames)


class Client:
    """Takes a stream through ``send``; what was written there and then, outside of any task, is counted."""

    def __init__(self, app: Any, take: Callable[[int], Awaitable[None]]) -> None:
        self.app, self.take = app, take
        self.data = b""
        self.straight = self.frames = 0
        self.ended = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.frames += 1
            self.straight += asyncio.current_task() is None
            await self.take(self.frames)
            self.data += message["body"]
            self.ended = not message["more_body"]

    async def ask(self, **body: Any) -> None:
        asked = [json.dumps({"prompt": [0], "stream": True, "temperature": 0, **body}).encode()]

        async def receive() -> Any:
            if not asked:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": asked.pop(), "more_body": False}

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
        scope |= {"scheme": "http", "root_path": "", "server": ("t", 1), "state": {STRAIGHT: self.send}}
        async with self.app.router.lifespan_context(self.app):
            await asyncio.wait_for(self.app(scope, receive, self.send), 30)

    @property
    def text(self) -> str:
        return "".join(choice["text"] for frame in frames_of(self.data) for choice in frame["choices"])


async def at_once(frame: int) -> None:
    """A client that keeps up."""


def fresh(words: LLM) -> LLM:
    """The model with an engine of its own."""
    return words.without_speculation()


def in_turns(llm: LLM, **config: Any) -> Any:
    """An application whose passes wait for what was given before, so that a quick engine does not outrun the event loop."""
    app = create_app(llm, ServeConfig(**config))
    app.state.service.worker.turn_seconds = PATIENCE
    return app


def whole(words: LLM, n: int) -> str:
    """The answer of so many tokens, unstreamed."""
    return fresh(words).generate([0], SamplingParams(max_tokens=n, temperature=0, ignore_eos=True))[0].text


def test_the_middle_of_a_stream_goes_straight(words: LLM) -> None:
    client = Client(in_turns(fresh(words)), at_once)
    asyncio.run(client.ask(max_tokens=40, ignore_eos=True))
    assert client.ended
    assert client.straight > 10
    assert client.text == whole(words, 40)


@pytest.mark.parametrize("slow", [{3}, {2, 3, 4}, set(range(2, 99))])
def test_what_a_slow_client_does_not_take_at_once_keeps_its_order(words: LLM, slow: set[int]) -> None:
    """What cannot be written there and then goes on in a task, and what comes in the meantime waits for it."""

    async def take(frame: int) -> None:
        if frame in slow:
            await asyncio.sleep(0.005)

    # Slow enough that not everything has come before the client takes its first frames.
    client = Client(in_turns(slowed(fresh(words), 0.002)), take)
    asyncio.run(client.ask(max_tokens=40, ignore_eos=True))
    assert client.ended
    assert client.straight
    assert client.text == whole(words, 40)


def test_a_client_that_takes_nothing_of_a_straight_frame_is_given_up(words: LLM) -> None:
    """And its request ends in the engine."""

    async def take(frame: int) -> None:
        if frame == 3:
            await asyncio.Event().wait()

    llm = fresh(words)
    client = Client(in_turns(llm, stalled_seconds=0.1), take)
    asyncio.run(client.ask(ignore_eos=True))
    assert client.straight
    assert not client.ended
    assert not llm.engine.has_work


def test_an_error_of_a_straight_write_ends_the_request(words: LLM) -> None:
    """It is raised where the request is answered, not lost on the event loop."""

    async def take(frame: int) -> None:
        if asyncio.current_task() is None:
            raise RuntimeError("no such message")

    llm = fresh(words)
    with pytest.raises(RuntimeError, match="no such message"):
        asyncio.run(Client(in_turns(llm), take).ask(ignore_eos=True))
    assert not llm.engine.has_work


def test_what_a_pass_gave_is_sent_before_the_next_one(words: LLM) -> None:
    """The engine waits for the event loop, where that is fast enough; and nothing but the first frame needs a task, so where
    many streams end together none waits for what has to be done at another's end."""
    llm, seen = fresh(words), []
    step = llm.engine.step

    def watched() -> Any:
        seen.append("pass")
        return step()

    async def take(frame: int) -> None:
        seen.append("frame")

    llm.engine.step = watched  # type: ignore[method-assign]
    client = Client(in_turns(llm), take)
    asyncio.run(client.ask(max_tokens=40, ignore_eos=True))
    assert client.ended
    assert client.straight == client.frames - 1
    told = "".join(what[0] for what in seen)
    assert told.strip("p").startswith("fp" * 20)
    assert "ff" not in told


def test_a_busy_event_loop_does_not_keep_the_engine(words: LLM) -> None:
    """It is waited for a moment only: passes go on while a frame takes its time."""
    llm, passes, turns = fresh(words), [], threading.Semaphore()
    step = llm.engine.step

    def watched() -> Any:
        if len(passes) < 3:  # else the engine could be done before the second frame is taken
            assert turns.acquire(timeout=PATIENCE)
        passes.append(1)
        return step()

    async def take(frame: int) -> None:
        if frame <= 2:
            turns.release()
        if frame == 2:
            before = len(passes)
            until(lambda: len(passes) >= before + 3)

    llm.engine.step = watched  # type: ignore[method-assign]
    app = create_app(llm, ServeConfig())
    app.state.service.worker.turn_seconds = 0.001
    asyncio.run(Client(app, take).ask(max_tokens=40, ignore_eos=True))


def test_a_rate_limited_stream_takes_its_time(words: LLM) -> None:
    """The shortcut would not keep to the rate, so there is none."""
    client = Client(create_app(fresh(words), ServeConfig(stream_rate=1000.0)), at_once)
    asyncio.run(client.ask(max_tokens=40, ignore_eos=True))
    assert (client.ended, client.straight) == (True, 0)


def test_a_histogram_is_collected_as_prometheus_own() -> None:
    values = [0.0, 0.1, 0.10001, 0.5, 1.0, 2.5, 1e9]
    registry, bounds = CollectorRegistry(), (0.1, 0.5, 1.0)
    reference = Reference("a:b", "What it is", registry=registry, buckets=bounds)
    own = Histogram("a:b", "What it is", bounds)
    for value in values:
        for _ in range(3):
            reference.observe(value)
        own.observe(value, 3)
    mine = CollectorRegistry()
    mine.register(own)
    lines = [
        [line for line in generate_latest(one).decode().splitlines() if "_created" not in line] for one in (registry, mine)
    ]
    assert lines[0] == lines[1]
