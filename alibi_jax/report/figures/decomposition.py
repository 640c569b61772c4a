"""Where does the gain from longer inputs come from?"""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from alibi_jax.report.figures.style import COLOURS, panels
from alibi_jax.report.formatting import Entry, has_interval
from alibi_jax.report.runs import gains_by_length, run_names

_PARTS = {
    "early_tokens": ("from fewer early tokens", COLOURS[4], "////"),
    "context": ("from longer context", COLOURS[0], ""),
}
_TOTAL: dict[str, Any] = {
    "color": "black",
    "marker": "D",
    "markersize": 4.5,
    "markeredgecolor": "white",
}
# Largest ratio between the y ranges of two panels that share their y axis. Beyond it each panel has
# its own, so that a small gain stays visible beside a loss of several nats.
_MAX_RANGE_RATIO = 4.0


def decomposition(runs: list[Entry]) -> Figure | None:
    """Both parts of the gain as stacked bars around 0, by length, a panel for each run.

    None if no run has a decomposition at a length above the base length.
    """
    with_gains = [(run, name) for run, name in zip(runs, run_names(runs)) if gains_by_length(run)]
    if not with_gains:
        return None
    ranges = [_y_range(gains_by_length(run)) for run, _ in with_gains]
    shared = max(ranges) <= _MAX_RANGE_RATIO * min(ranges)
    figure, axes = panels([name for _, name in with_gains], "evaluation length (tokens)", shared)
    for panel, (run, _) in zip(axes, with_gains):
        _draw_bars(panel, gains_by_length(run), crowded=len(with_gains) > 2)
    title = "Where does the gain from longer inputs come from?"
    if not shared:
        title += "\neach panel has its own y axis"
    figure.suptitle(title, fontsize=11)
    bases = {run["decomposition"]["base"] for run, _ in with_gains}
    base = f"length {bases.pop():,}" if len(bases) == 1 else "the base length"
    figure.supylabel(f"gain over {base} (nats per token)", fontsize=10)
    handles: list[Line2D | Patch] = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=label)
        for label, colour, hatch in _PARTS.values()
    ]
    handles.append(Line2D([], [], linewidth=1, label="total gain, with its interval", **_TOTAL))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _y_range(entries: list[Entry]) -> float:
    """The length of the shortest range that holds 0 and all bars and intervals."""
    ends = [0.0]
    for entry in entries:
        parts = [entry[part]["nats"] for part in _PARTS]
        ends += [sum(min(part, 0.0) for part in parts), sum(max(part, 0.0) for part in parts)]
        if has_interval(entry["gain"]):
            ends += [entry["gain"]["low"], entry["gain"]["high"]]
    return max(ends) - min(ends)


def _draw_bars(axes: Axes, entries: list[Entry], crowded: bool) -> None:
    axes.axhline(0, color="0.3", linewidth=0.8)
    for x, entry in enumerate(entries):
        # Where the next bar starts: above 0 (True) and below it (False).
        ends = {True: 0.0, False: 0.0}
        for part, (_, colour, hatch) in _PARTS.items():
            size = entry[part]["nats"]
            bottom = ends[size > 0]
            axes.bar(
                x, size, 0.7, bottom, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5
            )
            ends[size > 0] += size
        gain = entry["gain"]
        error_bar = None
        if has_interval(gain):
            error_bar = [[gain["nats"] - gain["low"]], [gain["high"] - gain["nats"]]]
        axes.errorbar(x, gain["nats"], error_bar, linewidth=1, capsize=3, **_TOTAL)
    axes.set_xticks(
        range(len(entries)),
        [f"{entry['length']:,}" for entry in entries],
        rotation=45 if crowded and len(entries) > 5 else 0,
    )
    axes.set_xlim(-0.6, len(entries) - 0.4)
    axes.grid(False, axis="x")
