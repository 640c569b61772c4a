"""Does attention still distinguish near keys from far keys past the training length?"""

from matplotlib.figure import Figure

from alibi_jax.report.figures.style import (
    WIDTH,
    add_grid,
    add_legend,
    escape_math,
    line_style,
    mark_training_lengths,
    set_length_axis,
)
from alibi_jax.report.formatting import Entry
from alibi_jax.report.runs import measured_attention, run_names


def resolution(runs: list[Entry]) -> Figure | None:
    """Attention resolution against length: a thick line for each run, a thin one for each layer.

    None if no run has a number.
    """
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.add_subplot()
    lengths: set[int] = set()
    for number, (run, name) in enumerate(zip(runs, run_names(runs))):
        measured = measured_attention(run)
        if not measured:
            continue
        xs = [entry["length"] for entry in measured]
        lengths |= set(xs)
        style = line_style(number)
        for layer_by_length in zip(*(entry["layers"] for entry in measured)):
            axes.plot(
                xs,
                [layer["resolution"] for layer in layer_by_length],
                color=style["color"],
                linestyle=style["linestyle"],
                linewidth=0.6,
                alpha=0.7,
            )
        ys = [entry["resolution"] for entry in measured]
        axes.plot(xs, ys, label=escape_math(name), **style)
    if not lengths:
        return None
    set_length_axis(axes, lengths)
    mark_training_lengths(axes, (run["train_length"] for run in runs))
    axes.set_ylabel("attention resolution")
    axes.set_title("Attention resolution by length (thin lines: layers)", fontsize=11, pad=28)
    add_grid(axes)
    add_legend(figure)
    return figure
