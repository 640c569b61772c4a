"""Results as text for a terminal."""

import textwrap
from typing import Any

from alibi_jax.report.formatting import (
    Entry,
    format_confidence,
    format_interval,
    format_nats,
    join_with_and,
    keep_percent_together,
)
from alibi_jax.report.protocols import protocol_name
from alibi_jax.report.runs import (
    all_comparable,
    error_notes,
    gains_by_length,
    lowest_perplexities,
    position_label,
    rescaling_suffix,
    whole_context_hurts,
)
from alibi_jax.report.sentences import run_sentences

_WIDTH = 100


def table(results: dict[str, Any]) -> str:
    """A table of perplexities, a table of the gain's parts, and a paragraph about each run."""
    runs, confidence = results["runs"], results["asked"]["confidence"]
    sections = [_perplexities(runs), _decompositions(runs, confidence)]
    sections += [_paragraph(run, confidence) for run in runs]
    return "\n\n".join(filter(None, sections))


def _perplexities(runs: list[Entry]) -> str:
    """A line for each run and protocol, a column for each length.

    A * marks the lowest perplexity of a protocol and length among comparable runs.
    """
    lowest_per_run = lowest_perplexities(runs)
    rows = [(run, row, lowest) for run, lowest in zip(runs, lowest_per_run) for row in run["rows"]]
    lengths = sorted({row["length"] for _, row, _ in rows})
    header = ["run", "position", "trained at", "protocol", *(f"{length}" for length in lengths)]
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for run, row, lowest in rows:
        protocol = protocol_name(row)
        name = (run["workdir"], position_label(run), str(run["train_length"]), protocol)
        cells = lines.setdefault(name, {})
        if "error" in row:
            cells[row["length"]] = "—"
        else:
            is_lowest = row["perplexity"] == lowest.get((protocol, row["length"]))
            cells[row["length"]] = f"{row['perplexity']:.3f}" + "*" * is_lowest
    body = [
        [*name, *(cells.get(length, "") for length in lengths)] for name, cells in lines.items()
    ]
    split = ", ".join(sorted({run["split"] for run in runs}))
    notes = [
        f"{run['workdir']}{rescaling_suffix(run)}, {note}"
        for run in runs
        for note in error_notes(run)
    ]
    if any(lowest_per_run):
        among = "" if all_comparable(runs) else " among runs with the same text and tokenizer"
        notes.insert(0, f"* the lowest perplexity of its protocol and length{among}")
    return "\n".join([f"perplexity per token, {split} split", *_aligned(header, body), *notes])


def _decompositions(runs: list[Entry], confidence: float) -> str:
    """A line for each run and length: the gain and its parts; empty without a decomposition."""
    header = ["run", "position", "from", "to", "gain", "early tokens", "context", "targets"]
    body = [
        [
            run["workdir"],
            position_label(run),
            f"{run['decomposition']['base']}",
            f"{entry['length']}",
            *(
                format_nats(entry[part]["nats"]) + format_interval(entry[part])
                for part in ("gain", "early_tokens", "context")
            ),
            f"{run['decomposition']['targets']}",
        ]
        for run in runs
        for entry in gains_by_length(run)
    ]
    if not body:
        return ""
    headings = [
        "gain from longer inputs = gain from fewer early tokens + gain from longer context "
        "(nats per token)"
    ]
    if any("[" in line[4] for line in body):
        headings.append(f"(in brackets: {format_confidence(confidence)} intervals)")
    notes = [
        f'{run["workdir"]}{rescaling_suffix(run)} at {join_with_and(lengths)}: the column "early '
        'tokens" does not measure early tokens. The loss with the whole context is higher than in '
        "non-overlapping windows, where most targets see less context."
        for run in runs
        if (
            lengths := [
                f"{entry['length']:,}"
                for entry in gains_by_length(run)
                if whole_context_hurts(entry)
            ]
        )
    ]
    return "\n".join([*headings, *_aligned(header, body, names=2), *notes])


def _paragraph(run: Entry, confidence: float) -> str:
    sentences = run_sentences(run, confidence)
    if not sentences:
        return ""
    text = textwrap.fill(
        keep_percent_together(" ".join(sentences)),
        _WIDTH,
        initial_indent=f"{run['workdir']}{rescaling_suffix(run)}: ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return text.replace("\u00a0", " ")


def _aligned(header: list[str], body: list[list[str]], names: int = 4) -> list[str]:
    """The lines with aligned columns: the first `names` to the left, numbers to the right.

    A * stands after its number and does not count for the alignment.
    """
    lines = [header, *body]
    widths = [max(len(line[i].rstrip("*")) for line in lines) for i in range(len(header))]

    def line_of(cells: list[str]) -> str:
        line = ""
        for i, (cell, width) in enumerate(zip(cells, widths)):
            bare = cell.rstrip("*")
            line += bare.ljust(width) if i < names else bare.rjust(width)
            line += ("*" if bare != cell else " ") + " "
        return line.rstrip()

    rule = "  ".join("-" * width for width in widths)
    return [line_of(header), rule, *map(line_of, body)]
