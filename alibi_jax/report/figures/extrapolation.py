"""Does a model hold past the length it was trained at?"""

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from alibi_jax.report.figures.style import (
    WIDTH,
    grid,
    legend,
    length_axis,
    line_style,
    mark_training,
    plain,
)
from alibi_jax.report.formatting import Entry, run_names

_TITLES = {
    "nonoverlapping": "nonoverlapping windows",
    "sliding": "sliding windows",
    "fixed": "the whole length as context",
}


def extrapolation(runs: list[Entry], protocol: str) -> Figure:
    """Perplexity against evaluation length, a line a run, the training length marked."""
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.add_subplot()
    lengths: set[int] = set()
    perplexities: list[float] = []
    lines = [
        (run, name, stride)
        for run, name in zip(runs, run_names(runs))
        for stride in sorted(
            {
                row["stride"] if protocol == "sliding" else 0
                for row in run["rows"]
                if row["protocol"] == protocol
            }
        )
    ]
    for number, (run, name, stride) in enumerate(lines):
        points = sorted(
            (row["length"], row["perplexity"])
            for row in run["rows"]
            if row["protocol"] == protocol and "error" not in row and stride in (0, row["stride"])
        )
        if not points:
            continue
        xs, ys = zip(*points)
        lengths |= set(xs)
        perplexities += ys
        label = plain(f"{name}, stride {stride}" if stride else name)
        axes.plot(xs, ys, label=label, **line_style(number))
    axes.set_yscale("log")
    length_axis(axes, lengths)
    mark_training(axes, (run["train_length"] for run in runs))
    # Powers of ten alone would leave a narrow range without a number.
    narrow = bool(perplexities) and max(perplexities) < 4 * min(perplexities)
    axes.yaxis.set_major_locator(MaxNLocator(6) if narrow else LogLocator(10, (1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.set_ylabel("perplexity per token (log scale)")
    axes.set_title(f"Train short, test long: {_TITLES[protocol]}", fontsize=11, pad=28)
    grid(axes)
    if lengths:
        legend(figure)
    else:
        axes.text(0.5, 0.5, "no length has a number", transform=axes.transAxes, ha="center")
    return figure
