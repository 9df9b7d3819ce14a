"""What goes wrong, told as OpenAI's clients expect it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """A request that gets no answer, or an answer that breaks off.

    Args:
        status: of the HTTP response, where none has begun.
        message: what is wrong and what to do.
        param: the field of the request that is at fault.
        code: a word for programs.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON, the same in a response and within a stream."""
        return {"error": {"message": self.message, "type": _type(self.status), "param": self.param, "code": self.code}}


def _type(status: int) -> str:
    known = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    return known.get(status, "invalid_request_error" if status < 500 else "server_error")


def engine_failed() -> ApiError:
    return ApiError(503, "the engine has failed and answers no more; the server must be restarted", code="engine_failed")


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})


def too_slow(seconds: float) -> ApiError:
    return ApiError(504, f"the answer took longer than the {seconds:g} s that this server allows", code="timeout")
