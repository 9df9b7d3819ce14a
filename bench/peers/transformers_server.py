"""Hugging Face transformers' continuous batching behind a route; its own server needs more than the library.

Speculation does not go with it.
"""

from __future__ import annotations

import itertools

import torch
import transformers
from listening import Asked, Batching, options, serve
from transformers_peer import NATIVE_BF16

PATIENCE = 0.02
"""Seconds that results are waited for before new requests are looked for."""


class Manager(Batching):
    def __init__(self) -> None:
        given = options()
        torch.set_num_threads(given.threads)
        dtype = torch.bfloat16 if NATIVE_BF16 else torch.float32
        model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype, attn_implementation="sdpa")
        config = transformers.GenerationConfig(do_sample=False, eos_token_id=list(given.end_tokens), pad_token_id=0)  # type: ignore[no-untyped-call]
        batching = transformers.ContinuousBatchingConfig(
            allow_block_sharing=False, max_requests_per_batch=given.slots, num_blocks=16 * given.slots, max_batch_tokens=512
        )
        self._end_tokens = list(given.end_tokens)
        self._manager = model.init_continuous_batching(config, batching)
        self._manager.start()
        self._ids = itertools.count()
        self._running: dict[str, Asked] = {}
        self.port = given.port

    def add(self, asked: Asked) -> None:
        name = f"request-{next(self._ids)}"
        self._running[name] = asked
        self._manager.add_request(asked.ids, request_id=name, max_new_tokens=asked.max_tokens, eos_token_id=self._end_tokens)

    def advance(self) -> int:
        result = self._manager.get_result(timeout=PATIENCE)
        if result is not None and result.is_finished():
            answer = RuntimeError(result.error) if result.error else list(result.generated_tokens)
            self._running.pop(result.request_id).answer.put(answer)
        elif result is None and not self._manager.is_running():
            for asked in self._running.values():
                asked.answer.put(RuntimeError("the loop of continuous batching has ended"))
            self._running.clear()
        return len(self._running)


if __name__ == "__main__":
    manager = Manager()
    serve(manager, manager.port)
