"""What is the gain from longer inputs made of?"""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from alibi_jax.report.figures.style import COLOURS, panels
from alibi_jax.report.names import Entry, run_names, steps

_PARTS = {
    "early_tokens": ("by fewer early tokens", COLOURS[4], "////"),
    "context": ("by longer context", COLOURS[0], ""),
}
_TOTAL: dict[str, Any] = {
    "color": "black",
    "marker": "D",
    "markersize": 4.5,
    "markeredgecolor": "white",
}
# A run that gains a little stays visible beside one that loses nats: bars of at most this many
# times the smallest run's, and at least of this many nats, are whole.
_TIMES, _LEAST = 4.0, 0.05


def split(runs: list[Entry]) -> Figure | None:
    """Both parts of the gain as stacked bars around 0, by length, a panel a run.

    None where no run has a decomposition of a length past the base.
    """
    shown = [(run, name) for run, name in zip(runs, run_names(runs)) if steps(run)]
    if not shown:
        return None
    figure, axes = panels([name for _, name in shown], "evaluation length (tokens)")
    reaches = [[_reach(step) for step in steps(run)] for run, _ in shown]
    low = min(low for reach in reaches for low, _ in reach)
    high = max(high for reach in reaches for _, high in reach)
    smallest = min(max(max(-low, high) for low, high in reach) for reach in reaches)
    most = max(_TIMES * smallest, _LEAST)
    cut = len(shown) > 1 and max(-low, high) > most
    if cut:
        low, high = max(low, -most), min(high, most)
    # A bar that is cut goes to the edge.
    room = 0.08 * (high - low) or 1.0
    axes[0].set_ylim(low - room * (-most < low < 0), high + room * (0 <= high < most))
    for panel, (run, _) in zip(axes, shown):
        _bars(panel, steps(run), crowded=len(shown) > 2)
    title = "What is the gain from longer inputs made of?"
    if cut:
        title += f"\ncut at {most:.2g} nats; totals that lie beyond are written at the edge"
    figure.suptitle(title, fontsize=11)
    bases = {run["decomposition"]["base"] for run, _ in shown}
    base = f"length {bases.pop():,}" if len(bases) == 1 else "the base length"
    figure.supylabel(f"gain over {base} (nats a token)", fontsize=10)
    handles: list[Line2D | Patch] = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=label)
        for label, colour, hatch in _PARTS.values()
    ]
    handles.append(Line2D([], [], linewidth=1, label="both, with its interval", **_TOTAL))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _reach(step: Entry) -> tuple[float, float]:
    """The lowest and the highest that a step's bars and interval go."""
    parts = [step[part]["nats"] for part in _PARTS]
    ends = [step["gain"][end] for end in ("low", "high") if step["gain"][end] is not None]
    return (
        min(sum(min(part, 0.0) for part in parts), *ends, 0.0),
        max(sum(max(part, 0.0) for part in parts), *ends, 0.0),
    )


def _bars(axes: Axes, entries: list[Entry], crowded: bool) -> None:
    low, high = axes.get_ylim()
    axes.axhline(0, color="0.3", linewidth=0.8)
    for x, step in enumerate(entries):
        ends = {True: 0.0, False: 0.0}
        for part, (_, colour, hatch) in _PARTS.items():
            size = step[part]["nats"]
            bottom = ends[size > 0]
            axes.bar(
                x, size, 0.7, bottom, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5
            )
            ends[size > 0] += size
        gain = step["gain"]
        if low <= gain["nats"] <= high:
            around = None
            if gain["low"] is not None:
                around = [[gain["nats"] - gain["low"]], [gain["high"] - gain["nats"]]]
            axes.errorbar(x, gain["nats"], around, linewidth=1, capsize=3, **_TOTAL)
        else:
            below = gain["nats"] < low
            axes.annotate(
                f"{gain['nats']:.2f}".replace("-", "−"),
                (x, 0 if below else 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3 if below else -3),
                textcoords="offset points",
                ha="center",
                va="bottom" if below else "top",
                fontsize=6.5 if crowded else 8,
                bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"},
            )
    axes.set_xticks(
        range(len(entries)),
        [f"{step['length']:,}" for step in entries],
        rotation=45 if crowded and len(entries) > 5 else 0,
    )
    axes.set_xlim(-0.6, len(entries) - 0.4)
    axes.grid(False, axis="x")
