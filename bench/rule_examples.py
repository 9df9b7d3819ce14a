"""The worked examples of docs/rules.md and docs/rules/: what the rules do in a world of three tokens, computed by the rules.

In that world the target says a, b, c with the probabilities ``P`` after any text, and the drafter draws them with ``Q``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from pathlib import Path

import torch
from torch import Tensor

from specdec import kernels
from specdec.draft.candidates import candidates
from specdec.kernels.base import gumbel
from specdec.sampling import draw
from specdec.types import ROOT, Draft, Tree
from specdec.verify import RULES
from specdec.verify.enumeration import bursts, context_free, distance, mean_accepted, outcomes, siblings, without
from specdec.verify.rows import Draw, excess
from specdec.verify.typical import threshold

P, Q = (0.5, 0.3, 0.2), (0.2, 0.2, 0.6)
NAMES = "abc"
SPROUTS = {"distinct": siblings("sampled", "sampled"), "repeated": siblings("again", "again")}
CHAIN = siblings("sampled")

Part = Callable[[Path], str]


def table(header: Many[str], rows: Many[Many[str]], right: int = 1) -> str:
    """A table in Markdown; columns from ``right`` on are numbers."""
    lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    lines.insert(1, f"|{'|'.join('--:' if i >= right else '---' for i in range(len(header)))}|")
    return "\n".join(lines) + "\n"


def number(x: float) -> str:
    """Four digits behind the point, without zeros at the end."""
    return f"{x:.4f}".rstrip("0").rstrip(".") if round(x, 4) else "0"


def law(p: Tensor) -> str:
    return ", ".join(number(float(x)) for x in p)


def tensor(p: Many[float]) -> Tensor:
    return torch.tensor(p, dtype=torch.float64)


def overlap() -> float:
    """1 - d, d being the total variation between draft and target: the most that one drawn token can be accepted."""
    return float(torch.minimum(tensor(P), tensor(Q)).sum())


def coupling() -> float:
    """How often the draws of ``P`` and of ``Q`` with the same noise are the same token."""
    p, q = tensor(P), tensor(Q)
    return sum(1 / float(torch.maximum(p / p[v], q / q[v]).sum()) for v in range(len(P)))


def _overview(results: Path) -> str:
    p, q = context_free(P), context_free(Q)
    same = coupling()
    rows = [["`coupled`", "the drafter's best, with the position's noise", number(same), number(same + same**2), "0"]]
    for rule in RULES.values():
        if rule.name in ("coupled", "greedy"):
            continue
        sprout = SPROUTS.get(rule.siblings or "", CHAIN)
        drawn = {"distinct": "two below each, without replacement", "repeated": "two below each, independent"}
        counts = [mean_accepted(rule.judge, p, q, sprout, depth) for depth in (1, 2)]
        off = distance(rule.judge, p, q, sprout, 1)
        rows.append([f"`{rule.name}`", drawn.get(rule.siblings or "", "a chain"), *map(number, counts), number(off)])
    return table(["rule", "drafted", "accepted of one level", "of two levels", "off the law"], rows, right=2)


# coupled


def _noise(results: Path) -> str:
    ops, rows = kernels.select(torch.device("cpu")), []
    for position in range(8):
        g = gumbel(0, position, torch.arange(len(P)))
        target = draw(tensor(P).log(), 0, position)
        ids, _ = candidates(tensor(Q).log().float()[None], [1.0], [0], [position], 1, ops)
        drafted = int(ids[0, 0])
        noise = ", ".join(f"{x:.2f}" for x in g.tolist())
        rows.append([str(position), noise, NAMES[target], NAMES[drafted], "yes" if drafted == target else "no"])
    return table(["position", "noise of a, b, c", "target takes", "drafted", "stays"], rows, right=5)


def _agreement(results: Path) -> str:
    d = 1 - overlap()
    rows = [
        *([f"always {name}, as a drafter that looks text up", number(p)] for name, p in zip(NAMES, P, strict=True)),
        ["drawn from q with other noise", number(float((tensor(P) * tensor(Q)).sum()))],
        ["the best of q, with the position's noise", number(coupling())],
        ["at least, whatever p and q are: (1 − d)/(1 + d)", number((1 - d) / (1 + d))],
        ["the most that any rule accepts of one drawn token: 1 − d", number(1 - d)],
    ]
    return table(["drafted", "stays with probability"], rows)


# greedy


def _greedy(results: Path) -> str:
    tree = Tree(tokens=(0, 1, 2), parents=(ROOT, ROOT, 1))
    laws = {(): (0.2, 0.5, 0.3), (0,): (0.6, 0.3, 0.1), (1,): (0.1, 0.2, 0.7), (1, 2): (0.4, 0.35, 0.25)}
    seen: dict[tuple[int, ...], None] = {}

    def told(node: int, tokens: tuple[int, ...]) -> Tensor:
        seen[tokens] = None
        return tensor(laws[tokens])

    (verdict,) = [
        verdict for _, verdict in outcomes(lambda chance: RULES["greedy"].judge(Draft(tree, ("",) * 3), told, chance))
    ]
    emitted = [*(tree.tokens[node] for node in verdict.path), verdict.token]
    rows = []
    for path, p in laws.items():
        after = "the pending token" if not path else " ".join(NAMES[token] for token in path)
        chosen = NAMES[int(tensor(p).argmax())] if path in seen else "not looked at"
        kept = path in seen and len(path) < len(verdict.path)
        stands = "drafted: stays" if kept else "emitted, and ends the pass" if path in seen else ""
        rows.append([after, law(tensor(p)), chosen, stands])
    assert len(emitted) == len(seen)
    return table(["row after", "probabilities of a, b, c", "takes", "which is"], rows, right=4)


# rejection


def _rejection(results: Path) -> str:
    p, q = tensor(P), tensor(Q)
    draft = Draft(Tree((2,), (ROOT,)), ("",), q[None])
    rest, mass = excess(p, draft, Draw(0, 0))
    kept = torch.minimum(p, q)
    rows = [
        [
            name,
            number(float(q[v])),
            number(float(p[v])),
            number(min(1.0, float(p[v] / q[v]))),
            number(float(kept[v])),
            number(float(rest[v])),
            number(mass * float(rest[v])),
            number(float(kept[v] + mass * rest[v])),
        ]
        for v, name in enumerate(NAMES)
    ]
    rows.append(["all", "1", "1", "", number(float(kept.sum())), "1", number(mass), "1"])
    return table(["token", "q", "p", "min(1, p/q)", "drawn and kept", "residual", "corrected", "emitted"], rows)


# block


def _block(results: Path) -> str:
    p, q = context_free((1, 2)), context_free((2, 1))
    rows: list[list[str]] = []
    means = dict.fromkeys(("rejection", "block"), 0.0)
    for first in range(2):
        for second in range(2):
            weight = float(q(())[first] * q(())[second])
            draft = Draft(Tree((first, second), (ROOT, 0)), ("", ""), torch.stack([q(()), q(())]))
            cells: list[str] = []
            for name in means:
                counts = _lengths(name, draft, p)
                cells += [number(counts[n]) for n in range(3)]
                means[name] += weight * (counts[1] + 2 * counts[2])
            rows.append([f"{NAMES[first]} {NAMES[second]}", number(weight), *cells])
    rows.append(["mean", "", "", "", number(means["rejection"]), "", "", number(means["block"])])
    return table(
        ["drafted", "with probability", "`rejection` keeps 0", "1", "2", "`block` keeps 0", "1", "2"],
        rows,
    )


def _lengths(name: str, draft: Draft, p: Callable[[tuple[int, ...]], Tensor]) -> Mapping[int, float]:
    """How often so many drafted tokens are accepted of one draft."""
    counts: dict[int, float] = defaultdict(float)
    for weight, verdict in outcomes(lambda chance: RULES[name].judge(draft, lambda node, tokens: p(tokens), chance)):
        counts[len(verdict.path)] += weight
    return counts


# recursive, multistep


def _pairs(name: str) -> Part:
    """Two siblings below the pending token: what becomes of each pair that may be drawn."""
    repeated = RULES[name].siblings == "repeated"

    def part(results: Path) -> str:
        p, q, rows = tensor(P), tensor(Q), list[list[str]]()
        for first, second in _drawn(repeated):
            tree = Tree((first,), (ROOT,)) if first == second else Tree((first, second), (ROOT, ROOT))
            row = q if repeated else without(q, [first])
            draft = Draft(tree, ("",) * len(tree), torch.stack([q, row]), draws=(0, 0) if first == second else ())
            after = [Draw(0, 0), Draw(len(tree) - 1, 1)]
            left, chances = p, []
            cells: list[str] = []
            for draw_ in after:
                token, drafted_by = tree.tokens[draw_.node], draft.q
                assert drafted_by is not None
                chances.append(min(1.0, float(left[token] / drafted_by[draw_.row, token])))
                left = excess(left, draft, draw_)[0]
                cells += [number(chances[-1]), law(left) if chances[-1] < 1 else "–"]
                if chances[-1] == 1:
                    break
            rows.append(
                [f"{NAMES[first]}, {NAMES[second]}", number(float(q[first] * row[second])), *cells, *["–"] * (4 - len(cells))]
            )
        header = ["drawn", "with probability", "first stays", "else leaves a, b, c", "second stays", "else leaves"]
        return table(header, rows)

    return part


def _drawn(repeated: bool) -> Iterator[tuple[int, int]]:
    for first in range(len(P)):
        for second in range(len(P)):
            if repeated or first != second:
                yield first, second


def _emitted(name: str) -> Part:
    """The law of the first token that comes out, and where it comes from."""

    def part(results: Path) -> str:
        rule = RULES[name]
        found: dict[tuple[int, bool], float] = defaultdict(float)
        sprout = SPROUTS.get(rule.siblings or "", CHAIN)
        for weight, tokens, verdict in bursts(rule.judge, context_free(P), context_free(Q), sprout, 1):
            found[tokens[0], bool(verdict.path)] += weight
        rows = [
            [word, *(number(sum(found[v, kept] for kept in kinds)) for v in range(len(P)))]
            for word, kinds in (("drafted and kept", [True]), ("corrected", [False]), ("emitted", [True, False]))
        ]
        return table(["first token", *NAMES], rows)

    return part


# traversal


def _traversal(results: Path) -> str:
    tree = Tree(tokens=(0, 1, 1), parents=(ROOT, ROOT, 0))
    q = tensor([(0.6, 0.3, 0.1), (0.0, 0.75, 0.25), (0.4, 0.3, 0.3)])  # type: ignore[list-item]
    p = tensor((0.3, 0.4, 0.3))
    draft = Draft(tree, ("",) * 3, q)
    stays: dict[str, dict[tuple[int, ...], float]] = {}
    for name in ("recursive", "traversal"):
        stays[name] = defaultdict(float)
        for weight, verdict in outcomes(lambda chance, name=name: RULES[name].judge(draft, lambda node, tokens: p, chance)):  # type: ignore[misc]
            stays[name][verdict.path] += weight
    words = {(0, 2): "a, and b below it", (0,): "a alone", (1,): "b beside a", (): "nothing"}
    rows = [[word, *(number(stays[name][path]) for name in stays)] for path, word in words.items()]
    mean = [sum(len(path) * weight for path, weight in stays[name].items()) for name in stays]
    rows.append(["accepted on average", *map(number, mean)])
    return table(["what stays", "`recursive`", "`traversal`"], rows)


# typical


def _typical(results: Path) -> str:
    rows = []
    for p in (P, (0.9, 0.06, 0.04), (0.1,) * 10):
        least = threshold(tensor(p))
        entropy = -sum(x * torch.tensor(x).log().item() for x in p)
        stay = [name for name, x in zip("abcdefghij", p, strict=False) if x > least]
        if len(p) == len(Q):
            found: dict[int, float] = defaultdict(float)
            for weight, tokens, _ in bursts(RULES["typical"].judge, context_free(p), context_free(Q), CHAIN, 1):
                found[tokens[0]] += weight
            emitted = tensor([found[v] for v in range(3)])
            law_, off = law(emitted), number(float((emitted - tensor(p)).abs().sum()) / 2)
        else:
            law_ = off = "–"
        told = law(tensor(p)) if len(p) == len(Q) else "ten tokens, 0.1 each"
        rows.append([told, number(entropy), number(least), ", ".join(stay) if len(p) == len(Q) else "all", law_, off])
    return table(["target says", "entropy", "threshold", "stay if drafted", "first token comes out as", "off the law"], rows)


PARTS: Mapping[str, Mapping[str, Part]] = {
    "rules.md": {"world": _overview},
    "rules/coupled.md": {"noise": _noise, "agreement": _agreement},
    "rules/greedy.md": {"walk": _greedy},
    "rules/rejection.md": {"token": _rejection},
    "rules/block.md": {"chains": _block},
    "rules/recursive.md": {"pairs": _pairs("recursive"), "emitted": _emitted("recursive")},
    "rules/multistep.md": {"pairs": _pairs("multistep"), "emitted": _emitted("multistep")},
    "rules/traversal.md": {"tree": _traversal},
    "rules/typical.md": {"thresholds": _typical},
}
"""By page and part."""
