"""The rotary scalings that config files ask for, with an original context of 32 so that short prompts reach past it."""

from __future__ import annotations

LONGROPE = {
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    "original_max_position_embeddings": 32,
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
    "yarn-mscale": {
        "rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3, "original_max_position_embeddings": 32,
    },
    "yarn-betas": {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 0.9,
    },
    "longrope": {"rope_type": "longrope", **LONGROPE},
    "longrope-factor": {"rope_type": "longrope", "factor": 6.0, **LONGROPE},
    "llama3": LLAMA3,
}  # fmt: skip
