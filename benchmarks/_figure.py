"""Times by length, both axes logarithmic, as a figure of two panels a row."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure


def draw(
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]],
    lines: Mapping[str, tuple[str, str]],
    path: str,
) -> None:
    """Writes `path`: a panel a title, in it a line a name through (length, milliseconds).

    `lines` gives each name's colour, and its marker and dashes.
    """
    figure = Figure(figsize=(9, 0.8 + 2.8 * -(-len(panels) // 2)), layout="constrained")
    axes = figure.subplots(-(-len(panels) // 2), 2, sharex=True, squeeze=False).ravel()
    lengths = sorted(
        {length for panel in panels.values() for line in panel.values() for length, _ in line}
    )
    known = {}
    for panel, (title, measured) in zip(axes, panels.items()):
        for name, (colour, dashes) in lines.items():
            if name in measured:
                points = zip(*sorted(measured[name]))
                (known[name],) = panel.plot(*points, dashes, color=colour, markersize=4)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=8)
        panel.grid(True, linewidth=0.4, color="0.85")
        panel.set_title(title, fontsize=10)
    figure.legend(
        known.values(), known, loc="outside upper center", ncols=4, frameon=False, fontsize=9
    )
    figure.supxlabel("length (tokens, log scale)", fontsize=10)
    figure.supylabel("milliseconds (log scale)", fontsize=10)
    figure.savefig(path, dpi=160)
