"""A figure of times by length, with two panels per row and logarithmic axes."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure


def draw(
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]],
    lines: Mapping[str, tuple[str, str]],
    path: str,
) -> None:
    """Draws the figure and writes it to `path`.

    `panels` maps the title of each panel to its lines, and the name of each line to its points
    (length, milliseconds). `lines` maps the name of a line to its colour and its format string,
    which holds the marker and the dashes.
    """
    figure = Figure(figsize=(9, 0.8 + 2.8 * -(-len(panels) // 2)), layout="constrained")
    axes = figure.subplots(-(-len(panels) // 2), 2, sharex=True, squeeze=False).ravel()
    lengths = sorted(
        {length for panel in panels.values() for line in panel.values() for length, _ in line}
    )
    plotted = {}
    for panel, (title, measured) in zip(axes, panels.items()):
        for name, (colour, style) in lines.items():
            if name in measured:
                points = zip(*sorted(measured[name]))
                (plotted[name],) = panel.plot(*points, style, color=colour, markersize=4)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=8)
        panel.grid(True, linewidth=0.4, color="0.85")
        panel.set_title(title, fontsize=10)
    figure.legend(
        plotted.values(), plotted, loc="outside upper center", ncols=4, frameon=False, fontsize=9
    )
    figure.supxlabel("length (tokens, log scale)", fontsize=10)
    figure.supylabel("milliseconds (log scale)", fontsize=10)
    figure.savefig(path, dpi=160)
