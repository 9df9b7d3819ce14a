"""The nouns that every other module speaks.

Plain values with their invariants and nothing else: no module of ours is imported, and torch only for annotations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import lt
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.config import SamplingParams
    from specdec.history import History
    from specdec.kv.blocks import BlockTable
    from specdec.metrics.stats import Stats

FinishReason = Literal["stop", "length", "error"]
Status = Literal["waiting", "running", "finished"]
Siblings = Literal["one", "distinct", "repeated"]
"""How a drafter that samples draws the children of a node: at most one; each from what the earlier ones leave of the law; or
each from the whole law, so that a token may be drawn again."""

ROOT = -1
"""The parent of a node that directly follows the pending token."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Drafted tokens hanging from the pending token; the empty tree is plain decoding.

    Node ``i`` continues node ``parents[i]``, or the pending token where that is ``ROOT``. Parents precede their
    children and siblings carry different tokens, so a path of tokens names at most one node.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        tokens, parents = self.tokens, self.parents
        n = len(tokens)
        if n != len(parents):
            raise ValueError(f"a tree needs one parent per token, got {n} tokens and {len(parents)} parents")
        # Several trees are made for every pass: what is in order, as nearly all are, is seen to be so at once.
        if (
            len(set(zip(parents, tokens, strict=True))) == n
            and all(map(lt, parents, range(n)))
            and min(parents, default=0) >= ROOT
        ):
            return
        seen: set[tuple[int, int]] = set()
        for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: a parent must be {ROOT} or an earlier node")
            if (parent, token) in seen:
                raise ValueError(f"node {node} repeats token {token} of an earlier sibling")
            seen.add((parent, token))

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree, where its nodes came from, and the laws that sampled nodes were drawn from."""

    tree: Tree = Tree()
    sources: tuple[str, ...] = ()
    """The drafter that proposed each node."""
    q: Tensor | None = None
    """[n, V] float64, the law each node was really drawn from, in order of ``draws``, given all that was drawn before it; None
    where every node is deterministic (one-hot)."""
    estimates: tuple[float, ...] = ()
    """The drafter's guess of each node's chance of being accepted; empty where it makes none."""
    draws: tuple[int, ...] = ()
    """Nodes in the order in which they were drawn, one that was drawn again once more; empty: each once, in order."""

    def __post_init__(self) -> None:
        n = len(self.tree.tokens)
        if len(self.sources) != n:
            raise ValueError(f"a draft needs one source per node, got {len(self.sources)} for {n} nodes")
        if self.estimates and len(self.estimates) != n:
            raise ValueError(f"a draft needs an estimate per node or none, got {len(self.estimates)} for {n}")
        if self.draws and list(dict.fromkeys(self.draws)) != list(range(n)):
            raise ValueError(f"draws must name each of {n} nodes, for the first time in order, got {self.draws}")
        if self.q is not None and len(self.q) != (len(self.draws) or n):
            raise ValueError(f"a sampled draft needs a row of q per draw, got {len(self.q)} for {self.draws or n}")

    def __len__(self) -> int:
        return len(self.tree.tokens)


NO_DRAFT = Draft()
"""Plain decoding."""


class Stopper(Protocol):
    """Decides, one committed token at a time, whether a sequence ends here (a stop string, for instance)."""

    def feed(self, token: int) -> bool:
        """True when this token completes a stop; called once per committed token, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Speculation:
    """How one request may be drafted for. It changes the speed and nothing else."""

    drafters: tuple[str, ...] | None = None
    """Names of those of the engine's drafters that may be asked for it; None: all of them, empty: none."""
    max_tokens: int | None = None
    """Most drafted nodes in one pass; None: as many as the engine verifies at most."""
    prediction: tuple[int, ...] = ()
    """Tokens that the output is expected to resemble, for drafters that look text up."""


@dataclass(slots=True)
class Times:
    """When a sequence was queued and when its first pass began, by ``time.perf_counter``.

    The engine writes each once, so other threads may read them while it runs.
    """

    added: float = 0.0
    begun: float | None = None


@dataclass(eq=False, slots=True)
class Sequence:
    """One request's state. Holds committed tokens only: a draft is a separate value until it is verified.

    At rest while decoding ``n_cached == len(tokens) - 1``: the last token is *pending*, chosen but not yet in the cache.
    """

    id: int
    tokens: list[int]
    n_prompt: int
    params: SamplingParams
    seed: int
    max_len: int
    """Prompt and output together never grow past this."""
    end_tokens: frozenset[int]
    """Tokens that end the sequence: the model's own (unless ignored) and the request's."""
    table: BlockTable
    history: History
    stats: Stats
    stopper: Stopper | None = None
    salt: str = ""
    """Sequences of different salts share no cached blocks."""
    speculation: Speculation = Speculation()
    times: Times = field(default_factory=Times)
    n_cached: int = 0
    """Leading tokens whose keys and values are in the pool."""
    n_entered: int = 0
    """Leading blocks that the prefix cache has been told of, or gave."""
    block_keys: list[bytes] = field(default_factory=list)
    """Keys of leading blocks full of committed tokens, as far as the prefix cache has needed them."""
    status: Status = "waiting"
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the second prompt token onwards, as far as the prompt has been read, if the request asks for them."""

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_len - len(self.tokens)


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one sequence in a step: committed tokens ``[start, stop)``, then the nodes of a draft.

    Prefill is a long span. A draft may follow only when ``stop`` is the end of the committed tokens.
    """

    sequence: Sequence
    start: int
    stop: int
    draft: Draft = Draft()

    @property
    def complete(self) -> bool:
        """Does this span reach the pending token, so that its logits are wanted?"""
        return self.stop == len(self.sequence.tokens)

    @property
    def n_rows(self) -> int:
        return self.stop - self.start + len(self.draft)

    @property
    def scored(self) -> range:
        """Positions of prompt tokens whose log-probabilities are asked for and come out of this pass.

        The row before a token gives its probability. A prompt that is read again after a preemption is not scored twice.
        """
        sequence = self.sequence
        if sequence.params.prompt_logprobs is None:
            return range(0)
        return range(max(self.start, len(sequence.prompt_logprobs)) + 1, min(self.stop + 1, sequence.n_prompt))


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one forward pass. Every slot they need is reserved before the pass."""

    spans: tuple[Span, ...]

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    @property
    def n_rows(self) -> int:
        return sum([span.n_rows for span in self.spans])


@dataclass(frozen=True, slots=True)
class Forward:
    """What a pass returns. Wanted rows are, per span, those before its scored prompt tokens; then, if the span is complete,
    the pending token's and each node's."""

    logits: Tensor
    """[W, V] float32, in step order."""
    rows: tuple[slice, ...]
    """For each span of the step, its pending token's row of ``logits`` and its nodes'; empty where the prompt goes on later."""
    prompt_rows: tuple[slice, ...] = ()
    """For each span, the rows of ``logits`` that give its scored prompt tokens."""
    taps: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> [M, d] hidden states that drafters asked for, of every row of the step."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of an emitted token under the model's raw distribution, and the best few beside it."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided: the accepted path and one more token, so at least one token is emitted."""

    path: tuple[int, ...]
    """Accepted node ids, root first."""
    token: int
    """The corrected token where a draft was refused, the bonus token where the path ran to a leaf."""
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one sequence. The cut at a stop, an end token or the length limit has already been made."""

    sequence_id: int
    tokens: tuple[int, ...]
    sources: tuple[str | None, ...]
    """For each token the drafter whose node it was, or None where the target itself chose it."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """Of the second prompt token onwards, with the sequence's first tokens, if asked for."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: Stats | None = None
    """The sequence's counters, with its last delta."""
