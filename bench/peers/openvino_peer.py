"""OpenVINO GenAI on the GGUF file, whose Q4_1 and Q8_0 blocks it reads as compressed weights of four and eight bits.

Prompt lookup is a setting of the pipeline. Prefix caching, on by default, is off.
"""

from __future__ import annotations

import time

import numpy as np
import openvino
import openvino_genai as genai
from protocol import CONTEXT, Answer, Engine, Request, Settings, run_worker, versions

LOOKUP_MATCH = 2
LOOKUP_DRAFT = 3
"""Prompt lookup: longest match looked for, and tokens drafted then."""


class OpenVino(Engine):
    modes = ("plain", "prompt lookup")

    def __init__(self, settings: Settings) -> None:
        self.versions = {
            **versions("openvino-genai", "openvino"),
            "inference precision": str(openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT")),
        }
        self._end_tokens = settings.end_tokens
        self._pipeline = _pipeline(settings)

    def answer(self, request: Request) -> Answer:
        config = genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.do_sample = False
        config.apply_chat_template = False
        config.stop_token_ids = set(self._end_tokens)
        if request.mode != "plain":
            config.num_assistant_tokens = LOOKUP_DRAFT
            config.max_ngram_size = LOOKUP_MATCH
        started = time.perf_counter()
        ids = np.array([request.token_ids], dtype=np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        result = self._pipeline.generate(inputs, config)
        seconds = time.perf_counter() - started
        tokens = list(result.tokens[0])
        first = result.perf_metrics.get_ttft().mean / 1000
        return Answer(tokens, seconds, first, self._pipeline.get_tokenizer().decode(tokens))


def _pipeline(settings: Settings) -> genai.LLMPipeline:
    scheduling = genai.SchedulerConfig()
    scheduling.enable_prefix_caching = False
    scheduling.max_num_batched_tokens = CONTEXT
    properties = {"prompt_lookup": True} if settings.mode != "plain" else {}
    return genai.LLMPipeline(
        settings.model, "CPU", scheduler_config=scheduling, INFERENCE_NUM_THREADS=settings.threads, **properties
    )


if __name__ == "__main__":
    run_worker(OpenVino)
