"""specdec itself, as a peer among peers: speculation off and on, with nothing remembered from earlier requests."""

from __future__ import annotations

import torch
from protocol import Answer, Engine, Request, Settings, run_worker, versions

from specdec.config import SamplingParams
from specdec.llm import LLM


class Specdec(Engine):
    modes = ("off", "on")

    def __init__(self, settings: Settings) -> None:
        torch.set_grad_enabled(False)
        on = LLM(str(settings.model), threads=settings.threads)
        self._llm = on if settings.mode == "on" else on.without_speculation()
        self.versions = {**versions("specdec", "torch"), "precision": on.precision, "kernels": on.kernels.name}

    def answer(self, request: Request) -> Answer:
        self._llm.engine.forget()
        params = SamplingParams(temperature=0, max_tokens=request.max_tokens, seed=0)
        (result,) = self._llm.generate([request.token_ids], params)
        if result.error:
            raise RuntimeError(result.error)
        return Answer(list(result.tokens), result.seconds, result.first_token_seconds, result.text)


if __name__ == "__main__":
    run_worker(Specdec)
