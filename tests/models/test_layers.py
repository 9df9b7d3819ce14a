"""Rotary frequencies and tables: parity with transformers for every scaling, and rows that depend on themselves alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_config
from scalings import SCALINGS

from specdec.models.architecture import from_config
from specdec.models.layers import RotaryTable, frequencies


def rope_of(scaling: dict, **overrides):
    return from_config(tiny_config(rope_scaling=scaling, **overrides), Path("config.json")).rope


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [8, 32, 33, 300])
def test_frequencies_match_transformers(name, length):
    """Each scaling's frequencies and attention factor are those of the reference library."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = rope_of(SCALINGS[name])
    config = LlamaConfig(**{k: v for k, v in tiny_config().items() if k != "rope_theta"}, rope_theta=10000.0)
    config.rope_parameters = {"rope_theta": 10000.0, "original_max_position_embeddings": 256, **SCALINGS[name]}
    initialise = ROPE_INIT_FUNCTIONS.get(rope.kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    expected, factor = initialise(config, seq_len=length)
    torch.testing.assert_close(frequencies(rope, length), expected, rtol=2e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("name", SCALINGS)
def test_a_row_depends_on_its_position_and_length_alone(name):
    """Bit for bit the same angles alone, in a crowd, in any order, and after the table has grown or forgotten."""
    rope = rope_of(SCALINGS[name], max_position_embeddings=64)
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(0, 700, (150,), generator=generator)
    lengths = positions + 1 + torch.randint(0, 40, (150,), generator=generator)
    table = RotaryTable(rope, torch.device("cpu"))
    cos, sin = table(positions, lengths)
    again = RotaryTable(rope, torch.device("cpu"))
    for i in reversed(range(150)):
        one_cos, one_sin = again(positions[i : i + 1], lengths[i : i + 1])
        assert torch.equal(one_cos[0], cos[i])
        assert torch.equal(one_sin[0], sin[i])


def test_angles_are_rounded_once_whatever_library_computes_them():
    """Tables are the same in every process: torch's float32 cosines differ between threads of a process's first call."""
    table = RotaryTable(rope_of(SCALINGS["linear"]), torch.device("cpu"))
    positions = torch.arange(700)
    cos, sin = table(positions, positions + 1)
    angles = (positions.float()[:, None] * frequencies(table.rope, 700)).tolist()
    assert cos.tolist() == torch.tensor([[math.cos(x) for x in row] for row in angles]).tolist()
    assert sin.tolist() == torch.tensor([[math.sin(x) for x in row] for row in angles]).tolist()


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_length_decides_where_scaling_depends_on_it(name):
    """A prompt row goes by the length of its prompt, so the same position has other angles in a longer prompt."""
    table = RotaryTable(rope_of(SCALINGS[name], max_position_embeddings=32), torch.device("cpu"))
    positions = torch.tensor([5, 5, 5])
    cos, _ = table(positions, torch.tensor([6, 32, 33]))
    assert torch.equal(cos[0], cos[1])
    assert not torch.equal(cos[0], cos[2])


@pytest.mark.parametrize("name", ["linear", "yarn", "llama3"])
def test_length_does_not_matter_elsewhere(name):
    """Static scalings give a position the same angles in every context."""
    table = RotaryTable(rope_of(SCALINGS[name]), torch.device("cpu"))
    cos, sin = table(torch.tensor([5, 5]), torch.tensor([6, 250]))
    assert torch.equal(cos[0], cos[1])
    assert torch.equal(sin[0], sin[1])


def test_memory_of_length_dependent_tables_is_bounded():
    """A long generation under dynamic scaling meets a new length at every token and must not keep them all."""
    table = RotaryTable(rope_of(SCALINGS["dynamic"], max_position_embeddings=32), torch.device("cpu"))
    for position in range(32, 232):
        table(torch.tensor([position]), torch.tensor([position + 1]))
    assert len(table._memo) <= 64
