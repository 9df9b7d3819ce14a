"""The worked examples of docs/drafters/: small drafts, made by the drafters."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, cast

import torch
from rule_examples import Part, number, table

from specdec.bench import planning
from specdec.bench.result import load
from specdec.config import SamplingParams, SpeculationConfig
from specdec.draft import shape
from specdec.draft.continuations import continuations, grow
from specdec.draft.expand import Growth
from specdec.draft.ngram import NgramDrafter
from specdec.draft.recycling import Matrix, RecyclingDrafter
from specdec.draft.suffix import SuffixDrafter, Text
from specdec.metrics.stats import Stats
from specdec.plan import Prices, best, chains
from specdec.runner.cost import Costs
from specdec.types import ROOT, Draft, Forward, Sequence, Span, Step, Tree, Verdict

TEXT = "the cat sat . the cat ran . the cat sat . the cat"
LOOP = "one two three one two"
BUDGET = 6


class Words:
    """Words as tokens, numbered as they come."""

    def __init__(self, text: str) -> None:
        self.known = list(dict.fromkeys(text.split()))
        self.tokens = [self.known.index(word) for word in text.split()]

    def path(self, tree: Tree, node: int) -> list[str]:
        """The words from the root down to a node."""
        words: list[str] = []
        while node != ROOT:
            words.insert(0, self.known[tree.tokens[node]])
            node = tree.parents[node]
        return words

    def sequence(self) -> Sequence:
        """A text that a drafter is asked to go on with; it has no cache, since nothing is computed."""
        return Sequence(
            id=0,
            tokens=self.tokens,
            n_prompt=len(self.tokens),
            params=SamplingParams(),
            seed=0,
            max_len=1 << 30,
            end_tokens=frozenset(),
            table=cast(Any, None),
            history=cast(Any, None),
            stats=Stats(),
        )


def _nodes(words: Words, draft: Draft) -> str:
    """A draft's nodes, in the order in which they were added."""
    rows = []
    for node, estimate in enumerate(draft.estimates):
        *above, word = words.path(draft.tree, node)
        rows.append([str(node + 1), " ".join(above) or "–", word, number(estimate)])
    return table(["node", "after", "token", "P"], rows, right=3)


def _ngram(results: Path) -> str:
    rows = []
    for text in (TEXT, LOOP):
        words = Words(text)
        (draft,) = NgramDrafter(SpeculationConfig()).propose([words.sequence()], [BUDGET])
        rows.append([text, _longest(words.tokens, words), " ".join(words.path(draft.tree, len(draft) - 1))])
    return table(["text", "longest tail that came before", "drafted"], rows, right=3)


def _longest(tokens: Many[int], words: Words) -> str:
    """Of the lengths that the drafter looks at, the longest tail that stands earlier in the text."""
    config = SpeculationConfig()
    for n in range(config.ngram_max, config.ngram_min - 1, -1):
        tail = list(tokens[-n:])
        if any(list(tokens[i : i + n]) == tail for i in range(len(tokens) - n)):
            return " ".join(words.known[token] for token in tail)
    return "–"


def _suffix_lengths(results: Path) -> str:
    """What each length of match would draft by itself."""
    words, config = Words(TEXT), SpeculationConfig()
    text = Text(config.suffix_depth)
    text.follow(words.tokens)
    rows = []
    for length, behind in continuations(text.array, text.tail, config.suffix_min_match, BUDGET):
        limit = min(BUDGET, int(config.suffix_factor * length))
        found = grow(behind, limit, config.suffix_min_probability, config.suffix_prior / length, frozenset())
        first = ", ".join(
            f"{words.known[token]} {number(p)}"
            for token, parent, p in zip(found.tokens, found.parents, found.estimates, strict=True)
            if parent == ROOT
        )
        tail = " ".join(words.known[token] for token in words.tokens[-length:])
        rows.append([str(length), tail, str(len(behind)), first, str(len(found.tokens)), number(found.score)])
    return table(["match", "tail", "earlier places", "next, by P", "nodes", "sum of P"], rows, right=4)


def _suffix_tree(results: Path) -> str:
    words = Words(TEXT)
    (draft,) = SuffixDrafter(SpeculationConfig()).propose([words.sequence()], [BUDGET])
    return _nodes(words, draft)


def _recycling(results: Path) -> str:
    """How a token's first successor fares that goes on being right, and then is wrong."""
    matrix = Matrix(SpeculationConfig().recycling_successors)
    matrix.enter([0], [list(range(1, 9))])
    rows = []
    for told in ("nothing yet", "the first one", "the first one", "the second one", "none of them", "none of them"):
        if told != "nothing yet":
            matrix.score(0, {"the first one": 1, "the second one": 2}.get(told, 99), 0)
        chances = [chance for _, chance in matrix.expect(0, 0)]
        drafted = sum(chance >= SpeculationConfig().recycling_min_probability for chance in chances)
        rows.append([told, *(number(chance) for chance in chances[:3]), str(drafted)])
    return table(["what came after it", "P of its first", "second", "third successor", "drafted"], rows)


WROTE = "the cat sat down . the cat sat up . the"
THOUGHT = {"the": "cat dog", "cat": "sat ran", "sat": "down up", "down": ". the", ".": "the a", "up": ". the"}
"""What the model finds likeliest after each word, best first."""


def _recycling_tree(results: Path) -> str:
    """A draft behind a text of which the drafter has seen every pass."""
    words = Words(f"{WROTE} {' '.join(THOUGHT.values())}")
    wrote = words.tokens[: len(WROTE.split())]
    config = SpeculationConfig(recycling_successors=2, recycling_min_probability=0.08)
    drafter = RecyclingDrafter(config, len(words.known), lambda logits, k: logits.topk(k))
    row = words.sequence()
    row.tokens = wrote[:1]
    for token in wrote[1:]:
        logits = torch.zeros(1, len(words.known))
        for rank, word in enumerate(THOUGHT[words.known[row.tokens[-1]]].split()):
            logits[0, words.known.index(word)] = 2.0 - rank
        span = Span(row, len(row.tokens) - 1, len(row.tokens))
        row.tokens.append(token)
        drafter.observe(Step((span,)), Forward(logits, (slice(0, 1),)), [Verdict((), token)])
    (draft,) = drafter.propose([row], [BUDGET])
    return _nodes(words, draft)


def _model(results: Path) -> str:
    """The best length, and what it brings, by acceptance and by what a pass of the draft model costs."""
    measured = planning.costs_of(load(results / "specdec.json"))
    machines: list[tuple[str, Costs | None]] = [("free", None), ("as measured", measured)]
    rows = []
    for told, costs in machines:
        for c in (0.05, 0.2, 0.5):
            cells = []
            for alpha in (0.6, 0.8, 0.9):
                prices = Prices(draft=c) if costs is None else Prices(draft=c, cost=costs.seconds)
                found = best(chains([alpha] * 16, prices))
                cells.append(f"{found.depth}: {found.speedup:.2f}")
            rows.append([told, number(c), *cells])
    return table(["rows", "c", "α = 0.6", "0.8", "0.9"], rows)


ACCURACY = ((0.6, 0.2, 0.1), (0.4, 0.2, 0.1), (0.3, 0.1))
"""How often the first, second and third candidate of each Medusa head is right."""


def _medusa(results: Path) -> str:
    made = shape.static(ACCURACY, BUDGET)
    values = shape.values(made, ACCURACY)
    paths: list[tuple[int, ...]] = []
    rows, total = [], 1.0
    for node, (parent, rank) in enumerate(zip(made.parents, made.ranks, strict=True)):
        paths.append((*(paths[parent] if parent != ROOT else ()), rank + 1))
        total += values[node]
        product = " × ".join(number(ACCURACY[depth][r - 1]) for depth, r in enumerate(paths[node]))
        rows.append([str(node + 1), ", ".join(map(str, paths[node])), product, number(values[node]), number(total)])
    return table(["node", "candidates on its path, by rank", "accuracies", "chance", "tokens a pass"], rows, right=3)


SAID: Mapping[tuple[str, ...], Mapping[str, float]] = {
    (): {"the": 0.5, "a": 0.4, "my": 0.1},
    ("the",): {"cat": 0.9, "dog": 0.1},
    ("a",): {"cat": 0.3, "dog": 0.3},
    ("the", "cat"): {"sat": 0.5, "ran": 0.3},
    ("a", "cat"): {"sat": 0.6, "ran": 0.3},
}
"""What a head says after each path: its two or three best candidates with their chances."""


def _eagle(results: Path) -> str:
    """A tree of at most five nodes, two of each depth with children."""
    words = list(dict.fromkeys(word for said in SAID.values() for word in said))
    growth = Growth(width=2, limit=5, least=0.08, end_tokens=())
    paths: dict[int, tuple[str, ...]] = {ROOT: ()}
    depths: list[int] = []
    opened: set[int] = set()
    leaves = [ROOT]
    for depth in (1, 2, 3):
        for leaf in leaves:
            said = SAID[paths[leaf]]
            growth.add(leaf, [words.index(word) for word in said], said.values())
        while len(depths) < len(growth.tokens):
            node = len(depths)
            paths[node] = (*paths[growth.parents[node]], words[growth.tokens[node]])
            depths.append(depth)
        leaves = growth.next()
        opened |= set(leaves) if depth < 3 else set()
    draft = growth.draft("eagle")
    kept = {tuple(words[t] for t in _tokens(draft.tree, node)) for node in range(len(draft))}
    rows = []
    for node, depth in enumerate(depths):
        path = paths[node]
        chance = SAID[path[:-1]][path[-1]]
        rows.append(
            [
                str(depth),
                " ".join(path),
                number(chance),
                number(growth.values[node]),
                "yes" if node in opened else "",
                "yes" if path in kept else "",
            ]
        )
    return table(["depth", "path", "chance", "value", "proposes children", "verified"], rows, right=2)


def _tokens(tree: Tree, node: int) -> list[int]:
    tokens: list[int] = []
    while node != ROOT:
        tokens.insert(0, tree.tokens[node])
        node = tree.parents[node]
    return tokens


def _mtp(results: Path) -> str:
    """One module and three, whose last one goes on with itself, at a price of 0.05 for each depth."""
    rows = []
    for told, acceptance in (
        ("one module, one token", (0.85,)),
        ("one module that goes on with itself", (0.85, 0.6, 0.5, 0.45)),
        ("three modules, the last goes on", (0.85, 0.75, 0.65, 0.55)),
    ):
        found = chains(acceptance, Prices(draft=0.05))[-1]
        rows.append([told, ", ".join(map(number, acceptance)), number(found.tokens), number(found.speedup)])
    return table(["drafted by", "α by depth", "tokens a pass", "speed-up"], rows, right=2)


PARTS: Mapping[str, Mapping[str, Part]] = {
    "drafters/ngram.md": {"drafts": _ngram},
    "drafters/suffix.md": {"lengths": _suffix_lengths, "tree": _suffix_tree},
    "drafters/recycling.md": {"record": _recycling, "tree": _recycling_tree},
    "drafters/draft-model.md": {"lengths": _model},
    "drafters/medusa.md": {"tree": _medusa},
    "drafters/eagle.md": {"tree": _eagle},
    "drafters/mtp.md": {"modules": _mtp},
}
"""By page and part."""
