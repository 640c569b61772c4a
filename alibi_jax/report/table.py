"""Results as text for a terminal."""

import textwrap
from typing import Any

from alibi_jax.report.formatting import (
    Entry,
    alike,
    bounds,
    breaks_down,
    errors,
    label,
    listed,
    lowest,
    nats,
    protocol_name,
    steps,
    suffix,
    unbroken,
)
from alibi_jax.report.sentences import reading

_WIDTH = 100
_AMONG = " among runs of one text and tokenizer"


def table(results: dict[str, Any]) -> str:
    """Perplexities by length, what the gain from longer inputs is made of, and that in words."""
    runs = results["runs"]
    sections = [_perplexities(runs), _decompositions(results), *map(_sentences, runs)]
    return "\n\n".join(filter(None, sections))


def _perplexities(runs: list[Entry]) -> str:
    """One line a run and protocol, one column a length, * at the lowest of each column."""
    tables = lowest(runs)
    rows = [(run, row, best) for run, best in zip(runs, tables) for row in run["rows"]]
    lengths = sorted({row["length"] for _, row, _ in rows})
    header = ["run", "position", "trained at", "protocol", *(f"{length}" for length in lengths)]
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for run, row, best in rows:
        protocol = protocol_name(row)
        name = (run["workdir"], label(run), str(run["train_length"]), protocol)
        cells = lines.setdefault(name, {})
        if "error" in row:
            cells[row["length"]] = "—"
        else:
            is_best = row["perplexity"] == best.get((protocol, row["length"]))
            cells[row["length"]] = f"{row['perplexity']:.3f}" + "*" * is_best
    body = [
        [*name, *(cells.get(length, "") for length in lengths)] for name, cells in lines.items()
    ]
    split = ", ".join(sorted({run["split"] for run in runs}))
    notes = [f"{run['workdir']}{suffix(run)}, {error}" for run in runs for error in errors(run)]
    if any(tables):
        among = "" if all(alike(runs, run) == runs for run in runs) else _AMONG
        notes.insert(0, f"* the lowest of its protocol and length{among}")
    return "\n".join([f"perplexity per token, {split} split", *_aligned(header, body), *notes])


def _decompositions(results: dict[str, Any]) -> str:
    """One line a run and length: the gain and its parts; empty where none was measured."""
    header = ["run", "position", "from", "to", "gain", "early tokens", "context", "targets"]
    body = [
        [
            run["workdir"],
            label(run),
            f"{run['decomposition']['base']}",
            f"{step['length']}",
            *(
                nats(step[part]["nats"]) + bounds(step[part])
                for part in ("gain", "early_tokens", "context")
            ),
            f"{run['decomposition']['targets']}",
        ]
        for run in results["runs"]
        for step in steps(run)
    ]
    if not body:
        return ""
    hurt = [
        f"{run['workdir']}{suffix(run)} at {listed(lengths)}: what stands under early tokens is "
        "that windows spare most targets a context that hurts"
        for run in results["runs"]
        if (lengths := [f"{step['length']:,}" for step in steps(run) if breaks_down(step)])
    ]
    return "\n".join(
        ["gain from longer inputs = by fewer early tokens + by longer context, in nats a token"]
        + ["(in brackets: the interval of each)"] * any("[" in line[4] for line in body)
        + _aligned(header, body, names=2)
        + hurt
    )


def _sentences(run: Entry) -> str:
    sentences = reading(run)
    if not sentences:
        return ""
    text = textwrap.fill(
        unbroken(" ".join(sentences)),
        _WIDTH,
        initial_indent=f"{run['workdir']}{suffix(run)}: ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return text.replace("\u00a0", " ")


def _aligned(header: list[str], body: list[list[str]], names: int = 4) -> list[str]:
    """Columns below each other: names to the left, numbers to the right, each * after its own."""
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
