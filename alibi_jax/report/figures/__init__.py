"""The figures of a report, one for each question that the results answer."""

from alibi_jax.report.figures.all_figures import NAMES, draw, figure_names
from alibi_jax.report.figures.decomposition import decomposition
from alibi_jax.report.figures.extrapolation import extrapolation
from alibi_jax.report.figures.position_curve import position_curve
from alibi_jax.report.figures.resolution import resolution

__all__ = [
    "NAMES",
    "decomposition",
    "draw",
    "extrapolation",
    "figure_names",
    "position_curve",
    "resolution",
]
