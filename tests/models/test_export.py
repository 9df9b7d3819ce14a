"""What is exported is loaded again as the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_weights, tiny, tiny_config

from specdec.models.architecture import from_config
from specdec.models.export import save_model, to_config
from specdec.models.layers import Rope, frequencies
from specdec.models.tokenizer import Tokenizer

HALF = [1.0 + 0.25 * i for i in range(8)]

CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "eos_token_id": [3, 9]}),
    ("llama", {"eos_token_id": None, "rope_theta": 5e5}),
    ("mistral", {"sliding_window": 8}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3", {"attention_bias": True, "head_dim": 32}),
    *(
        ("llama", {"rope_scaling": {"rope_type": kind, "original_max_position_embeddings": 64, **values}})
        for kind, values in {
            "linear": {"factor": 2.0},
            "dynamic": {"factor": 3.0},
            "yarn": {"factor": 4.0, "beta_fast": 20.0, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False},
            "longrope": {"short_factor": HALF, "long_factor": HALF[::-1]},
            "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        }.items()
    ),
]


@pytest.mark.parametrize(("family", "settings"), CONFIGS)
def test_a_config_is_read_as_the_architecture_that_it_was_written_from(family: str, settings: dict[str, Any]) -> None:
    a = from_config(tiny_config(family, **settings), Path("config.json"))
    assert from_config(to_config(a), Path("config.json")) == a


def test_divisors_of_a_gguf_file_have_an_equal() -> None:
    """llama.cpp keeps Llama 3's scaling as divisors of each frequency."""
    from dataclasses import replace

    rope = Rope(kind="divided", dim=16, theta=1e4, context=256, short_factor=tuple(HALF))
    a = replace(from_config(tiny_config(), Path("config.json")), rope=rope)
    again = from_config(to_config(a), Path("config.json")).rope
    for length in (10, 256, 1000):
        torch.testing.assert_close(frequencies(again, length), frequencies(rope, length))
    assert again.attention_factor == 1.0


def test_a_folder_is_the_model_and_the_tokenizer_that_it_was_written_from(tmp_path: Path) -> None:
    values = tiny_config("qwen2", tie_word_embeddings=True)
    source = tiny(tmp_path / "source", "qwen2", tie_word_embeddings=True)
    tokenizer = Tokenizer.from_folder(source)
    weights = random_weights(values, 0)
    save_model(tmp_path / "out", from_config(values, source), weights, tokenizer)
    from specdec.models.checkpoint import CheckpointWeights

    read = CheckpointWeights(tmp_path / "out")
    for name, value in weights.items():
        take = read.matrix(name, *value.shape) if value.dim() == 2 else read.vector(name, *value.shape)
        assert torch.equal(take, value)
    read.check_all_used()
    again = Tokenizer.from_folder(tmp_path / "out")
    conversation = [{"role": "user", "content": "Grüße <|eos|> 🙂"}]
    assert again.chat(conversation) == tokenizer.chat(conversation)
    assert again.pieces == tokenizer.pieces
    assert (again.prefix, again.special_tokens) == (tokenizer.prefix, tokenizer.special_tokens)
    assert (again.special_ids, again.eos_id) == (tokenizer.special_ids, tokenizer.eos_id)
