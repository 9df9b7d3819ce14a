"""vLLM's CPU build on the exported folder: plain decoding and its n-gram speculation.

Speculation is a setting of the engine; prefix caching, on by default, is off.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from protocol import CONTEXT, Answer, Engine, Request, Settings, SkippedError, run_worker, versions

LOOKUP_MATCH = 3
LOOKUP_DRAFT = 3
"""Prompt lookup: longest match looked for, and tokens drafted then."""
CACHE_GIB = 1


class Vllm(Engine):
    modes = ("plain", "prompt lookup")

    @classmethod
    def environment(cls, threads: int) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(Path(sys.prefix) / "lib" / "libiomp5.so"),  # as vLLM asks for; it comes with intel-openmp
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, without messages between two
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }

    def __init__(self, settings: Settings) -> None:
        try:
            import torch
            import vllm

            self._vllm = vllm
            self._native_bf16 = torch.cpu._is_avx512_bf16_supported()
            self._llm = self._engine(settings)
        except Exception as error:  # what a processor or a system lacks shows in errors of every kind
            raise SkippedError(f"vLLM does not start on this machine: {type(error).__name__}: {error}") from error
        config = self._llm.llm_engine.vllm_config.model_config
        self.versions = {**versions("vllm-cpu", "torch"), "dtype": str(config.dtype).removeprefix("torch.")}
        self._end_tokens = list(settings.end_tokens)

    def answer(self, request: Request) -> Answer:
        params = self._vllm.SamplingParams(
            temperature=0, max_tokens=request.max_tokens, stop_token_ids=self._end_tokens, detokenize=False
        )
        started = time.perf_counter()
        (output,) = self._llm.generate([{"prompt_token_ids": request.token_ids}], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = list(output.outputs[0].token_ids)
        first = output.metrics.first_token_latency
        return Answer(tokens, seconds, first, self._llm.get_tokenizer().decode(tokens))

    def _engine(self, settings: Settings) -> Any:
        speculation = {
            "method": "ngram",
            "num_speculative_tokens": LOOKUP_DRAFT,
            "prompt_lookup_max": LOOKUP_MATCH,
            "prompt_lookup_min": 1,
        }
        return self._vllm.LLM(
            str(settings.model),
            max_model_len=CONTEXT,
            max_num_seqs=1,
            dtype="auto" if self._native_bf16 else "float32",  # oneDNN refuses bf16 on other processors
            enable_prefix_caching=False,
            disable_log_stats=False,  # they hold the time of the first token
            speculative_config=speculation if settings.mode != "plain" else None,
        )


if __name__ == "__main__":
    run_worker(Vllm)
