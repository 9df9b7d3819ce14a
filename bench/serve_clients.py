"""Streaming clients in a process of their own, which loads nothing heavy; when each frame arrived, as JSON on stdout.

python bench/serve_clients.py http://127.0.0.1:8000 STREAMS TOKENS
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

PROMPT = "Write a long story about a lighthouse keeper and the sea."


async def stream(address: str, seed: int, tokens: int) -> list[float]:
    """The arrival times of one stream's frames, by the clock that all processes of a machine share."""
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = {"prompt": f"{seed}. {PROMPT}", "max_tokens": tokens, "ignore_eos": True, "seed": seed, "stream": True}
    data = json.dumps(body).encode()
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    times = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
        elif line.startswith(b"data: [DONE]"):
            break
    writer.close()
    return times


async def streams(address: str, n: int, tokens: int) -> list[list[float]]:
    """So many at once; the index is the seed."""
    return await asyncio.gather(*(stream(address, seed, tokens) for seed in range(n)))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(streams(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
