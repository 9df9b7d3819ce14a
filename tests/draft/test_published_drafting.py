"""Published heads draft through the engine what the originals would: features, positions, feedback and vocabulary together.

The reference knows the hidden states that transformers computes and the tensors under their published names, and runs the
head over the whole text from the start.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checkpoints import tiny
from published_heads import (
    N_LAYERS,
    Tensors,
    eagle1,
    eagle1_reference,
    eagle3,
    eagle3_layer,
    medusa,
    medusa_reference,
    rms_norm,
    speculators,
    write,
)
from torch import Tensor

from specdec import kernels
from specdec.config import EngineConfig, SamplingParams, SpeculationConfig
from specdec.engine import Engine
from specdec.models.load import load_model
from specdec.models.source import resolve
from specdec.types import Draft

CPU = torch.device("cpu")
TEXT = list(b"It was the best of times, it was the")
DEPTH = 3


class Original:
    """The target by transformers, with what the original heads take of it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        with torch.no_grad():
            states = self.model.model(torch.tensor([TEXT]), output_hidden_states=True)
        self.final = states.last_hidden_state[0]  # [T, d], after the norm
        self.inner = torch.cat([states.hidden_states[i][0] for i in (2, N_LAYERS // 2, N_LAYERS - 3)], -1)  # [T, 3 d]
        self.head = self.model.lm_head.weight.detach()
        self.pending = int((self.final[-1] @ self.head.t()).argmax())

    def embedded(self, tokens: list[int], own: Tensor | None) -> Tensor:
        """[T', d]"""
        return F.embedding(torch.tensor(tokens), self.model.get_input_embeddings().weight.detach() if own is None else own)


def eagle1_chain(original: Original, w: Tensors) -> list[int]:
    """Greedy tokens after the pending one. Row i has the feature of token i and the embedding of token i + 1."""
    features, tokens = original.final, [*TEXT[1:], original.pending]
    for _ in range(DEPTH):
        states = eagle1_reference(w, features, original.embedded(tokens, w.get("embed_tokens.weight")))
        tokens.append(int((states[-1] @ original.head.t()).argmax()))
        features = torch.cat([features, states[-1:]])  # the head's own state stands in for the feature
    return tokens[-DEPTH:]


def eagle3_chain(original: Original, w: Tensors, normed: bool) -> list[int]:
    stream, tokens = original.inner @ w["fc.weight"].t(), [*TEXT[1:], original.pending]
    for _ in range(DEPTH):
        states = eagle3_layer(w, stream, original.embedded(tokens, w.get("embed_tokens.weight")), normed=normed)
        best = int((rms_norm(states[-1], w["norm.weight"]) @ w["lm_head.weight"].t()).argmax())
        tokens.append(best + int(w["d2t"][best]))
        stream = torch.cat([stream, states[-1:]])
    return tokens[-DEPTH:]


def medusa_chain(original: Original, w: Tensors) -> list[int]:
    return [int(medusa_reference(w, k, 2, original.final[-1]).argmax()) for k in range(DEPTH)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model"), num_hidden_layers=N_LAYERS)


@pytest.fixture(scope="module")
def original(model: Path) -> Original:
    return Original(model)


def drafted(model: Path, head: Path) -> Draft:
    """What is proposed right after the prompt, one branch wide."""
    chosen = kernels.select(CPU)
    config = SpeculationConfig(
        drafters=("trained",),
        trained=str(head),
        trained_depth=DEPTH,
        trained_width=1,
        trained_nodes=DEPTH,
        trained_min_probability=1e-9,
        trained_precision="fp32",
    )
    engine = Engine(
        load_model(resolve(str(model)), "fp32", chosen, CPU), chosen, EngineConfig(speculation=config, self_test=False)
    )
    (drafter,) = engine.drafters
    engine.add(TEXT, SamplingParams(temperature=0, max_tokens=8), frozenset(), 0)
    engine.step()
    (sequence,) = engine._sequences.values()
    assert len(sequence.tokens) == len(TEXT) + 1
    (draft,) = drafter.propose([sequence], [DEPTH])  # not by the engine, which asks when that pays
    return draft


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "speculators", "medusa"])
def test_the_first_draft_is_that_of_the_original(tmp_path, model: Path, original: Original, name: str) -> None:
    """Three tokens in a row, so that what is fed back counts too."""
    make = {"eagle1": eagle1, "eagle3": eagle3, "speculators": lambda: speculators("eagle3"), "medusa": lambda: medusa(3, 2)}
    config, tensors = make[name]()
    expected = {
        "eagle1": lambda: eagle1_chain(original, tensors),
        "eagle3": lambda: eagle3_chain(original, tensors, normed=False),
        "speculators": lambda: eagle3_chain(original, tensors, normed=True),
        "medusa": lambda: medusa_chain(original, tensors),
    }
    draft = drafted(model, write(tmp_path / "head", config, tensors))
    assert draft.tree.tokens == tuple(expected[name]())
    assert draft.tree.parents == (-1, 0, 1)
