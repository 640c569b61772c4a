"""Results as one self-contained page: no script, no separate file, no network request."""

import importlib.resources
import io
import math
import re
from html import escape
from typing import Any

import jinja2
import matplotlib
from matplotlib.figure import Figure

from alibi_jax.report.figures.all_figures import FIGURES
from alibi_jax.report.formatting import (
    Entry,
    count_noun,
    format_confidence,
    format_interval,
    format_nats,
    format_percent,
    format_perplexity,
    join_with_and,
    keep_percent_together,
)
from alibi_jax.report.protocols import describe, protocol_name, protocols_of
from alibi_jax.report.runs import (
    all_comparable,
    error_notes,
    gains_by_length,
    lowest_perplexities,
    measured_attention,
    run_names,
)
from alibi_jax.report.sentences import run_sentences
from alibi_jax.report.summary import summary

# Number of shades for gains by token, and as many for losses.
_SHADES = 8
_FONTS = ["Helvetica", "Arial", "DejaVu Sans", "sans-serif"]
# Matplotlib's default metadata contains web addresses.
_NO_METADATA = {name: None for name in ("Creator", "Date", "Format", "Type")}


def page(results: dict[str, Any], figures: dict[str, Figure]) -> str:
    """The page, with every value from the results escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "count": lambda number: f"{number:,}",
        "count_noun": count_noun,
        "exp": math.exp,
        "interval": format_interval,
        "join_with_and": join_with_and,
        "nats": format_nats,
        "percent": format_percent,
        "perplexity": format_perplexity,
        "protocol_name": protocol_name,
    }
    text = importlib.resources.files(__package__).joinpath("template.html").read_text("utf-8")
    runs, confidence = results["runs"], results["asked"]["confidence"]
    captions = _figure_captions(runs)
    return environment.from_string(text).render(
        results=results,
        options={name: str(value) for name, value in results["asked"].items() if value is not None},
        confidence=format_confidence(confidence),
        all_comparable=all_comparable(runs),
        summary=keep_percent_together(summary(results)),
        runs=[_run_for_page(run, name, confidence) for run, name in zip(runs, run_names(runs))],
        protocols=_protocol_tables(runs),
        figures=[
            (name, *captions[name], inline_svg(figure, name, captions[name][0]))
            for name, figure in figures.items()
        ],
        limits=_limits(runs),
        shades=_SHADES,
        shade=lambda gain, scale: round(max(-1.0, min(1.0, gain / scale)) * _SHADES),
    )


def inline_svg(figure: Figure, name: str, title: str) -> str:
    """A figure as an SVG element for a page; text stays text, each id starts with `name`."""
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
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)


def _figure_captions(runs: list[Entry]) -> dict[str, tuple[str, str]]:
    """The question and the caption of each figure, by figure name."""
    descriptions = [describe(protocol) for protocol in protocols_of(runs)]
    others = {name: (figure.question, figure.caption) for name, figure in FIGURES.items()}
    return others | {text.figure: (text.question, text.caption) for text in descriptions}


def _run_for_page(run: Entry, name: str, confidence: float) -> Entry:
    """A run with its name, sentences and tables; the table of an unmeasured part is empty."""
    return run | {
        "name": name,
        "sentences": [keep_percent_together(text) for text in run_sentences(run, confidence)],
        "gains_by_length": gains_by_length(run),
        "curve": _curve_table(run),
        "attention": _attention_tables(run),
        "errors": error_notes(run),
        "scale": _strong_gain(run),
    }


def _protocol_tables(runs: list[Entry]) -> list[Entry]:
    """A table for each protocol: its name, its lengths, and a line for each run with rows.

    A line is the run's index and, for each length, the row (None without one) and the lowest
    perplexity among comparable runs (None without one).
    """
    lowest = lowest_perplexities(runs)
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
                        index,
                        [(rows.get(x), lowest[index].get((protocol, x))) for x in lengths],
                    )
                    for index, rows in enumerate(by_run)
                    if rows
                ],
            }
        )
    return tables


def _attention_tables(run: Entry) -> Entry:
    """A table for each attention statistic: a line for each head, a column for each length."""
    measured = measured_attention(run)
    heads = [
        (layer["layer"], head)
        for layer in (measured[0]["layers"] if measured else ())
        for head in range(len(layer["heads"]))
    ]
    return {
        "lengths": [entry["length"] for entry in measured],
        "windows": _window_counts(measured),
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


def _curve_table(run: Entry) -> Entry:
    """The loss by context: a line for each bin, with its point (or None) at each length."""
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


def _window_counts(measured: list[Entry]) -> str:
    counts = {entry["windows"] for entry in measured}
    if len(counts) == 1:
        return f"{count_noun(counts.pop(), 'window')} of each length"
    return join_with_and(
        [
            f"{count_noun(entry['windows'], 'window')} of {entry['length']:,} tokens"
            for entry in measured
        ]
    )


def _limits(runs: list[Entry]) -> dict[str, list[Any]]:
    """The numbers of targets of the gains, and what the intervals resample, without repetition."""
    decompositions = [run["decomposition"] for run in runs if run["decomposition"]]
    rows = [row for run in runs for row in run["rows"] if "error" not in row]
    return {
        "targets": list(dict.fromkeys(entry["targets"] for entry in decompositions)),
        "perplexities": _resampled(rows),
        "gains": _resampled(decompositions),
    }


def _resampled(entries: list[Entry]) -> list[str]:
    return list(dict.fromkeys(entry["resampled"] for entry in entries if entry["resampled"]))


def _strong_gain(run: Entry) -> float:
    """The gain with the strongest colour in the passage: its 95th percentile by size, in nats."""
    passage = (run["gain"] or {}).get("passage")
    if not passage or "error" in passage:
        return 1.0
    sizes = sorted(abs(piece["gain"]) for piece in passage["pieces"])
    return max(sizes[int(0.95 * (len(sizes) - 1))], 0.01)
