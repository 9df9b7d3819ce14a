"""Reading the body of a request, within the limits of size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from specdec.config import ServeConfig
from specdec.serve.errors import ApiError

SMALL = 65_536
"""Bytes of a body that is parsed on the spot; longer ones beside the event loop."""


async def read_body(request: Request, config: ServeConfig) -> bytes:
    """All of it. Raises ApiError."""
    most, seconds = config.max_body_bytes, config.body_seconds
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise ApiError(415, f"the body is encoded as {coding!r}: send it as it is", code="unsupported_encoding")
    too_large = ApiError(413, f"the body is larger than the {most} bytes that this server takes", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                data += part
                if len(data) > most:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:g} s", code="body_timeout") from None
    return bytes(data)
