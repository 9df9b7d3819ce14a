"""A trained head that drafts fewer tokens: the rows of the output matrix are most of what an ask reads.

What is cut off are the tokens that the target says most seldom. A small head hardly ever foresees those, so far fewer tokens
than it pays to train with are enough to draft with; the head itself stays as it is.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from specdec import kernels
from specdec.config import ConfigError
from specdec.llm import LLM
from specdec.models.decoder import Decoder
from specdec.models.fingerprint import Fingerprint
from specdec.models.head_files import LoadedHead, load_head, save_head
from specdec.models.heads import filled
from specdec.train import vocabulary
from specdec.train.data import Answer, held_out, read_answers
from specdec.train.evaluate import Measured, measure
from specdec.train.losses import Output
from specdec.train.session import always_drafted, batches_of
from specdec.train.settings import TrainConfig

_SECOND = "markov.0.second.weight"
"""The only tensor of a head whose rows are the tokens that it drafts, where the output matrix is the target's."""


def narrowed(loaded: LoadedHead, answers: list[Answer], size: int, always: frozenset[int]) -> LoadedHead:
    """The same head over the most frequent of its tokens.

    Args:
        answers: what is counted.
        size: tokens that are left.
        always: those of its tokens that stay however rare.

    Raises:
        ConfigError: it has no more tokens than that, or brings an output matrix of its own.
    """
    config = loaded.config
    if config.own_output:
        raise ConfigError(f"{loaded.name} brings its own output matrix; only heads that take the target's can be narrowed")
    if not 0 < size < config.n_outputs:
        raise ConfigError(f"{loaded.name} drafts {config.n_outputs} tokens, so fewer are needed, got {size}")
    had = torch.arange(config.vocab_size) if loaded.vocabulary_ids is None else loaded.vocabulary_ids
    ids = vocabulary.choose(answers, size, config.vocab_size, always, among=had)
    places = torch.empty(config.vocab_size, dtype=torch.int64)
    places[had] = torch.arange(len(had))
    tensors = dict(loaded.head.state_dict())
    if _SECOND in tensors:
        tensors[_SECOND] = tensors[_SECOND][places[ids]]
    head = filled(dataclasses.replace(config, vocabulary=size), tensors)
    return dataclasses.replace(loaded, head=head, vocabulary_ids=ids)


def narrow(llm: LLM, folder: Path, size: int, answers: Path, out: Path, cache: Path, share: float) -> tuple[float, Measured]:
    """Write a head with fewer tokens, measured again on the answers that its training did not see.

    Args:
        folder: of a trained head of this model.
        answers: those that it was trained on.
        cache: folder of the target's hidden states.
        share: of the prompts that was kept to measure on.

    Returns:
        Share of those answers' tokens that it can draft, and what was measured.

    Raises:
        ConfigError: it cannot be narrowed so far, or no answer was held out.
        ModelError: it cannot be read or written.
    """
    model = llm.engine.model
    if not isinstance(model, Decoder):
        raise ConfigError("drafters can be narrowed for models that run on this engine's own decoder")
    target = Fingerprint.of(model, llm.name)
    loaded = load_head(folder, target)
    every = [answer for answer in read_answers(answers, model.shape.vocab_size) if len(answer.tokens) - answer.n_prompt >= 2]
    kept = [answer for answer in every if held_out(answer, share)]
    learned = [answer for answer in every if not held_out(answer, share)]
    if not kept:
        raise ConfigError(f"{answers}: of {len(every)} answers none was held out to measure on")
    new = narrowed(loaded, learned, size, always_drafted(llm))
    ids = new.vocabulary_ids
    assert ids is not None
    config = TrainConfig(kind="eagle3" if new.config.recurrent else "medusa")
    batches = batches_of(model, llm.kernels, new.config.taps, new.config.normed, kept, cache, config)
    output = Output.of(model.head.rows(ids), ids, model.shape.vocab_size)
    found = measure(new.head.eval(), batches, model.embedding, output, kernels.select("cpu"), new.config.depth)
    covered = vocabulary.coverage(kept, ids)
    origin = {**loaded.provenance, "narrowed": {"from": loaded.config.n_outputs, "to": size, "coverage": covered}}
    save_head(
        out,
        new.head.bfloat16(),
        target=loaded.target or target,
        vocabulary_ids=ids,
        provenance=origin,
        measured=found.as_dict(),
    )
    return covered, found
