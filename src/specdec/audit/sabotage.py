"""Engines broken on purpose, each in a way that others have shipped: the audit must notice every one of them.

Each fault replaces one function for the time of a ``with`` block and puts it back. They reach into private parts, since that
is where faults are.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from specdec import acceptance
from specdec.audit.fault import Fault, replaced
from specdec.audit.requests import Request
from specdec.commit import Committer
from specdec.config import BLOCK_SIZE, SamplingParams
from specdec.history import History
from specdec.kv import prefix
from specdec.kv.pool import Pool
from specdec.kv.prefix import PrefixCache
from specdec.runner.pack import Lines
from specdec.sampling import choose, draw, warp
from specdec.scheduler import Scheduler
from specdec.tree import children
from specdec.types import ROOT, Sequence, Span, Tree, Verdict
from specdec.verify import follow

# The cache.


def _no_move(pool: Pool, blocks: Many[int], sources: Many[int], targets: Many[int]) -> None:
    """Accepted rows stay where their nodes lay, behind rejected ones."""


def _move(pool: Pool, blocks: Many[int], sources: Many[int], targets: Many[int], layers: slice, values: bool) -> None:
    for source, target in zip(sources, targets, strict=True):
        (b, s), (c, t) = divmod(source, BLOCK_SIZE), divmod(target, BLOCK_SIZE)
        for part in (*pool.key_parts, *(pool.value_parts if values else ())):
            part[layers, blocks[c], t] = part[layers, blocks[b], s]


def _keys_only(pool: Pool, blocks: Many[int], sources: Many[int], targets: Many[int]) -> None:
    _move(pool, blocks, sources, targets, slice(None), values=False)


def _not_the_last_layer(pool: Pool, blocks: Many[int], sources: Many[int], targets: Many[int]) -> None:
    _move(pool, blocks, sources, targets, slice(None, -1), values=True)


def _backwards(pool: Pool, blocks: Many[int], sources: Many[int], targets: Many[int]) -> None:
    """From the last to the first, so that rows are overwritten before they are read."""
    _move(pool, blocks, list(sources)[::-1], list(targets)[::-1], slice(None), values=True)


def _rootless_key(sequence: Sequence, index: int) -> bytes:
    tokens = sequence.tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
    return hashlib.sha256(array("q", tokens).tobytes()).digest()


def _remembered(cache: PrefixCache, block: int) -> None:
    """The block goes to somebody else and can still be found."""


def _kept_length(scheduler: Scheduler, sequence: Sequence) -> None:
    scheduler.running.remove(sequence)
    sequence.status = "waiting"
    sequence.table.truncate(0)
    scheduler.waiting.appendleft(sequence)


# Rows: where they lie, what they see.


@contextmanager
def _drafted(change: Callable[[Lines, int, int], None]) -> Iterator[None]:
    """Drafted rows are laid out rightly and then changed; the function gets the first row and the committed tokens."""
    right = Lines.drafted

    def broken(lines: Lines, tokens: Any, paths: Any) -> None:
        first, committed = len(lines), len(lines._sequence.tokens)
        right(lines, tokens, paths)
        change(lines, first, committed)

    with patch.object(Lines, "drafted", broken):
        yield


def _position_ahead(lines: Lines, first: int, committed: int) -> None:
    lines.positions[first:] = [position + 1 for position in lines.positions[first:]]


def _position_by_index(lines: Lines, first: int, committed: int) -> None:
    lines.positions[first:] = [committed + i for i in range(len(lines) - first)]


def _sees_everything(lines: Lines, first: int, committed: int) -> None:
    lines.prefix[first:] = [slot + 1 for slot in lines.slot[first:]]
    lines.path[first:] = [[] for _ in lines.path[first:]]


def _reads_neighbour(lines: Lines, first: int, committed: int) -> None:
    owner = max(0, len(lines.tables) - 2)
    enough = len(lines.tables[owner]) >= len(lines.tables[-1])  # else it would read past the table
    lines.owner[first:] = [owner if enough else len(lines.tables) - 1] * (len(lines) - first)


# The sampler.


def _noise_by_pass(
    logits: Tensor, params: SamplingParams, history: History, path: Many[int], seed: int, end_tokens: Any = (), **more: Any
) -> int:
    if params.greedy:
        return choose(logits, params, history, path, seed, end_tokens, **more)
    return draw(warp(logits, params, history, path, end_tokens), seed, len(history))


def _blind_to_path(
    logits: Tensor, params: SamplingParams, history: History, path: Many[int], seed: int, end_tokens: Any = (), **more: Any
) -> int:
    law = warp(logits, params, history, (), end_tokens)
    return int(law.argmax()) if params.greedy else draw(law, seed, len(history) + len(path))


def _greedy_in_drafts(
    logits: Tensor, params: SamplingParams, history: History, path: Many[int], seed: int, end_tokens: Any = (), **more: Any
) -> int:
    cold = params.replace(temperature=0) if path else params
    return choose(logits, cold, history, path, seed, end_tokens, **more)


@contextmanager
def _counts_stay() -> Iterator[None]:
    """Penalty counts of rejected tokens are not wound back."""
    right = Committer.commit

    def broken(committer: Committer, span: Span, verdict: Any) -> Any:
        delta = right(committer, span, verdict)
        if isinstance(verdict, Verdict):
            history = span.sequence.history
            for node, token in enumerate(span.draft.tree.tokens):
                if node in verdict.path:
                    continue
                slot = history._slots.setdefault(token, len(history._emitted))
                if slot == len(history._emitted):
                    history._emitted.append(token)
                    history._counts.append(0)
                history._counts[slot] += 1
        return delta

    with patch.object(Committer, "commit", broken):
        yield


@contextmanager
def _ends_by_pass() -> Iterator[None]:
    """Only the last token of a pass is asked whether the sequence ends with it."""
    commit, ending = Committer.commit, Committer.ending
    left = 0

    def broken_commit(committer: Committer, span: Span, verdict: Any) -> Any:
        nonlocal left
        left = len(verdict.path) + 1 if isinstance(verdict, Verdict) else 0
        return commit(committer, span, verdict)

    def broken_ending(sequence: Sequence, token: int) -> Any:
        nonlocal left
        left -= 1
        return ending(sequence, token) if left == 0 or sequence.room == 0 else None

    with patch.object(Committer, "commit", broken_commit), patch.object(Committer, "ending", staticmethod(broken_ending)):
        yield


# The verifier.

Pick = Callable[[int, tuple[int, ...]], int]


def _believes(tree: Tree, pick: Pick) -> Verdict:
    """The first drafted token is taken without a look."""
    below = children(tree)
    if not below[ROOT]:
        return follow(tree, pick)
    token, node = next(iter(below[ROOT].items()))
    return Verdict((node,), pick(node, (token,)))


def _wrong_sibling(tree: Tree, pick: Pick) -> Verdict:
    """The token is right, and the rows that go on from it are those of its first sibling."""
    below = children(tree)
    node, path, tokens = ROOT, list[int](), tuple[int, ...]()
    while True:
        token = pick(node, tokens)
        if token not in below[node]:
            return Verdict(tuple(path), token)
        path.append(below[node][token])
        node, tokens = next(iter(below[node].values())), (*tokens, token)


def _bonus_of_the_row_before(tree: Tree, pick: Pick) -> Verdict:
    """Where a whole path is accepted, the token after it comes from the row before its last."""
    verdict, below = follow(tree, pick), children(tree)
    if not verdict.path or below[verdict.path[-1]]:
        return verdict
    before = verdict.path[-2] if len(verdict.path) > 1 else ROOT
    tokens = tuple(tree.tokens[node] for node in verdict.path)
    return Verdict(verdict.path, pick(before, tokens))


def _late(tree: Tree, pick: Pick) -> Verdict:
    """One token more than was verified is accepted, where there is one."""
    verdict, below = follow(tree, pick), children(tree)
    left = below[verdict.path[-1] if verdict.path else ROOT]
    if not left:
        return verdict
    token, node = next(iter(left.items()))
    path = (*verdict.path, node)
    return Verdict(path, pick(node, (*(tree.tokens[n] for n in verdict.path), token)))


def _sampled(request: Request) -> bool:
    return not request.params.greedy


def _penalised(request: Request) -> bool:
    return request.params.frequency_penalty != 0 or request.params.presence_penalty != 0


def _stopping(request: Request) -> bool:
    return bool(request.params.stop or request.params.stop_token_ids)


def _long(request: Request) -> bool:
    return len(request.prompt) > 2 * BLOCK_SIZE


FAULTS: tuple[Fault, ...] = (
    Fault("rejected row kept", "cache", "leaves rejected rows in the cache where accepted ones belong",
          replaced(Pool, "move", _no_move)),
    Fault("values left behind", "cache", "moves the keys of accepted rows and not their values",
          replaced(Pool, "move", _keys_only)),
    Fault("last layer left behind", "cache", "moves accepted rows in every layer but the last",
          replaced(Pool, "move", _not_the_last_layer)),
    Fault("moved backwards", "cache", "overwrites accepted rows before it has read them",
          replaced(Pool, "move", _backwards)),
    Fault("foreign prefix block", "cache", "finds a block by its own tokens, whatever stands before them",
          replaced(prefix, "_key", _rootless_key), ("cached",), _long),
    Fault("evicted block found", "cache", "goes on finding a block that was given to somebody else",
          replaced(PrefixCache, "_forget", _remembered), ("preempted",)),
    Fault("preempted length kept", "cache", "takes blocks for filled that a preempted sequence has lost",
          replaced(Scheduler, "_preempt", _kept_length), ("preempted",)),
    Fault("positions off by one", "rows", "places drafted tokens one position too far",
          lambda: _drafted(_position_ahead)),
    Fault("positions by index", "rows", "places the nodes of a tree by their number and not by their depth",
          lambda: _drafted(_position_by_index)),
    Fault("siblings seen", "rows", "lets a drafted token see all nodes before it and not only its ancestors",
          lambda: _drafted(_sees_everything)),
    Fault("neighbour's cache", "rows", "lets drafted tokens read the cache of the sequence before",
          lambda: _drafted(_reads_neighbour)),
    Fault("noise by pass", "sampler", "keys the noise by the pass and not by the position",
          replaced(acceptance, "choose", _noise_by_pass), shows_in=_sampled),
    Fault("penalties blind to drafts", "sampler", "does not count the drafted tokens before a node",
          replaced(acceptance, "choose", _blind_to_path), shows_in=_penalised),
    Fault("counts not rolled back", "sampler", "goes on counting rejected tokens in the penalties",
          _counts_stay, shows_in=_penalised),
    Fault("greedy in drafts", "sampler", "takes the most likely token on drafted rows, whatever the temperature",
          replaced(acceptance, "choose", _greedy_in_drafts), shows_in=_sampled),
    Fault("ends looked for once a pass", "sampler", "misses a stop that is not the last token of its pass",
          _ends_by_pass, shows_in=_stopping),
    Fault("drafts believed", "verifier", "accepts the first drafted token unseen",
          replaced(acceptance, "follow", _believes)),
    Fault("wrong sibling followed", "verifier", "accepts a token and goes on from its sibling's rows",
          replaced(acceptance, "follow", _wrong_sibling)),
    Fault("bonus of the row before", "verifier", "takes the token after an accepted path from the wrong row",
          replaced(acceptance, "follow", _bonus_of_the_row_before)),
    Fault("one too many", "verifier", "accepts one token more than it verified",
          replaced(acceptance, "follow", _late)),
)  # fmt: skip
