"""OpenVINO GenAI's continuous batching, which comes without a server: its loop behind a route.

Without its prompt lookup.
"""

from __future__ import annotations

import itertools

import numpy as np
import openvino
import openvino_genai as genai
from listening import SLOT_CONTEXT, Asked, Batching, options, serve


class Pipeline(Batching):
    def __init__(self) -> None:
        given = options()
        scheduling = genai.SchedulerConfig()
        scheduling.enable_prefix_caching = False
        scheduling.max_num_seqs = given.slots
        scheduling.max_num_batched_tokens = SLOT_CONTEXT
        self._end_tokens = set(given.end_tokens)
        self._pipeline = genai.ContinuousBatchingPipeline(
            given.model, scheduling, "CPU", {"INFERENCE_NUM_THREADS": given.threads}
        )
        self._ids = itertools.count()
        self._running: list[tuple[Asked, genai.GenerationHandle, list[int]]] = []
        self.port = given.port

    def add(self, asked: Asked) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = asked.max_tokens
        config.do_sample = False
        config.apply_chat_template = False
        config.stop_token_ids = self._end_tokens
        ids = openvino.Tensor(np.array([asked.ids], dtype=np.int64))
        self._running.append((asked, self._pipeline.add_request(next(self._ids), ids, config), []))

    def advance(self) -> int:
        self._pipeline.step()
        left = []
        for asked, handle, tokens in self._running:
            if handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
            if handle.get_status() == genai.GenerationStatus.RUNNING:
                left.append((asked, handle, tokens))
            else:
                asked.answer.put(tokens)
        self._running = left
        return len(left)


if __name__ == "__main__":
    pipeline = Pipeline()
    serve(pipeline, pipeline.port)
