"""All figures of a report: a perplexity figure per protocol, and the figures of `FIGURES`."""

import dataclasses
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from alibi_jax.report.figures.decomposition import decomposition
from alibi_jax.report.figures.extrapolation import extrapolation
from alibi_jax.report.figures.position_curve import position_curve
from alibi_jax.report.figures.resolution import resolution
from alibi_jax.report.formatting import Entry
from alibi_jax.report.protocols import KNOWN_FIGURES, describe, protocols_of


@dataclasses.dataclass(frozen=True)
class FigureSpec:
    """A figure that belongs to no protocol, and the words below it on the page.

    `draw` takes the runs of results.json, and returns None if they have no numbers to show.
    """

    draw: Callable[[list[Entry]], Figure | None]
    question: str
    caption: str


# By file name without suffix.
FIGURES = {
    "decomposition": FigureSpec(
        decomposition,
        question="Where does the gain from longer inputs come from?",
        caption=(
            "Bars above 0 lower the loss, bars below 0 raise it. The hatched part is the gain "
            "from fewer early tokens: fewer targets are early in their window. The plain part "
            "is the gain from longer context. The diamond is the total gain, with its interval. "
            "In non-overlapping windows most targets see less than the whole context. The early "
            "token curse is the loss in these windows minus the loss with the whole context. If "
            "it is negative, the whole context raises the loss. The hatched part then does not "
            "measure early tokens. It measures how much of this increase the windows avoid."
        ),
    ),
    "position_curve": FigureSpec(
        position_curve,
        question="How does the loss depend on the context in the window?",
        caption=(
            "Mean loss by the number of tokens that a target sees in its window. "
            "Where a line turns up, the model cannot use that much context. Lines "
            "that coincide differ only in how far they go."
        ),
    ),
    "resolution": FigureSpec(
        resolution,
        question="Does attention still distinguish near keys from far keys?",
        caption=(
            "Attention resolution by length (Sun et al. 2022, equation 3): how much "
            "the attention weight falls from a key to the key that is one token farther "
            "away, as a mean over the keys weighted by their attention weights. Thick "
            "lines: the models. Thin lines: their layers."
        ),
    ),
}
# Names of the figures of known protocols and of all other figures.
NAMES = (*KNOWN_FIGURES, *FIGURES)


def figure_names(results: dict[str, Any]) -> list[str]:
    """The names of the figures that these results may have, by file name without suffix."""
    protocols = protocols_of(results["runs"])
    return [*(describe(protocol).figure for protocol in protocols), *FIGURES]


def draw(results: dict[str, Any]) -> dict[str, Figure]:
    """The figures by file name without suffix.

    Each protocol with rows has a figure, even if all its rows are errors; any other figure is
    left out if it has no numbers to show.
    """
    runs = results["runs"]
    figures = {
        describe(protocol).figure: extrapolation(runs, protocol) for protocol in protocols_of(runs)
    }
    others = {name: figure.draw(runs) for name, figure in FIGURES.items()}
    return figures | {name: figure for name, figure in others.items() if figure is not None}
