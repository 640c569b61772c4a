"""Shared parts of the figures: line styles, length axes, training lengths, legends, panels."""

import math
import textwrap
from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

WIDTH = 7.5
# The most characters of a name in a legend beside the axes, and of a line in a legend below them.
_MAX_BESIDE, _MAX_BELOW = 18, 84

# Okabe & Ito (2008): distinct for colour-blind people. Markers and dashes distinguish the lines
# without any colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = (
    "-",
    "--",
    "-.",
    ":",
    (0, (5, 1)),
    (0, (3, 1, 1, 1)),
    (0, (1, 1)),
)
TRAINING_LENGTH: dict[str, Any] = {
    "color": "0.4",
    "linewidth": 1,
    "linestyle": (0, (2, 3)),
    "zorder": 0,
}


def line_style(number: int) -> dict[str, Any]:
    """Colour, marker and dashes of the line with this number."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        # Shifted by one after each round of colours, so that more lines than colours still differ.
        "linestyle": DASHES[(number + number // len(COLOURS)) % len(DASHES)],
        "markersize": 6,
        "markeredgecolor": "white",
        "markeredgewidth": 0.7,
        "linewidth": 1.6,
    }


def escape_math(name: str) -> str:
    """The name with escaped dollar signs: Matplotlib sets text between dollars as mathematics."""
    return name.replace("$", r"\$")


def add_grid(axes: Axes) -> None:
    """Adds faint grid lines behind everything else."""
    axes.grid(True, which="major", linewidth=0.4, color="0.85")
    axes.set_axisbelow(True)


def set_length_axis(axes: Axes, lengths: Iterable[int]) -> None:
    """Makes the x axis a log scale with these lengths as ticks."""
    ticks = sorted(set(lengths))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{length:,}" for length in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("evaluation length (tokens)")


def mark_training_lengths(axes: Axes, train_lengths: Iterable[int]) -> None:
    """Adds a dotted line at each training length, with a label above the axes, clear of curves."""
    for train_length in sorted(set(train_lengths)):
        axes.axvline(train_length, **TRAINING_LENGTH)
        axes.annotate(
            f"trained\nat {train_length}",
            (train_length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color="0.3",
        )


def add_legend(figure: Figure) -> None:
    """Adds the lines' names beside the axes, or below them if a name is too long for that."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    style: dict[str, Any] = {"frameon": False, "fontsize": 9, "handlelength": 3}
    longest = max(map(len, labels))
    if longest <= _MAX_BESIDE:
        figure.legend(handles, labels, loc="outside right upper", **style)
        return
    columns = 2 if longest <= _MAX_BELOW // 2 else 1
    labels = [textwrap.fill(label, _MAX_BELOW) for label in labels]
    lines = sum(label.count("\n") + 1 for label in labels)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.2 * math.ceil(lines / columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, **style)


def panels(names: list[str], xlabel: str, sharey: bool = True) -> tuple[Figure, list[Axes]]:
    """A panel for each name, at most three in a row; the panels share their y axis if `sharey`."""
    columns = len(names) if len(names) < 4 else 2 if len(names) == 4 else 3
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(WIDTH, 1.7 + 2.3 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharey=sharey, squeeze=False).ravel()
    for unused in axes[len(names) :]:
        unused.set_visible(False)
    for panel in axes[max(0, len(names) - columns) : len(names)]:
        panel.set_xlabel(xlabel, fontsize=9)
    for panel, name in zip(axes, names):
        panel.set_title(textwrap.fill(escape_math(name), 78 // columns), fontsize=9)
        panel.tick_params(labelsize=8)
        add_grid(panel)
    return figure, list(axes[: len(names)])
