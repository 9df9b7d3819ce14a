"""The modules of trained drafters, once: training runs them on batches of text, drafting on the rows of a pass.

Embedding and output matrix are the target's, the output matrix cut to ``HeadConfig.vocabulary`` where there is one (FR-Spec,
Zhao et al., arXiv 2502.14856), unless a head brings its own, as many published ones do. Hidden states of the target are
called *features*: the outputs of the layers ``HeadConfig.taps``, side by side.

Written as x_i for the token at position i, e(x) for its embedding and f_i for the features of the row that holds x_i, whose
logits are the target's opinion of x_{i+1}:

- A Medusa head (Cai et al., arXiv 2401.10774) says what comes after: head k, counted from 0, gives x_{i+2+k} from f_i.
- A recurrent head gives x_{i+2} from f_i and e(x_{i+1}), then x_{i+3} from its own state and e(x_{i+2}), and so on: EAGLE
  (Li et al., arXiv 2401.15077, 2406.16858), EAGLE-3 (2503.01840) and the modules of multi-token prediction (DeepSeek-V3,
  2412.19437).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.head_config import HeadConfig

Attend = Callable[[Tensor], Tensor]
"""qkv [..., (H + 2 KV) * hd], not yet rotated -> attended [..., H * hd]. Positions and what a row sees are the caller's."""


class Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Gate(nn.Module):
    """[..., 2 f], gate then up -> SiLU(gate) * up [..., f]."""

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up


class Block(nn.Module):
    """x + SiLU(W x + b): one residual block of a Medusa head, which at first changes nothing."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Markov(nn.Module):
    """What the token before says about the next one, as a bias of low rank on the logits: W2 W1[x]."""

    def __init__(self, vocab_size: int, rank: int, vocabulary: int) -> None:
        super().__init__()
        self.first = nn.Embedding(vocab_size, rank)
        self.second = nn.Linear(rank, vocabulary, bias=False)
        nn.init.normal_(self.first.weight, std=0.02)
        nn.init.zeros_(self.second.weight)

    def forward(self, previous: Tensor) -> Tensor:
        """previous: token ids [...] -> [..., vocabulary]"""
        bias: Tensor = self.second(self.first(previous))
        return bias


class MedusaHead(nn.Module):
    """Heads over the last feature, each for one position ahead."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        d = config.hidden_size
        self.heads = nn.ModuleList(nn.Sequential(*(Block(d) for _ in range(config.blocks))) for _ in range(config.depth))
        self.markov: nn.ModuleList | None = None
        self.joins: nn.ModuleList | None = None
        if config.correction == "markov":
            self.markov = nn.ModuleList([Markov(config.vocab_size, config.rank, config.n_outputs)])  # one for all heads
        if config.correction == "hydra":
            joins = [nn.Linear((k + 1) * d, d, bias=False) for k in range(config.depth)]
            for join in joins:
                nn.init.zeros_(join.weight)
            self.joins = nn.ModuleList(joins)
        self.embedding, self.outputs = _own(config, config.depth)

    def forward(self, k: int, feature: Tensor, between: Tensor | None = None) -> Tensor:
        """The state of head k, which the output matrix multiplies.

        Args:
            feature: [..., d], f_i.
            between: [..., (k + 1) * d], e(x_{i+1}), ..., e(x_{i+1+k}) side by side, where the correction is ``hydra``.

        Returns:
            [..., d]; times the output matrix it gives the logits of x_{i+2+k}, the Markov bias of x_{i+1+k} still to be added.
        """
        if self.joins is not None:
            if between is None:
                raise ValueError("a Hydra head needs the embeddings of the tokens that it follows")
            feature = feature + self.joins[k](between)
        state: Tensor = self.heads[k](feature)
        return state

    def bias(self, previous: Tensor) -> Tensor | None:
        """Token ids [...], x_{i+1+k} -> what is added to the logits of x_{i+2+k}, [..., vocabulary]; None for nothing."""
        return None if self.markov is None else self.markov[0](previous)


class DraftLayer(nn.Module):
    """A decoder layer whose queries, keys and values may be computed from more than its residual stream."""

    def __init__(self, config: HeadConfig, inputs: int) -> None:
        super().__init__()
        d, q, kv = config.hidden_size, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.qkv = nn.Linear(inputs, q + 2 * kv, bias=False)
        self.out = nn.Linear(q, d, bias=False)
        self.ffn_norm = Norm(d, config.rms_eps)
        self.gate_up = nn.Linear(d, 2 * config.ffn_size, bias=False)
        self.gate = Gate()
        self.down = nn.Linear(config.ffn_size, d, bias=False)

    def forward(self, x: Tensor, inputs: Tensor, attend: Attend) -> Tensor:
        """x [..., d] the residual stream, inputs [..., width] -> [..., d]"""
        x = x + self.out(attend(self.qkv(inputs)))
        y: Tensor = x + self.down(self.gate(self.gate_up(self.ffn_norm(x))))
        return y


class RecurrentHead(nn.Module):
    """EAGLE, EAGLE-3 or the modules of multi-token prediction."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        d, kind, eps = config.hidden_size, config.kind, config.rms_eps
        n = config.n_modules
        self.fuse = nn.Linear(len(config.taps) * d, d, bias=config.fc_bias) if kind == "eagle3" else nn.Identity()
        self.joins = nn.ModuleList()
        """Per module: embedding and state to one vector (eagle, mtp)."""
        self.embedding_norms = nn.ModuleList()
        self.state_norms = nn.ModuleList()
        self.input_norms = nn.ModuleList()
        """Per module, before attention (mtp)."""
        self.norms = nn.ModuleList()
        """Per module, before the output matrix; EAGLE-1's states need none: they imitate what the target's norm gives."""
        if kind != "eagle3":
            self.joins.extend(nn.Linear(2 * d, d, bias=config.fc_bias) for _ in range(n))
        if kind != "eagle":
            for norms in (self.embedding_norms, self.state_norms, self.norms):
                norms.extend(Norm(d, eps) for _ in range(n))
        if kind == "mtp":
            self.input_norms.extend(Norm(d, eps) for _ in range(n))
        self.layers = nn.ModuleList(DraftLayer(config, 2 * d if kind == "eagle3" else d) for _ in range(n))
        self.embedding, self.outputs = _own(config, 1)

    def module(self, step: int) -> int:
        """Which module makes a given step, counted from 0: the last one goes on for ever."""
        return min(step, self.config.n_modules - 1)

    def start(self, features: Tensor) -> Tensor:
        """features [..., taps * d] -> the state [..., d] that the first step starts from."""
        state: Tensor = self.fuse(features)
        return state

    def forward(self, embedded: Tensor, state: Tensor, attend: Attend, module: int = 0) -> Tensor:
        """One step: e(x_{j+1}) and the state of position j, both [..., d] -> the new state [..., d]."""
        x, inputs = self.inputs(embedded, state, module)
        new: Tensor = self.layers[module](x, inputs, attend)
        return new

    def inputs(self, embedded: Tensor, state: Tensor, module: int = 0) -> tuple[Tensor, Tensor]:
        """What a module's layer gets: the residual stream [..., d], and what query, key and value are computed from."""
        kind = self.config.kind
        if kind == "eagle3":
            normed = self.state_norms[module](state)
            x = normed if self.config.normed_residual else state
            return x, torch.cat([self.embedding_norms[module](embedded), normed], -1)
        if kind == "mtp":
            embedded, state = self.embedding_norms[module](embedded), self.state_norms[module](state)
        pair = [state, embedded] if self.config.hidden_first else [embedded, state]
        x = self.joins[module](torch.cat(pair, -1))
        return x, self.input_norms[module](x) if kind == "mtp" else x

    def ready(self, state: Tensor, module: int = 0) -> Tensor:
        """What the output matrix multiplies: it gives the logits of x_{j+2}."""
        return state if self.config.kind == "eagle" else self.norms[module](state)


def _own(config: HeadConfig, n: int) -> tuple[nn.Embedding | None, nn.ModuleList]:
    """The embedding and the n output matrices that a head brings, None and none where it takes the target's."""
    embedding = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embedding else None
    linears = [nn.Linear(config.hidden_size, config.n_outputs, bias=False) for _ in range(n if config.own_output else 0)]
    return embedding, nn.ModuleList(linears)


Head = MedusaHead | RecurrentHead


def make_head(config: HeadConfig) -> Head:
    """A head that has not been trained."""
    return RecurrentHead(config) if config.recurrent else MedusaHead(config)


def filled(config: HeadConfig, tensors: Mapping[str, Tensor]) -> Head:
    """A head with these weights, in float32, by the names of its modules.

    Raises:
        ValueError: a tensor is missing, unknown, of another shape or not of floats; the message names it.
    """
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        head = make_head(config)
    own = head.state_dict()
    if odd := sorted(set(own) ^ set(tensors)):
        raise ValueError(f"tensor {odd[0]} is {'missing' if odd[0] in own else 'not part of such a head'}")
    for name, value in tensors.items():
        if value.shape != own[name].shape or not value.is_floating_point():
            raise ValueError(
                f"tensor {name} is {value.dtype} {list(value.shape)}, the head needs floats {list(own[name].shape)}"
            )
    head.load_state_dict({name: value.float() for name, value in tensors.items()}, assign=True)
    return head


def is_vocabulary(ids: Tensor, vocab_size: int) -> bool:
    """Are these ids [Vd] different tokens of a vocabulary?"""
    inside = int(ids.min()) >= 0 and int(ids.max()) < vocab_size
    return inside and int(torch.bincount(ids).max()) == 1
