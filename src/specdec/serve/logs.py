"""The server's log: a line of text or a line of JSON for each record, on stderr.

Records of requests carry their facts (``Account``); in JSON these are fields, in text they follow as name=value.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """One object per line, whatever a message contains."""

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values, default=str)


class TextFormatter(logging.Formatter):
    """A line for people; a value with spaces, quotes or line ends is written as a JSON string."""

    def format(self, record: logging.LogRecord) -> str:
        facts = [f"{name}={_value(value)}" for name, value in _facts(record).items()]
        line = " ".join([_time(record), record.levelname.lower(), record.getMessage(), *facts])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure(form: LogFormat) -> None:
    """Send what this package and the HTTP server log to stderr: requests and warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("specdec").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").addFilter(is_news)


def is_news(record: logging.LogRecord) -> bool:
    """False for uvicorn's complaint about a WebSocket that was refused with a response, which it takes for none at all; the
    request's own line tells of it."""
    return record.getMessage() != "ASGI callable returned without completing handshake."


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    facts: dict[str, Any] = getattr(record, "facts", {})
    return facts


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ",".join(f"{name}:{n}" for name, n in value.items())
    text = str(value)
    return text if text.isascii() and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)
