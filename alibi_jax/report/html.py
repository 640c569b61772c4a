"""Results as one self-contained page: no script, no file beside it, no request."""

import importlib.resources
import io
import math
import re
from typing import Any

import jinja2
import matplotlib
from matplotlib.figure import Figure

from alibi_jax.report.formatting import (
    Entry,
    alike,
    bounds,
    counted,
    errors,
    listed,
    lowest,
    measured_attention,
    nats,
    percent,
    protocol_name,
    run_names,
    significant,
    steps,
    unbroken,
)
from alibi_jax.report.sentences import reading, summary

# Shades of a gain or loss by token: this many each way.
_SHADES = 8
_FONTS = ["Helvetica", "Arial", "DejaVu Sans", "sans-serif"]
# Matplotlib's own would name addresses.
_NO_METADATA = {name: None for name in ("Creator", "Date", "Format", "Type")}
_CAPTIONS = {
    "extrapolation": (
        "Does the model hold past its training length?",
        "Perplexity in non-overlapping windows by evaluation length; lower is better, the dotted "
        "line is the training length. A longer window also has fewer targets with little context, "
        "so a falling line alone does not show that longer context helps.",
    ),
    "extrapolation_sliding": (
        "Does it hold where hardly any target has little context?",
        "Perplexity in sliding windows: past the first window only the last targets of each count.",
    ),
    "extrapolation_fixed": (
        "Does longer context itself help?",
        "Perplexity where each target has exactly the evaluation length as context, the same "
        "targets at each length. A line that falls past the dotted one uses the longer context.",
    ),
    "split": (
        "What is the gain from longer inputs made of?",
        "Bars above 0 lower the loss, bars below raise it. The hatched part comes from fewer "
        "targets early in their window, the plain part from longer context. The diamond is both "
        "together, with its interval. Where the early token curse is negative, windows spare most "
        "targets a context that hurts: the hatched part is then what they hide of that.",
    ),
    "position_curve": (
        "How much does a target lose that sees little of its window?",
        "Mean loss by context in the window. A line that turns up marks the context that the "
        "model cannot use; lines that lie on each other differ only in how far they go.",
    ),
    "resolution": (
        "Does attention still tell near keys from far ones?",
        "Attention resolution by length (Sun et al. 2022, equation 3): how much the attention "
        "weight falls from one key to the next, on average over what is attended to. Thick: the "
        "model; thin: each of its layers.",
    ),
}


def page(results: dict[str, Any], figures: dict[str, Figure]) -> str:
    """The page, with every value from the results escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "bounds": bounds,
        "count": lambda number: f"{number:,}",
        "counted": counted,
        "exp": math.exp,
        "nats": nats,
        "listed": listed,
        "percent": percent,
        "protocol_name": protocol_name,
        "significant": significant,
    }
    text = importlib.resources.files(__package__).joinpath("template.html").read_text("utf-8")
    runs = results["runs"]
    return environment.from_string(text).render(
        results=results,
        asked=_asked(results),
        confidence=f"{100 * results['asked']['confidence']:g} %",
        mixed=any(alike(runs, run) != runs for run in runs),
        summary=unbroken(summary(results)),
        runs=[_shown(run, name) for run, name in zip(runs, run_names(runs))],
        protocols=_protocols(runs),
        figures=[
            (name, *_CAPTIONS[name], inline_svg(figure, name, _CAPTIONS[name][0]))
            for name, figure in figures.items()
        ],
        limits=_limits(runs),
        shades=_SHADES,
        shade=lambda gain, scale: round(max(-1.0, min(1.0, gain / scale)) * _SHADES),
    )


def inline_svg(figure: Figure, name: str, title: str) -> str:
    """A figure as an element of a page, each id in it with `name` before it; text stays text."""
    file = io.StringIO()
    options: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.sans-serif": _FONTS,
    }
    with matplotlib.rc_context(options):
        figure.savefig(file, format="svg", metadata=_NO_METADATA)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(\bid="|\bhref="#|url\(#)', rf"\g<1>{name}-", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def _shown(run: Entry, name: str) -> Entry:
    """A run with what the page says of it; a part that was not measured is empty."""
    return run | {
        "name": name,
        "reading": [unbroken(sentence) for sentence in reading(run)],
        "steps": steps(run),
        "curve": _curve(run),
        "attention": _attention(run),
        "errors": errors(run),
        "scale": _scale(run),
    }


def _protocols(runs: list[Entry]) -> list[Entry]:
    """A table for each protocol: a line a run, in it a row, or None, and the lowest by length."""
    best = lowest(runs)
    tables = []
    for protocol in dict.fromkeys(protocol_name(row) for run in runs for row in run["rows"]):
        by_run = [
            {row["length"]: row for row in run["rows"] if protocol_name(row) == protocol}
            for run in runs
        ]
        lengths = sorted({length for rows in by_run for length in rows})
        tables.append(
            {
                "name": protocol,
                "lengths": lengths,
                "lines": [
                    (
                        number,
                        [(rows.get(x), best[number].get((protocol, x))) for x in lengths],
                    )
                    for number, rows in enumerate(by_run)
                    if rows
                ],
            }
        )
    return tables


def _attention(run: Entry) -> Entry:
    """Each measure of each head, a line a head, a column a length."""
    measured = measured_attention(run)
    heads = [
        (layer["layer"], head)
        for layer in (measured[0]["layers"] if measured else ())
        for head in range(len(layer["heads"]))
    ]
    return {
        "lengths": [entry["length"] for entry in measured],
        "windows": _windows(measured),
        "measures": {
            measure: [
                (
                    layer,
                    head,
                    [entry["layers"][layer]["heads"][head][measure] for entry in measured],
                )
                for layer, head in heads
            ]
            for measure in ("resolution", "distance", "entropy")
        },
    }


def _curve(run: Entry) -> Entry:
    """The loss by context: a line for each bin, with its point at each length, if any."""
    lengths = sorted(map(int, run["position_nll"]))
    points = {
        (point["context_from"], point["context_to"], length): point
        for length in lengths
        for point in run["position_nll"][str(length)]
    }
    bins = sorted({(begin, end) for begin, end, _ in points})
    return {
        "lengths": lengths,
        "bins": [
            (begin, end, [points.get((begin, end, length)) for length in lengths])
            for begin, end in bins
        ],
    }


def _windows(measured: list[Entry]) -> str:
    counts = {entry["windows"] for entry in measured}
    if len(counts) == 1:
        return f"{counted(counts.pop(), 'window')} of each length"
    return listed(
        [
            f"{counted(entry['windows'], 'window')} of {entry['length']:,} tokens"
            for entry in measured
        ]
    )


def _asked(results: Entry) -> dict[str, str]:
    """What was asked for, as it reads; what was not is left out."""
    return {name: str(value) for name, value in results["asked"].items() if value is not None}


def _limits(runs: list[Entry]) -> dict[str, list[Any]]:
    """How many targets gains are of, and what each interval resamples, each once."""
    parts = [run["decomposition"] for run in runs if run["decomposition"]]
    rows = [row for run in runs for row in run["rows"] if "error" not in row]
    return {
        "targets": list(dict.fromkeys(part["targets"] for part in parts)),
        "perplexities": _resampled(rows),
        "gains": _resampled(parts),
    }


def _resampled(entries: list[Entry]) -> list[str]:
    return list(dict.fromkeys(entry["resampled"] for entry in entries if entry["resampled"]))


def _scale(run: Entry) -> float:
    """The gain of a token that gets the strongest colour: 19 of 20 in the passage are less."""
    passage = (run["gain"] or {}).get("passage")
    if not passage or "error" in passage:
        return 1.0
    sizes = sorted(abs(piece["gain"]) for piece in passage["pieces"])
    return max(sizes[int(0.95 * (len(sizes) - 1))], 0.01)
