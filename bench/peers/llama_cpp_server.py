"""llama.cpp's own server, which xllamacpp runs inside this process; as many slots as requests in flight."""

from __future__ import annotations

import threading

import xllamacpp
from listening import SLOT_CONTEXT, options
from llama_cpp_peer import LOOKUP_DRAFT, LOOKUP_MATCH

if __name__ == "__main__":
    given = options()
    params = xllamacpp.CommonParams()
    params.model.path = str(given.model)
    params.port = given.port
    params.n_ctx = SLOT_CONTEXT * given.slots  # shared out evenly among the slots
    params.n_parallel = given.slots
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.threads
    params.cache_prompt = False
    params.cache_ram_mib = params.n_ctx_checkpoints = 0
    params.verbosity = -1
    if given.speculation:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n = LOOKUP_MATCH
        params.speculative.ngram_simple.size_m = LOOKUP_DRAFT
    server = xllamacpp.Server(params)
    threading.Event().wait()
