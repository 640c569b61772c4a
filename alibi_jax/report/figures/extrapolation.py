"""Does the perplexity of a model hold past its training length?"""

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

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
from alibi_jax.report.protocols import describe, stride_in_name
from alibi_jax.report.runs import run_names


def extrapolation(runs: list[Entry], protocol: str) -> Figure:
    """Perplexity against evaluation length, a line for each run and stride of the protocol."""
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.add_subplot()
    lines = [
        (f"{name}, stride {stride}" if stride else name, rows)
        for run, name in zip(runs, run_names(runs))
        for stride, rows in _rows_by_stride(run, protocol)
    ]
    lengths: set[int] = set()
    perplexities: list[float] = []
    for number, (label, rows) in enumerate(lines):
        points = sorted((row["length"], row["perplexity"]) for row in rows if "error" not in row)
        if not points:
            continue
        xs, ys = zip(*points)
        lengths |= set(xs)
        perplexities += ys
        axes.plot(xs, ys, label=escape_math(label), **line_style(number))
    axes.set_yscale("log")
    set_length_axis(axes, lengths)
    mark_training_lengths(axes, (run["train_length"] for run in runs))
    # A narrow range may hold no tick at 1, 2 or 5 times a power of ten.
    narrow = bool(perplexities) and max(perplexities) < 4 * min(perplexities)
    axes.yaxis.set_major_locator(MaxNLocator(6) if narrow else LogLocator(10, (1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.set_ylabel("perplexity per token (log scale)")
    title = escape_math(describe(protocol).title)
    axes.set_title(f"Train short, test long: {title}", fontsize=11, pad=28)
    add_grid(axes)
    if lengths:
        add_legend(figure)
    else:
        axes.text(0.5, 0.5, "no length has a result", transform=axes.transAxes, ha="center")
    return figure


def _rows_by_stride(run: Entry, protocol: str) -> list[tuple[int, list[Entry]]]:
    """Groups a protocol's rows by stride, in ascending order; 0 if the name has no stride."""
    by_stride: dict[int, list[Entry]] = {}
    for row in run["rows"]:
        if row["protocol"] == protocol:
            by_stride.setdefault(stride_in_name(row) or 0, []).append(row)
    return sorted(by_stride.items(), key=lambda item: item[0])
