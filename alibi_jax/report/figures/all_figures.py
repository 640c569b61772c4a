"""All figures of a report: perplexity for each protocol, and one for each further question."""

from typing import Any

from matplotlib.figure import Figure

from alibi_jax.report.figures.extrapolation import extrapolation
from alibi_jax.report.figures.position_curve import position_curve
from alibi_jax.report.figures.resolution import resolution
from alibi_jax.report.figures.split import split
from alibi_jax.report.protocols import KNOWN_FIGURES, describe, protocols_of

_OTHER_FIGURES = {"split": split, "position_curve": position_curve, "resolution": resolution}
# Names of the figures of known protocols and of all other figures.
NAMES = (*KNOWN_FIGURES, *_OTHER_FIGURES)


def figure_names(results: dict[str, Any]) -> list[str]:
    """The names of the figures that these results may have, by file name without suffix."""
    protocols = protocols_of(results["runs"])
    return [*(describe(protocol).figure for protocol in protocols), *_OTHER_FIGURES]


def draw(results: dict[str, Any]) -> dict[str, Figure]:
    """The figures by file name without suffix.

    Each protocol with rows has a figure, even if all its rows are errors; any other figure is
    left out if it has no numbers to show.
    """
    runs = results["runs"]
    figures = {
        describe(protocol).figure: extrapolation(runs, protocol) for protocol in protocols_of(runs)
    }
    others = {name: draw_figure(runs) for name, draw_figure in _OTHER_FIGURES.items()}
    return figures | {name: figure for name, figure in others.items() if figure is not None}
