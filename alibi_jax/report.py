"""Results as a table, as files, and as the extrapolation figure."""

import csv
import functools
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from alibi_jax import evaluation
from alibi_jax.provenance import provenance
from alibi_jax.rescaling import parse_rescalings

# Okabe & Ito (2008): told apart by the colour-blind; markers and dashes tell the lines apart
# without any colour.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def evaluate(
    workdirs: list[pathlib.Path],
    *,
    lengths: str,
    protocols: str,
    rescalings: str,
    split: str,
    step: int | None,
    batch_tokens: int,
    out: pathlib.Path | None,
) -> int:
    """Evaluates runs, writes results.json, results.csv and figures, prints the table.

    `lengths`, `protocols` and `rescalings` are as on the command line; a rescaling is for the
    runs that it applies to. Returns the exit code: 1 where a row
    has no number.

    Raises:
        ValueError: before any work, where something asked for cannot be meant.
    """
    if not workdirs:
        raise ValueError("--workdir is missing: name the folder that train.py wrote")
    if batch_tokens < 1:
        raise ValueError(f"--batch_tokens={batch_tokens} must be at least 1")
    parsed = evaluation.parse_protocols(protocols)
    ways = parse_rescalings(rescalings)
    runs = [evaluation.load_run(workdir, step) for workdir in workdirs]
    grids = [evaluation.parse_lengths(lengths, run.config.train.length) for run in runs]
    for grid in grids:
        evaluation.check_strides(parsed, grid)
    entries = [
        (run, grid, way)
        for run, grid in zip(runs, grids)
        for way in ways
        if way.applies_to(run.config)
    ]
    for run, grid, way in entries:
        way.at(run.config, max(grid))
    for way in ways:
        if not any(way.applies_to(run.config) for run in runs):
            positions = ", ".join(sorted({run.config.model.position for run in runs}))
            raise ValueError(
                f"--rescalings={rescalings}: {way.name} is not for {positions}: leave it out"
            )
    results = provenance() | {
        "runs": [
            evaluation.evaluate_run(run, grid, parsed, split, batch_tokens, way)
            for run, grid, way in entries
        ]
    }
    if jax.process_index() == 0:
        written = write(results, out or workdirs[0] / "eval")
        print(table(results), *(f"wrote {path}" for path in written), sep="\n", flush=True)
    return int(any("error" in row for run in results["runs"] for row in run["rows"]))


def table(results: dict[str, Any]) -> str:
    """One line a run and protocol, one column a length, perplexities in them."""
    rows = [(run, row) for run in results["runs"] for row in run["rows"]]
    lengths = sorted({row["length"] for _, row in rows})
    header = ["run", "position", "trained at", "protocol", *(f"{length}" for length in lengths)]
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    notes = []
    for run, row in rows:
        protocol = row["protocol"]
        if protocol == "sliding":
            protocol += f":{row['stride']}"
        name = (run["workdir"], _label(run), str(run["train_length"]), protocol)
        cells = lines.setdefault(name, {})
        if "error" in row:
            cells[row["length"]] = "—"
            notes.append(
                f"{run['workdir']}{_suffix(run)}, {protocol} at {row['length']}: {row['error']}"
            )
        else:
            cells[row["length"]] = f"{row['perplexity']:.3f}"
    cells_by_line = [header] + [
        [*name, *(cells.get(length, "") for length in lengths)] for name, cells in lines.items()
    ]
    widths = [max(len(line[i]) for line in cells_by_line) for i in range(len(header))]

    def aligned(line: list[str]) -> str:
        names = [cell.ljust(width) for cell, width in zip(line[:4], widths[:4])]
        numbers = [cell.rjust(width) for cell, width in zip(line[4:], widths[4:])]
        return "  ".join(names + numbers).rstrip()

    rule = "  ".join("-" * width for width in widths)
    body = [aligned(cells_by_line[0]), rule, *map(aligned, cells_by_line[1:])]
    split = ", ".join(sorted({run["split"] for run in results["runs"]}))
    return "\n".join([f"perplexity per token, {split} split", *body, *notes])


def _suffix(run: dict[str, Any]) -> str:
    return "" if run["rescaling"] == "none" else f"+{run['rescaling']}"


def _label(run: dict[str, Any]) -> str:
    """The position method, and how it was rescaled, if it was."""
    return run["position"] + _suffix(run)


def write(results: dict[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes results.json, results.csv and one figure a protocol; each appears whole."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [
        _whole(
            folder / "results.json", lambda path: path.write_text(json.dumps(results, indent=1))
        ),
        _whole(folder / "results.csv", lambda path: _write_csv(results, path)),
    ]
    for protocol in sorted({row["protocol"] for run in results["runs"] for row in run["rows"]}):
        name = "extrapolation" if protocol == "nonoverlapping" else f"extrapolation_{protocol}"
        draw = functools.partial(_draw, results, protocol)
        written += [_whole(folder / f"{name}.{suffix}", draw) for suffix in ("png", "svg")]
    return written


def _whole(path: pathlib.Path, make: Callable[[pathlib.Path], Any]) -> pathlib.Path:
    fresh = path.with_name(f".{path.name}.new{path.suffix}")
    make(fresh)
    os.replace(fresh, path)
    return path


def _write_csv(results: dict[str, Any], path: pathlib.Path) -> None:
    about = ("workdir", "position", "rescaling", "train_length", "step", "split")
    rows = [
        {**{name: run[name] for name in about}, **row}
        for run in results["runs"]
        for row in run["rows"]
    ]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def _draw(results: dict[str, Any], protocol: str, path: pathlib.Path) -> None:
    """Perplexity against evaluation length, a line a run, the training length marked."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    lengths: set[int] = set()
    perplexities: list[float] = []
    several = len({run["train_length"] for run in results["runs"]}) > 1
    lines = [
        (run, stride)
        for run in results["runs"]
        for stride in sorted(
            {
                row["stride"] if protocol == "sliding" else 0
                for row in run["rows"]
                if row["protocol"] == protocol
            }
        )
    ]
    same_position = len({_label(run) for run in results["runs"]}) < len(results["runs"])
    for number, (run, stride) in enumerate(lines):
        points = sorted(
            (row["length"], row["perplexity"])
            for row in run["rows"]
            if row["protocol"] == protocol and "error" not in row and stride in (0, row["stride"])
        )
        if not points:
            continue
        label = _label(run)
        if same_position:
            label += f" ({pathlib.Path(run['workdir']).name})"
        if several:
            label += f", trained at {run['train_length']}"
        if stride:
            label += f", stride {stride}"
        xs, ys = zip(*points)
        lengths |= set(xs)
        perplexities += ys
        axes.plot(
            xs,
            ys,
            label=label,
            color=_COLOURS[number % len(_COLOURS)],
            marker=_MARKERS[number % len(_MARKERS)],
            # Moved on by one with each round, so that more lines than colours differ too.
            linestyle=_DASHES[(number + number // len(_COLOURS)) % len(_DASHES)],
            markersize=6,
            markeredgecolor="white",
            markeredgewidth=0.7,
            linewidth=1.6,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for train_length in sorted({run["train_length"] for run in results["runs"]}):
        axes.axvline(train_length, color="0.4", linewidth=1, linestyle=(0, (2, 3)), zorder=0)
        # Above the axes, where no line can run through it.
        axes.annotate(
            f"trained\nat {train_length}",
            (train_length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color="0.3",
        )
    axes.set_xticks(sorted(lengths), [f"{length:,}" for length in sorted(lengths)])
    axes.xaxis.set_minor_locator(NullLocator())
    # Powers of ten alone would leave a narrow range without a number.
    narrow = bool(perplexities) and max(perplexities) < 4 * min(perplexities)
    axes.yaxis.set_major_locator(MaxNLocator(6) if narrow else LogLocator(10, (1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.set_xlabel("evaluation length (tokens)")
    axes.set_ylabel("perplexity per token (log scale)")
    axes.set_title(f"Train short, test long: {protocol} windows", fontsize=11, pad=28)
    axes.grid(True, which="major", linewidth=0.4, color="0.85")
    if lengths:
        figure.legend(loc="outside right upper", frameon=False, fontsize=9, handlelength=3)
    else:
        axes.text(0.5, 0.5, "no length has a number", transform=axes.transAxes, ha="center")
    figure.savefig(path, dpi=160)
