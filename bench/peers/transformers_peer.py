"""Hugging Face transformers on the exported folder: plain decoding and prompt lookup.

Assisted decoding is left out: it needs a smaller model with the same vocabulary, and there is none here.
"""

from __future__ import annotations

import time

import torch
import transformers
from protocol import Answer, Engine, Request, Settings, run_worker, versions

LOOKUP_MATCH = 3
LOOKUP_DRAFT = 5
"""Prompt lookup: longest match looked for, and tokens drafted then."""


NATIVE_BF16 = torch.cpu._is_avx512_bf16_supported()


class Transformers(Engine):
    # Without instructions for bf16, one row is still faster in bf16, for half the bytes, and many rows far slower.
    modes = ("plain", "prompt lookup") if NATIVE_BF16 else ("plain", "prompt lookup", "plain bf16")

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        dtype = torch.bfloat16 if NATIVE_BF16 or settings.mode == "plain bf16" else torch.float32
        self.versions = {**versions("transformers", "torch"), "precision": str(dtype).removeprefix("torch.")}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model)
        self._end_tokens = list(settings.end_tokens)

    def answer(self, request: Request) -> Answer:
        lookup = {"prompt_lookup_num_tokens": LOOKUP_DRAFT, "max_matching_ngram_size": LOOKUP_MATCH}
        first = _FirstToken()
        started = time.perf_counter()
        ids = torch.tensor([request.token_ids])
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=request.max_tokens,
                eos_token_id=self._end_tokens,
                pad_token_id=self._end_tokens[0],
                streamer=first,
                **(lookup if request.mode == "prompt lookup" else {}),
            )
        seconds = time.perf_counter() - started
        tokens = out[0, ids.shape[1] :].tolist()
        return Answer(tokens, seconds, (first.at or time.perf_counter()) - started, str(self._tokenizer.decode(tokens)))


class _FirstToken(transformers.generation.streamers.BaseStreamer):
    """Notes when the first new token came; what ``generate`` puts before it is the prompt."""

    def __init__(self) -> None:
        self.at: float | None = None
        self._puts = 0

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


if __name__ == "__main__":
    run_worker(Transformers)
