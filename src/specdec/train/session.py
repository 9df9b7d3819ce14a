"""From a model and prompts to a trained drafter in a folder."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from specdec import kernels
from specdec.bench.provenance import provenance
from specdec.config import ConfigError
from specdec.kernels.base import Kernels
from specdec.llm import LLM
from specdec.models.decoder import Decoder
from specdec.models.draft_notes import DraftNotes, save_notes
from specdec.models.export import save_model
from specdec.models.fingerprint import Fingerprint
from specdec.models.head_config import HeadConfig, HeadKind
from specdec.models.head_files import LoadedHead, save_head
from specdec.models.heads import Head, MedusaHead, Norm, make_head
from specdec.models.tokenizer import Tokenizer
from specdec.train import checkpoint, vocabulary
from specdec.train.batch import Batch
from specdec.train.cut import CutModel, check_layers, default_layers
from specdec.train.data import Answer, held_out, read_answers
from specdec.train.features import Store, Teacher
from specdec.train.loop import Run, Watch, grouped
from specdec.train.losses import Output
from specdec.train.report import write_report
from specdec.train.settings import GIGABYTE, TrainConfig
from specdec.train.unroll import Learner

FEWEST = 20
"""Answers to train on, at least."""


class Reporter(Watch, Protocol):
    """Is told everything that happens."""

    def answering(self, done: int, total: int, tokens: int) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of it."""

    head: Learner
    ids: Tensor | None
    """int64 [V']: the tokens that it drafts, where those are not all"""
    measured: dict[str, Any]
    history: list[dict[str, Any]]
    curve: list[list[float]]
    data: dict[str, Any]
    seconds: float
    started_from: str | None
    """The weights that it began with, where those had been trained before."""


def head_config(model: Decoder, config: TrainConfig, kind: HeadKind) -> HeadConfig:
    """What the head of a run is made of, for this model.

    Raises:
        ConfigError: the model has not the layers, or the settings do not go together.
    """
    a = model.architecture
    layers = a.n_layers
    taps = config.taps
    if taps is None:
        taps = (layers - 1,) if kind != "eagle3" else tuple(sorted({min(2, layers - 1), layers // 2, max(0, layers - 3)}))
    if max(taps) >= layers:
        raise ConfigError(f"taps must be layers of the model, 0 to {layers - 1}, got {taps}")
    return HeadConfig(
        kind=kind,
        hidden_size=a.hidden_size,
        vocab_size=a.vocab_size,
        taps=taps,
        normed=kind in ("medusa", "eagle"),
        vocabulary=config.vocabulary if 0 < config.vocabulary < a.vocab_size else None,
        rms_eps=a.rms_eps,
        depth=config.modules if kind == "mtp" else config.steps,
        blocks=config.blocks,
        correction=config.correction if kind == "medusa" else "none",
        rank=config.rank,
        n_heads=a.n_heads,
        n_kv_heads=a.n_kv_heads,
        head_dim=a.head_dim,
        ffn_size=config.ffn_size or a.ffn_size,
        rope_theta=a.rope.theta,
    )


def check(llm: LLM, config: TrainConfig, before: LoadedHead | None) -> Decoder:
    """The model of a run, if the run can be; asked before the model answers any prompts.

    Raises:
        ConfigError: settings do not go together, or make another head than the one before.
    """
    model = llm.engine.model
    if not isinstance(model, Decoder):
        raise ConfigError("drafters can be trained for models that run on this engine's own decoder")
    _plan(model, config)
    if before is not None:
        _check_same(before, model, config)
    return model


def train(
    llm: LLM,
    config: TrainConfig,
    answers: Path,
    out: Path,
    cache: Path,
    reporter: Reporter,
    before: LoadedHead | None = None,
) -> Trained:
    """Train a head on answers of the target.

    Args:
        answers: a file of ``data.make_answers``.
        out: the folder of the run; a run that is there is taken up.
        cache: the folder of hidden states, which several runs may share.
        before: a head whose weights and draft vocabulary the run begins with; None for untrained ones.

    Raises:
        ConfigError: the answers are too few or not this model's, settings do not go together or make another head than the one
            before, or the disk is full.
    """
    model = check(llm, config, before)
    make, taps, normed = _plan(model, config)
    usable = [a for a in read_answers(answers, model.shape.vocab_size) if len(a.tokens) - a.n_prompt >= 2]
    kept = [a for a in usable if held_out(a, config.held_out)]
    learned = [a for a in usable if not held_out(a, config.held_out)]
    if len(learned) < FEWEST or not kept:
        raise ConfigError(
            f"{answers}: {len(learned)} answers to learn from and {len(kept)} to measure on are too few: at least {FEWEST} and "
            "1 are needed; give more prompts, or hold out a larger share of them (held_out)"
        )
    digest = hashlib.sha256(answers.read_bytes()).hexdigest()[:16]
    started_from = None if before is None else before.weights or before.name
    about = {"model": llm.name, "precision": model.precision, "answers": digest, "started_from": started_from}
    checkpoint.agree(out, config, **about)

    device = model.device
    if before is not None and before.vocabulary_ids is not None:
        ids = before.vocabulary_ids.to(device)
    else:
        ids = vocabulary.choose(learned, config.vocabulary, model.shape.vocab_size, always_drafted(llm)).to(device)
    facts = {
        "answers": len(learned),
        "held_out_answers": len(kept),
        "tokens": sum(len(a.tokens) - a.n_prompt for a in learned),
        "digest": digest,
        "vocabulary": len(ids),
        "coverage": vocabulary.coverage(kept, ids.cpu()),
        "tasks": sorted({a.task for a in learned}),
    }
    reporter.note(
        f"{facts['answers']} answers ({facts['tokens']} tokens) to learn from, {facts['held_out_answers']} held out; "
        f"{len(ids)} tokens can be drafted, {facts['coverage']:.2%} of those said there"
    )
    output = Output.of(model.head.rows(ids), ids, model.shape.vocab_size)
    teacher = Teacher(model, llm.kernels, taps, normed)
    batches = batches_of(model, llm.kernels, taps, normed, kept, cache, config)
    torch.manual_seed(config.seed)
    head = make().to(device)
    if before is not None:
        head.load_state_dict(before.head.state_dict())
    elif not isinstance(head, CutModel):
        start(head, model, torch.cat([batch.features for batch in batches[:8]]))
    n_anchors = sum(len(a.tokens) - a.n_prompt - 1 for a in learned)
    embed = _embedding(model)
    shards = Store(teacher, learned, cache, int(config.cache_gb * GIGABYTE))
    run = Run(head, config, embed, output, kernels.select("cpu"), shards, n_anchors, batches, out)
    run.run(reporter)
    best = max(run.history, key=lambda entry: entry["tau"])
    cut = ids if len(ids) < model.shape.vocab_size else None
    return Trained(head, cut, best, run.history, run.curve, facts, run.seconds, started_from)


def batches_of(
    model: Decoder,
    kernels: Kernels,
    taps: tuple[int, ...],
    normed: bool,
    answers: Many[Answer],
    cache: Path,
    config: TrainConfig,
) -> list[Batch]:
    """Answers with the features of a head, all in memory."""
    store = Store(Teacher(model, kernels, taps, normed), answers, cache, int(config.cache_gb * GIGABYTE))
    return [Batch.of(group, model.device) for i in range(len(store)) for group in grouped(store[i], config.batch)]


def _plan(model: Decoder, config: TrainConfig) -> tuple[Callable[[], Learner], tuple[int, ...], bool]:
    """What makes the untrained drafter of a run, and the features that it learns from: taps of the target, normed or not."""
    if config.kind == "draft":
        layers = config.layers or default_layers(model.architecture.n_layers)
        check_layers(model.architecture, layers)
        return (lambda: CutModel(model, layers)), (), False
    shape = head_config(model, config, config.kind)

    return (lambda: make_head(shape)), shape.taps, shape.normed


def _check_same(before: LoadedHead, model: Decoder, config: TrainConfig) -> None:
    """Is a head for this model, and what a run makes with these settings?

    Raises:
        ConfigError: it is not; the message names what differs.
    """
    if config.kind == "draft":
        raise ConfigError(f"a draft model starts as layers of its target, not from a head such as {before.name}")
    if before.target is not None and (difference := before.target.difference(Fingerprint.of(model, "this model"))):
        raise ConfigError(f"{before.name} was trained for {before.target.name}, and this model is another: {difference}")
    had, wanted = dataclasses.asdict(before.config), dataclasses.asdict(head_config(model, config, config.kind))
    if config.kind in ("eagle", "eagle3"):
        had["depth"] = wanted["depth"]  # one layer, however many steps it is trained for
    if other := [key for key in wanted if wanted[key] != had[key]]:
        changes = ", ".join(f"{key} is {had[key]!r} there and {wanted[key]!r} here" for key in other)
        raise ConfigError(f"{before.name} is not the head that these settings make: {changes}")


@torch.no_grad()
def start(head: Head, model: Decoder, features: Tensor) -> None:
    """Give an untrained head the target's last norm, and what it reads a common scale.

    A residual stream is tens of times larger in late layers than in early ones, and a hundred times larger than embeddings.
    Left so, it would drown what an untrained layer adds to it, and training would hardly move.

    Args:
        features: [n, taps * d], of some rows.
    """
    if isinstance(head, MedusaHead):
        return
    d, device = head.config.hidden_size, model.device
    for norm in cast(list[Norm], [*head.norms]):
        norm.weight.copy_(model.norm)
    scale = features.view(len(features), -1, d).float().pow(2).mean((0, 2)).sqrt().to(device)  # [taps]
    if isinstance(head.fuse, nn.Linear):
        columns = head.fuse.weight.view(d, -1, d)  # [d, taps, d]
        columns.div_(scale[:, None])
        columns[:, -1] += torch.eye(d, device=device) / scale[-1]
    if head.config.kind == "eagle":  # nothing is normed before it is joined
        some = torch.arange(0, model.shape.vocab_size, 64, device=device)
        for join in cast(list[nn.Linear], [*head.joins]):
            join.weight[:, :d] /= model.embedding(some).pow(2).mean().sqrt()
            join.weight[:, d:] /= scale[-1]


def always_drafted(llm: LLM) -> frozenset[int]:
    """Tokens that a drafter can always draft: ends, line breaks, spaces and digits."""
    ids = set(llm.end_tokens)
    for text in ("\n", "\n\n", " ", *"0123456789", *".,:;!?()"):
        tokens = llm.tokenizer.encode(text, add_special=False)
        ids |= set(tokens) if len(tokens) == 1 else set()
    return frozenset(ids)


def _embedding(model: Decoder) -> Callable[[Tensor], Tensor]:
    def embed(ids: Tensor) -> Tensor:
        return model.embedding(ids)

    return embed


def save(llm: LLM, trained: Trained, out: Path) -> None:
    """Write the drafter with where it comes from and what was measured of it, so that the folder is a drafter.

    Raises:
        ModelError: it cannot be written.
    """
    model = llm.engine.model
    assert isinstance(model, Decoder)
    name = Path(llm.name).name if Path(llm.name).is_absolute() else llm.name
    origin = provenance(model=name, precision=model.precision, data=trained.data, hours=round(trained.seconds / 3600, 3))
    if trained.started_from is not None:
        origin["started_from"] = trained.started_from
    head = copy.deepcopy(trained.head).to(torch.bfloat16)
    ids = None if trained.ids is None else trained.ids.cpu()
    write_report(out, trained, origin)
    if isinstance(head, CutModel):
        save_notes(out, DraftNotes(ids, origin, trained.measured))
        save_model(out, head.architecture, _complete(head, model), _tokenizer(llm))
        return
    target = Fingerprint.of(model, name)
    save_head(out, head, target=target, vocabulary_ids=ids, provenance=origin, measured=trained.measured)


def _complete(head: CutModel, model: Decoder) -> dict[str, Tensor]:
    """The weights of a draft model, with the target's embedding and output matrix, so that it is a model of its own."""
    a = model.architecture
    every = torch.arange(a.vocab_size, device=model.device)
    tensors = {"model.embed_tokens.weight": model.embedding(every).bfloat16(), **head.tensors()}
    return tensors if a.tied else {**tensors, "lm_head.weight": model.head.rows(every).bfloat16()}


def _tokenizer(llm: LLM) -> Tokenizer:
    assert isinstance(llm.tokenizer, Tokenizer), "a model that was loaded has the tokenizer that came with it"
    return llm.tokenizer
