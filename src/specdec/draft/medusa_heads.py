"""Medusa heads arranged for drafting: what all of them do to the same feature is one product, and token tables are plain."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.config import Precision
from specdec.kernels.base import Kernels
from specdec.models.heads import Block, Markov, MedusaHead
from specdec.models.packed_heads import pack_head, packed_bytes
from specdec.quant.make import make_linear


class Heads:
    """The first heads of a trained drafter, packed.

    Args:
        head: float modules on the CPU, left as they are.
        depth: how many of its heads.
        precision: of every matrix but the Markov table of previous tokens, which is bfloat16.

    Raises:
        ConfigError: a matrix does not allow the precision.
    """

    def __init__(self, head: MedusaHead, depth: int, kernels: Kernels, precision: Precision, device: torch.device) -> None:
        packed = self._packed = pack_head(head, kernels, precision, device)
        self._depth = depth
        self._together = 0
        """Bytes of what is packed here."""
        if packed.joins is None:
            firsts = [block.linear for block in (cast(Block, cast(nn.Sequential, blocks)[0]) for blocks in head.heads[:depth])]
            biases = torch.cat([linear.bias.detach() for linear in firsts])
            self._first = make_linear([linear.weight.detach() for linear in firsts], precision, kernels, device, biases)
            self._together += self._first.n_bytes
            for blocks in packed.heads:
                cast(nn.Sequential, blocks)[0] = nn.Identity()
        if packed.markov is not None and head.markov is not None:
            table = Table(cast(Markov, head.markov[0]).first.weight, device)
            cast(Any, packed.markov[0]).first = table
            self._together += table.weight.nbytes
        self.embedding, self.outputs = packed.embedding, packed.outputs
        """The heads' own, if they have any; see ``MedusaHead``."""

    @property
    def n_bytes(self) -> int:
        return packed_bytes(self._packed) + self._together

    def states(self, features: Tensor) -> Tensor:
        """What all heads that see nothing but the feature give: [S, d] -> [S, depth, d]."""
        inner = self._first(features).view(len(features), self._depth, -1)
        states = features[:, None] + F.silu(inner)
        if self._packed.config.blocks == 1:
            return states
        return torch.stack([blocks(states[:, k]) for k, blocks in enumerate(self._packed.heads[: self._depth])], 1)

    def state(self, k: int, features: Tensor, between: Tensor) -> Tensor:
        """What head k gives where it sees all tokens in between: [n, d] and [n, (k + 1) * d] -> [n, d]."""
        state: Tensor = self._packed(k, features, between)
        return state

    def bias(self, previous: Tensor) -> Tensor:
        """What a Markov head adds to the logits after each token: ids [n] -> [n, Vd]."""
        bias = self._packed.bias(previous)
        if bias is None:
            raise ValueError("only heads with a Markov correction have a bias")
        return bias


class Table(nn.Module):
    """nn.Embedding in bfloat16. It is looked up at every depth for a few rows, for which blocks take several times as long."""

    weight: Tensor

    def __init__(self, weight: Tensor, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().to(device, torch.bfloat16))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids].float()
