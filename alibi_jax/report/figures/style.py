"""What the figures share: how lines differ, how lengths and the training length are shown."""

import math
import textwrap
from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

WIDTH = 7.5
# Characters of a legend's names that leave the axes their room, beside them and below.
_BESIDE, _BELOW = 18, 84

# Okabe & Ito (2008): told apart by the colour-blind; markers and dashes tell the lines apart
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
TRAINED: dict[str, Any] = {"color": "0.4", "linewidth": 1, "linestyle": (0, (2, 3)), "zorder": 0}


def line_style(number: int) -> dict[str, Any]:
    """How the line of this number is drawn."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        # Moved on by one with each round, so that more lines than colours differ too.
        "linestyle": DASHES[(number + number // len(COLOURS)) % len(DASHES)],
        "markersize": 6,
        "markeredgecolor": "white",
        "markeredgewidth": 0.7,
        "linewidth": 1.6,
    }


def plain(name: str) -> str:
    """A name as it stands: Matplotlib would take what is between dollars for mathematics."""
    return name.replace("$", r"\$")


def grid(axes: Axes) -> None:
    """Faint lines behind everything."""
    axes.grid(True, which="major", linewidth=0.4, color="0.85")
    axes.set_axisbelow(True)


def length_axis(axes: Axes, lengths: Iterable[int]) -> None:
    """A log scale with these lengths as ticks."""
    ticks = sorted(set(lengths))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{length:,}" for length in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("evaluation length (tokens)")


def mark_training(axes: Axes, train_lengths: Iterable[int]) -> None:
    """A dotted line at each training length, named above the axes, where no line can run."""
    for train_length in sorted(set(train_lengths)):
        axes.axvline(train_length, **TRAINED)
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


def legend(figure: Figure) -> None:
    """Every line by name: beside the axes, or below them where a name would take their room."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "handlelength": 3}
    longest = max(map(len, labels))
    if longest <= _BESIDE:
        figure.legend(handles, labels, loc="outside right upper", **look)
        return
    columns = 2 if longest <= _BELOW // 2 else 1
    labels = [textwrap.fill(label, _BELOW) for label in labels]
    lines = sum(label.count("\n") + 1 for label in labels)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.2 * math.ceil(lines / columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, **look)


def panels(names: list[str], xlabel: str, sharey: bool = True) -> tuple[Figure, list[Axes]]:
    """A panel for each name, at most three beside each other, with one y axis or one each."""
    columns = len(names) if len(names) < 4 else 2 if len(names) == 4 else 3
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(WIDTH, 1.7 + 2.3 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharey=sharey, squeeze=False).ravel()
    for unused in axes[len(names) :]:
        unused.set_visible(False)
    for panel in axes[max(0, len(names) - columns) : len(names)]:
        panel.set_xlabel(xlabel, fontsize=9)
    for panel, name in zip(axes, names):
        panel.set_title(textwrap.fill(plain(name), 78 // columns), fontsize=9)
        panel.tick_params(labelsize=8)
        grid(panel)
    return figure, list(axes[: len(names)])
