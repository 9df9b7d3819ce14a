"""Load on a server through real sockets: many clients at once, some of which go away."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

ROUTE = "/v1/completions"


@dataclass
class Tally:
    """What became of the requests."""

    finished: int = 0
    cancelled: int = 0
    wrong: list[Any] = field(default_factory=list)
    """Answers that are not the expected ones: index of the body, and what came."""


async def storm(
    url: str,
    bodies: Sequence[dict[str, Any]],
    expected: Sequence[list[int]],
    *,
    clients: int,
    cancels: float,
    seed: int,
    more: Callable[[int], bool],
) -> Tally:
    """Ask for random bodies until ``more`` of the number asked so far says no.

    A share ``cancels`` of the clients hangs up, before anything has come or in the middle of the stream; of the others, half
    stream. Answers are compared with the tokens that are ``expected``.
    """
    rng, tally, asked = random.Random(seed), Tally(), 0
    limits = httpx.Limits(max_connections=clients)

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal asked
        while more(asked):
            asked += 1
            index = rng.randrange(len(bodies))
            if rng.random() < cancels:
                await hang_up(http, bodies[index], rng)
                tally.cancelled += 1
                continue
            tokens = await (streamed if rng.random() < 0.5 else whole)(http, bodies[index])
            tally.finished += 1
            if tokens != expected[index]:
                tally.wrong.append((index, tokens))

    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, verify=False) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    return tally


async def whole(http: httpx.AsyncClient, body: dict[str, Any]) -> list[int]:
    """The tokens of an answer."""
    response = await http.post(ROUTE, json=body)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


async def streamed(http: httpx.AsyncClient, body: dict[str, Any], frames: int | None = None) -> list[int]:
    """The tokens of a stream, which must end well; or of its first so many frames, and then the client is gone."""
    tokens: list[int] = []
    async with http.stream("POST", ROUTE, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]" or frames == 0:
                return tokens
            if line:
                frame = json.loads(line.removeprefix("data: "))
                assert "error" not in frame, frame
                tokens += frame["choices"][0]["token_ids"]
                frames = frames and frames - 1
    raise AssertionError("a stream ended without its end mark")


async def hang_up(http: httpx.AsyncClient, body: dict[str, Any], rng: random.Random) -> None:
    """Ask and go: after a few frames, or after some milliseconds whatever has come."""
    if rng.random() < 0.5:
        await streamed(http, body, rng.randint(1, 4))
        return
    try:
        async with asyncio.timeout(rng.uniform(0, 0.05)):
            await (streamed if rng.random() < 0.5 else whole)(http, body)
    except TimeoutError:
        pass


def for_seconds(seconds: float) -> Callable[[int], bool]:
    end = time.monotonic() + seconds
    return lambda asked: time.monotonic() < end
