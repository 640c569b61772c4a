"""How does the loss depend on how many tokens of its window a target sees?"""

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from alibi_jax.report.figures.style import TRAINING_LENGTH, line_style, panels
from alibi_jax.report.formatting import Entry
from alibi_jax.report.runs import run_names


def position_curve(runs: list[Entry]) -> Figure | None:
    """Mean loss against context in non-overlapping windows: one panel per run, one line per length.

    Each point stands at the geometric middle of its bin. None if no run has a curve.
    """
    with_curve = [(run, name) for run, name in zip(runs, run_names(runs)) if run["position_nll"]]
    if not with_curve:
        return None
    figure, axes = panels([name for _, name in with_curve], "context in the window (tokens)")
    lengths = sorted({int(length) for run, _ in with_curve for length in run["position_nll"]})
    small_markers = {"markersize": 4.5, "markeredgewidth": 0.3}
    styles = {length: line_style(number) | small_markers for number, length in enumerate(lengths)}
    for panel, (run, _) in zip(axes, with_curve):
        for length in lengths:
            curve = run["position_nll"].get(str(length), [])
            xs = [(point["context_from"] * point["context_to"]) ** 0.5 for point in curve]
            panel.plot(xs, [point["nll"] for point in curve], **styles[length])
        panel.axvline(run["train_length"], **TRAINING_LENGTH)
        panel.set_xscale("log", base=2)
        panel.set_xlim(0.7, 1.4 * lengths[-1])
        panel.xaxis.set_major_locator(LogLocator(4 if len(with_curve) < 3 else 8))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    figure.suptitle("Loss by context in the window", fontsize=11)
    figure.supylabel("mean loss (nats per token)", fontsize=10)
    handles = [Line2D([], [], label=f"length {length:,}", **styles[length]) for length in lengths]
    handles.append(Line2D([], [], label="training length", **TRAINING_LENGTH))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=9,
        handlelength=3,
    )
    return figure
