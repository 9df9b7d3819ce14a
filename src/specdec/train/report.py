"""What a run came to, for people: report.md and, where matplotlib is installed, a plot beside it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.train.cut import CutModel
from specdec.train.evaluate import RANKS
from specdec.train.features import write

if TYPE_CHECKING:
    from specdec.train.session import Trained

PLOT = "training.svg"
_POINTS = 200
"""Points of a curve; each is the mean of what lies between."""
_ORIGIN = ("started_from", "command", "date", "specdec", "torch", "cpu", "threads")


def write_report(folder: Path, trained: Trained, origin: dict[str, Any]) -> None:
    """Write report.md and its plot.

    Raises:
        ConfigError: they cannot be written.
    """
    drawn = _draw(folder / PLOT, trained)
    write(folder / "report.md", _text(trained, origin, drawn).encode())


def _text(trained: Trained, origin: dict[str, Any], drawn: bool) -> str:
    head, best, data = trained.head, trained.measured, trained.data
    if isinstance(head, CutModel):
        kind, chosen, layers = "draft model", "layers kept", head.source_layers
    else:
        kind, chosen, layers = head.config.kind, "layers tapped", head.config.taps
    plot = f"![loss, accuracy and tau]({PLOT})" if drawn else "No plots: matplotlib is not installed."
    groups = ((name, f"{tau:.2f}") for name, tau in best["tau_by_group"].items())
    steps = (
        (str(i + 1), f"{own:.3f}", f"{forced:.3f}", *(f"{share:.3f}" for share in ranks))
        for i, (own, forced, ranks) in enumerate(zip(best["own"], best["forced"], best["by_rank"], strict=True))
    )
    seen = (
        (f"{entry['progress']:.0%}", f"{entry['learned']:,}", f"{entry['seconds'] / 60:.1f}", f"{entry['tau']:.3f}")
        for entry in trained.history
    )
    facts = (
        ("kind", kind),
        (chosen, ", ".join(map(str, layers))),
        ("parameters", f"{sum(p.numel() for p in trained.head.parameters()):,}"),
        ("tokens it can draft", f"{data['vocabulary']:,} ({data['coverage']:.2%} of what was said in held-out answers)"),
        ("learned from", f"{data['answers']:,} answers, {data['tokens']:,} tokens"),
        ("measured on", f"{data['held_out_answers']:,} answers to other prompts, {best['anchors']:,} positions"),
        ("time", f"{trained.seconds / 60:.0f} minutes"),
        *((key.replace("_", " "), str(origin[key])) for key in _ORIGIN if key in origin),
    )
    return f"""# A drafter for {origin["model"]}: {kind}

Predicted τ of a chain of {len(best["own"])} drafted tokens: **{best["tau"]:.2f}**.
Trees, and other drafters beside it, add to that.

{_table(("", ""), facts)}

## τ by group

Tokens per pass if each burst is a chain that begins where the one before ended.

{_table(("group", "τ"), groups)}

## Accuracy by step

*Own history*: where all steps before were right, which is acceptance by depth. *True history*: whatever the steps before would
have said. The ranks say how often the token was the likeliest, the second likeliest and so on, with true history.

{_table(("step", "own history", "true history", *(f"rank {rank + 1}" for rank in range(RANKS))), steps)}

## Course

{plot}

{_table(("progress", "positions", "minutes", "τ"), seen)}
"""


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ("---",) * len(header), *rows))


def _draw(path: Path, trained: Trained) -> bool:
    """Draw the course of a run; False where there is nothing to draw with."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 3), layout="constrained")
    loss, accuracy, tau = figure.subplots(1, 3)
    curve = _thinned(trained.curve)
    loss.plot([point[0] for point in curve], [point[1] for point in curve], color="C0")
    loss.set(title="loss in training, nats", xlabel="positions")
    at = [entry["learned"] for entry in trained.history]
    for step in range(len(trained.measured["own"])):
        accuracy.plot(at, [entry["own"][step] for entry in trained.history], marker=".", label=f"step {step + 1}")
    accuracy.set(title="accuracy, own history", xlabel="positions", ylim=(0, None))
    accuracy.legend(fontsize="small")
    tau.plot(at, [entry["tau"] for entry in trained.history], marker=".", color="C0")
    tau.set(title="predicted τ", xlabel="positions")
    for axis in (loss, accuracy, tau):
        axis.grid(alpha=0.3)
    half = path.with_name(path.name + ".part")
    figure.savefig(half, format="svg", metadata={"Date": None})
    half.replace(path)
    return True


def _thinned(curve: list[list[float]]) -> list[list[float]]:
    """At most about _POINTS points, each the mean of its neighbours."""
    size = max(1, len(curve) // _POINTS)
    parts = (curve[i : i + size] for i in range(0, len(curve), size))
    return [[sum(column) / len(part) for column in zip(*part, strict=True)] for part in parts]
