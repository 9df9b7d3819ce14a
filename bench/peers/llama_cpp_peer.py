"""llama.cpp through its own server, which xllamacpp runs inside this process.

Speculation is a setting of the server. Requests go to its completion route, which
takes token ids and gives them back. The whole answer comes at once, so that nothing is lost to events; the time to the
first token is the server's own.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import xllamacpp
from protocol import CONTEXT, Answer, Engine, Request, Settings, run_worker, versions

LOOKUP_MATCH = 3
LOOKUP_DRAFT = 3
"""Prompt lookup: tokens that must match, and tokens drafted then. The server's defaults (12 and 48) draft too seldom here."""


class LlamaCpp(Engine):
    modes = ("plain", "prompt lookup")

    def __init__(self, settings: Settings) -> None:
        self.versions = {**versions("xllamacpp"), "kernels": xllamacpp.get_system_info().strip(), "file": settings.model.name}
        self._server = _server(settings)

    def answer(self, request: Request) -> Answer:
        started = time.perf_counter()
        answer = _post(
            self._server,
            {
                "prompt": request.token_ids,
                "n_predict": request.max_tokens,
                "temperature": 0,
                "top_k": 1,
                "cache_prompt": False,
                "return_tokens": True,
            },
        )
        seconds = time.perf_counter() - started
        return Answer(answer["tokens"], seconds, answer["timings"]["prompt_ms"] / 1000, answer["content"])


def _server(settings: Settings) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = str(settings.model)
    params.n_ctx = CONTEXT
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings.threads
    params.cache_prompt = False
    params.cache_ram_mib = params.n_ctx_checkpoints = 0
    params.verbosity = -1
    if settings.mode != "plain":
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n = LOOKUP_MATCH
        params.speculative.ngram_simple.size_m = LOOKUP_DRAFT
    return xllamacpp.Server(params)


def _post(server: xllamacpp.Server, body: Mapping[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection(urlsplit(server.listening_address).netloc)
    try:
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise RuntimeError(f"the server answered {response.status}: {data.decode(errors='replace')}")
    answer: dict[str, Any] = json.loads(data)
    return answer


if __name__ == "__main__":
    run_worker(LlamaCpp)
