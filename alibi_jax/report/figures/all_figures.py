"""The figures of a report, one for each question that the results answer."""

from typing import Any

from matplotlib.figure import Figure

from alibi_jax.report.figures.extrapolation import extrapolation
from alibi_jax.report.figures.position_curve import position_curve
from alibi_jax.report.figures.resolution import resolution
from alibi_jax.report.figures.split import split

NAMES = (
    "extrapolation",
    "extrapolation_sliding",
    "extrapolation_fixed",
    "split",
    "position_curve",
    "resolution",
)


def draw(results: dict[str, Any]) -> dict[str, Figure]:
    """The figures by file name; what has no numbers to show has no figure, but for perplexity."""
    runs = results["runs"]
    protocols = {row["protocol"] for run in runs for row in run["rows"]}
    figures = {
        "extrapolation"
        if protocol == "nonoverlapping"
        else f"extrapolation_{protocol}": extrapolation(runs, protocol)
        for protocol in ("nonoverlapping", "sliding", "fixed")
        if protocol in protocols
    }
    others = {
        "split": split(runs),
        "position_curve": position_curve(runs),
        "resolution": resolution(runs),
    }
    return figures | {name: figure for name, figure in others.items() if figure is not None}
