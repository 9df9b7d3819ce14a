"""From a source to a model that runs."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.config import Precision, check_precision
from specdec.kernels.base import Kernels
from specdec.kernels.memory import give_back
from specdec.models import checkpoint, gguf_model
from specdec.models.checkpoint import CheckpointWeights
from specdec.models.decoder import Decoder, Layer
from specdec.models.errors import ModelError
from specdec.models.gguf_model import GgufWeights
from specdec.models.source import Source
from specdec.models.tokenizer import Tokenizer
from specdec.models.weights import Blocks, Weights
from specdec.quant.linear import BiasedLinear, Embedding, Linear, StackedLinear
from specdec.quant.make import make_linear


def load_model(source: Source, precision: Precision, kernels: Kernels, device: torch.device) -> Decoder:
    """Read a model's weights, one tensor at a time, into the precision asked for.

    Args:
        precision: ``blocks`` keeps weights bit for bit where the file holds Q4_0, Q4_1 or Q8_0 and makes q8 of any others;
            ``q8`` and ``q4`` quantise whatever is not that already; ``bf16`` and ``fp32`` read blocks back into floats.
            ``auto`` is ``blocks`` on a CPU and ``bf16`` elsewhere.
        kernels: what the model computes with.
        device: where weights and activations lie.

    Raises:
        ConfigError: the precision is unknown.
        ModelError: a file is missing, damaged or of a kind that is not supported, or a tensor is missing, unexpected, of the
            wrong shape, or does not allow the precision; the message names the file and the tensor.
    """
    check_precision(precision)
    if precision == "auto":
        precision = "blocks" if device.type == "cpu" else "bf16"
    weights: Weights = GgufWeights(source.header) if source.kind == "gguf" else CheckpointWeights(source.path)
    model = _Builder(weights, precision, kernels, device).decoder()
    weights.check_all_used()
    give_back()
    return model


def end_tokens(source: Source) -> frozenset[int]:
    """Every token that any of the model's files names as the end of a text or of a turn."""
    return gguf_model.end_tokens(source.header) if source.kind == "gguf" else checkpoint.end_tokens(source.path)


def load_tokenizer(source: Source) -> Tokenizer:
    """The tokenizer that comes with a model.

    Raises:
        ModelError: there is none, or it is of a kind that is not supported.
    """
    if source.kind == "folder":
        return Tokenizer.from_folder(source.path)
    metadata = source.header.metadata
    try:
        return Tokenizer.from_gguf(metadata)
    except ModelError as error:
        raise ModelError(f"{source.path}: {error}") from error


class _Builder:
    """Takes tensors under Hugging Face's names and makes the decoder's parts of them."""

    def __init__(self, weights: Weights, precision: Precision, kernels: Kernels, device: torch.device) -> None:
        self.weights = weights
        self.architecture = weights.architecture
        self.precision = precision
        self.kernels = kernels
        self.device = device

    def decoder(self) -> Decoder:
        a = self.architecture
        table = self.linear("model.embed_tokens", a.vocab_size, a.hidden_size)
        layers = [self.layer(i) for i in range(a.n_layers)]
        return Decoder(
            a,
            embedding=Embedding(table),
            layers=layers,
            norm=self.vector("model.norm.weight", a.hidden_size),
            head=table if a.tied else self.linear("lm_head", a.vocab_size, a.hidden_size),
            kernels=self.kernels,
            precision=self.precision,
            kv_dtype=torch.float32 if self.precision == "fp32" else torch.bfloat16,
            device=self.device,
        )

    def layer(self, i: int) -> Layer:
        a, at = self.architecture, f"model.layers.{i}."
        d, ffn, q, kv = a.hidden_size, a.ffn_size, a.q_size, a.kv_size
        attention, mlp = f"{at}self_attn.", f"{at}mlp."
        projections = ((f"{attention}q_proj", q), (f"{attention}k_proj", kv), (f"{attention}v_proj", kv))
        return Layer(
            attention_norm=self.vector(f"{at}input_layernorm.weight", d),
            qkv=self.joined(projections, d, biased=a.qkv_bias),
            q_norm=self.vector(f"{attention}q_norm.weight", a.head_dim) if a.qk_norm else None,
            k_norm=self.vector(f"{attention}k_norm.weight", a.head_dim) if a.qk_norm else None,
            out=self.linear(f"{attention}o_proj", d, q, biased=a.out_bias),
            ffn_norm=self.vector(f"{at}post_attention_layernorm.weight", d),
            gate_up=self.joined(((f"{mlp}gate_proj", ffn), (f"{mlp}up_proj", ffn)), d, biased=a.mlp_bias),
            down=self.linear(f"{mlp}down_proj", d, ffn, biased=a.mlp_bias),
        )

    def vector(self, name: str, size: int) -> Tensor:
        return self.weights.vector(name, size).to(self.device)

    def linear(self, name: str, rows: int, columns: int, *, biased: bool = False) -> Linear:
        return self.joined(((name, rows),), columns, biased=biased)

    def joined(self, modules: tuple[tuple[str, int], ...], columns: int, *, biased: bool) -> Linear:
        """One product for several modules over the same inputs."""
        parts = [self.weights.matrix(f"{name}.weight", rows, columns) for name, rows in modules]
        bias = torch.cat([self.weights.vector(f"{name}.bias", rows) for name, rows in modules]) if biased else None
        try:
            return self._make(parts, bias)
        except ValueError as error:
            names = ", ".join(name for name, _ in modules)
            raise ModelError(f"{self.weights.path}: {names}: {error}") from error

    def _make(self, parts: list[Tensor | Blocks], bias: Tensor | None) -> Linear:
        def make(some: list[Tensor | Blocks], precision: Precision, bias: Tensor | None) -> Linear:
            return make_linear(some, precision, self.kernels, self.device, bias)

        if self.precision != "blocks":
            return make(parts, self.precision, bias)
        kinds: list[Precision] = ["blocks" if isinstance(part, Blocks) else "q8" for part in parts]
        if len(set(kinds)) == 1:
            return make(parts, kinds[0], bias)
        stack = StackedLinear([make([part], kind, None) for part, kind in zip(parts, kinds, strict=True)])
        return stack if bias is None else BiasedLinear(stack, bias.to(self.device))
