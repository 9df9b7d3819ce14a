"""A server with an engine that says at once what its script, the JSON after ``--model``, asks for."""

from __future__ import annotations

import json
import os
from typing import Any

from listening import Asked, Batching, options, serve


class Fake(Batching):
    def __init__(self, script: dict[str, Any]) -> None:
        self._script = script
        self._waiting: list[Asked] = []

    def add(self, asked: Asked) -> None:
        if asked.max_tokens == self._script.get("dies_at"):
            print("no more memory", flush=True)
            os._exit(3)
        self._waiting.append(asked)

    def advance(self) -> int:
        for asked in self._waiting:
            fails = asked.max_tokens == self._script.get("fails_at")
            asked.answer.put(ValueError("this one not") if fails else asked.ids)
        self._waiting.clear()
        return 0


if __name__ == "__main__":
    given = options()
    script = json.loads(str(given.model))
    if "refuses" in script:
        raise SystemExit(script["refuses"])
    serve(Fake(script), given.port)
