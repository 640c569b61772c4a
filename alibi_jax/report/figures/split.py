"""What is the gain from longer inputs made of?"""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from alibi_jax.report.figures.style import COLOURS, panels
from alibi_jax.report.formatting import Entry, has_interval, run_names, steps

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
# A run that gains a little stays visible beside one that loses nats: where one reaches over this
# many times what another does, each has a y axis of its own.
_TIMES = 4.0


def split(runs: list[Entry]) -> Figure | None:
    """Both parts of the gain as stacked bars around 0, by length, a panel a run.

    None where no run has a decomposition of a length past the base.
    """
    shown = [(run, name) for run, name in zip(runs, run_names(runs)) if steps(run)]
    if not shown:
        return None
    spans = [_span(steps(run)) for run, _ in shown]
    shared = max(spans) <= _TIMES * min(spans)
    figure, axes = panels([name for _, name in shown], "evaluation length (tokens)", shared)
    for panel, (run, _) in zip(axes, shown):
        _bars(panel, steps(run), crowded=len(shown) > 2)
    title = "What is the gain from longer inputs made of?"
    if not shared:
        title += "\neach panel has a y axis of its own"
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


def _span(entries: list[Entry]) -> float:
    """From the lowest to the highest that bars and intervals go, 0 included."""
    ends = [0.0]
    for step in entries:
        parts = [step[part]["nats"] for part in _PARTS]
        ends += [sum(min(part, 0.0) for part in parts), sum(max(part, 0.0) for part in parts)]
        if has_interval(step["gain"]):
            ends += [step["gain"]["low"], step["gain"]["high"]]
    return max(ends) - min(ends)


def _bars(axes: Axes, entries: list[Entry], crowded: bool) -> None:
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
        around = None
        if has_interval(gain):
            around = [[gain["nats"] - gain["low"]], [gain["high"] - gain["nats"]]]
        axes.errorbar(x, gain["nats"], around, linewidth=1, capsize=3, **_TOTAL)
    axes.set_xticks(
        range(len(entries)),
        [f"{step['length']:,}" for step in entries],
        rotation=45 if crowded and len(entries) > 5 else 0,
    )
    axes.set_xlim(-0.6, len(entries) - 0.4)
    axes.grid(False, axis="x")
