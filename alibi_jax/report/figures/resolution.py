"""Does attention still tell near keys from far ones past the training length?"""

from matplotlib.figure import Figure

from alibi_jax.report.figures.style import (
    WIDTH,
    grid,
    legend,
    length_axis,
    line_style,
    mark_training,
    plain,
)
from alibi_jax.report.formatting import Entry, measured_attention, run_names


def resolution(runs: list[Entry]) -> Figure | None:
    """Attention resolution against length, a line a run, a thin one for each of its layers.

    None where no run has a number.
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
        for layers in zip(*(entry["layers"] for entry in measured)):
            axes.plot(
                xs,
                [layer["resolution"] for layer in layers],
                color=style["color"],
                linestyle=style["linestyle"],
                linewidth=0.6,
                alpha=0.7,
            )
        axes.plot(xs, [entry["resolution"] for entry in measured], label=plain(name), **style)
    if not lengths:
        return None
    length_axis(axes, lengths)
    mark_training(axes, (run["train_length"] for run in runs))
    axes.set_ylabel("attention resolution")
    axes.set_title("Attention resolution by length (thin: each layer)", fontsize=11, pad=28)
    grid(axes)
    legend(figure)
    return figure
