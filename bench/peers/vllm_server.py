"""vLLM's own OpenAI-compatible server; this process becomes it."""

from __future__ import annotations

import json
import os
import sys

from listening import SLOT_CONTEXT, options
from vllm_peer import LOOKUP_DRAFT, LOOKUP_MATCH, Vllm

if __name__ == "__main__":
    import torch

    given = options()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(given.model), "--host", "127.0.0.1",
        "--port", str(given.port), "--max-model-len", str(SLOT_CONTEXT), "--max-num-seqs", str(given.slots),
        "--dtype", "auto" if torch.cpu._is_avx512_bf16_supported() else "float32", "--no-enable-prefix-caching",
        "--served-model-name", "model",
    ]  # fmt: skip
    if given.speculation:
        lookup = {
            "method": "ngram",
            "num_speculative_tokens": LOOKUP_DRAFT,
            "prompt_lookup_max": LOOKUP_MATCH,
            "prompt_lookup_min": 1,
        }
        command += ["--speculative-config", json.dumps(lookup)]
    os.execve(command[0], command, {**os.environ, **Vllm.environment(given.threads)})
