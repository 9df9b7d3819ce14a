"""A worker without an engine, for the tests: its ``--model`` is JSON that says how it behaves.

It answers ``max_tokens`` tokens in ``max_tokens`` hundredths of a second by its own account, and logs each request and process.
"""

import json
import os
import sys
import time
from pathlib import Path

from protocol import Answer, Engine, Request, Settings, SkippedError, run_worker


class Fake(Engine):
    modes = ("plain", "fast")

    def __init__(self, settings: Settings) -> None:
        self.script = json.loads(str(settings.model))
        print("an engine that prints where answers belong")
        if reason := self.script.get("skipped"):
            raise SkippedError(reason)
        self.versions = {
            "fake": "1",
            "threads": str(settings.threads),
            "speed": settings.mode,
            "environment": os.environ["FAKE_THREADS"],
        }

    @classmethod
    def environment(cls, threads: int) -> dict[str, str]:
        return {"FAKE_THREADS": f"{threads} threads"}

    def answer(self, request: Request) -> Answer:
        if log := self.script.get("log"):
            with Path(log).open("a") as file:
                file.write(
                    json.dumps([self.script["name"], request.mode, request.id, request.max_tokens, time.time(), os.getpid()])
                    + "\n"
                )
        if request.id == self.script.get("dies_at"):
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        if request.id == self.script.get("fails_at"):
            raise ValueError("that prompt again")
        if request.id == self.script.get("hangs_at"):
            time.sleep(60)
        if request.id == self.script.get("silent_at"):
            return Answer([], 0.1, 0.1, "")
        print("more print")
        speed = 2 if request.mode == "fast" else 1
        return Answer([7] * request.max_tokens, request.max_tokens / 100 / speed, 0.01, request.prompt)


if __name__ == "__main__":
    run_worker(Fake)
