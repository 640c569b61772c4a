"""Names of runs, which runs are comparable, and the parts of a run's results that have numbers."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

from alibi_jax.report.formatting import Entry, has_interval
from alibi_jax.report.protocols import protocol_name


def rescaling_suffix(run: Entry) -> str:
    """The rescaling of a run as it follows a name; empty without rescaling."""
    return "" if run["rescaling"] == "none" else f"+{run['rescaling']}"


def position_label(run: Entry) -> str:
    """The position method, followed by the rescaling if there is one."""
    return run["position"] + rescaling_suffix(run)


def run_names(runs: Sequence[Entry]) -> list[str]:
    """A short name for each run; names differ unless a run is listed twice."""
    names = [position_label(run) for run in runs]
    if len(set(names)) < len(names):
        folders = [pathlib.Path(run["workdir"]).name for run in runs]
        if len(set(zip(names, folders))) < len(names):
            folders = [run["workdir"] for run in runs]
        names = [f"{name} ({folder})" for name, folder in zip(names, folders)]
    if len({run["train_length"] for run in runs}) > 1:
        names = [f"{name} trained at {run['train_length']}" for name, run in zip(names, runs)]
    return names


def comparable_runs(runs: Sequence[Entry], run: Entry) -> list[Entry]:
    """The runs with the same text and tokenizer as this run, itself included."""
    return [other for other in runs if _text_and_tokenizer(other) == _text_and_tokenizer(run)]


def all_comparable(runs: Sequence[Entry]) -> bool:
    """Whether all runs have the same text and tokenizer."""
    return all(comparable_runs(runs, run) == runs for run in runs)


def _text_and_tokenizer(run: Entry) -> tuple[Any, ...]:
    corpus = (run["corpus"][key] for key in ("dataset", "split", "tokens", "bytes"))
    return (*corpus, run["config"]["data"]["tokenizer"])


def lowest_perplexities(runs: Sequence[Entry]) -> list[dict[tuple[str, int], float]]:
    """The lowest perplexity among comparable runs, by protocol and length, for each run.

    Perplexities per token are comparable only on the same tokens. The dictionary of a run without
    another comparable run is empty.
    """
    lowest_per_run = []
    for group in (comparable_runs(runs, run) for run in runs):
        lowest: dict[tuple[str, int], float] = {}
        for run in group if len(group) > 1 else ():
            for row in run["rows"]:
                if "error" not in row:
                    column = (protocol_name(row), row["length"])
                    lowest[column] = min(lowest.get(column, math.inf), row["perplexity"])
        lowest_per_run.append(lowest)
    return lowest_per_run


def gains_by_length(run: Entry) -> list[Entry]:
    """The entries of the decomposition at lengths above the base length, in order of length."""
    decomposition = run["decomposition"]
    if decomposition is None:
        return []
    return sorted(
        (entry for entry in decomposition["lengths"] if entry["length"] > decomposition["base"]),
        key=lambda entry: entry["length"],
    )


def measured_attention(run: Entry) -> list[Entry]:
    """The attention statistics at each length without an error, in order of length."""
    return sorted(
        (entry for entry in run["attention"] if "error" not in entry),
        key=lambda entry: entry["length"],
    )


def error_notes(run: Entry) -> list[str]:
    """One note for each missing row, attention statistic and passage: its name and the error."""
    parts = [(f"{protocol_name(row)} at {row['length']:,}", row) for row in run["rows"]]
    parts += [(f"attention at {entry['length']:,}", entry) for entry in run["attention"]]
    parts.append(("passage", (run["gain"] or {}).get("passage") or {}))
    return [f"{name}: {part['error']}" for name, part in parts if "error" in part]


def includes_zero(estimate: Entry) -> bool:
    """Whether the interval includes 0; False without an interval."""
    return has_interval(estimate) and estimate["low"] <= 0 <= estimate["high"]


def whole_context_hurts(entry: Entry) -> bool:
    """Whether, at this length L, the whole context raises the loss significantly: F(L) > N(L).

    F(L) is the loss of targets that see exactly L tokens. N(L) is their loss in non-overlapping
    windows, where most of them see fewer than L tokens. Without an interval any rise counts. The
    part `early_tokens` of the gain then does not measure early tokens, but how much of the higher
    loss the windows hide.
    """
    return entry["curse"]["nats"] < 0 and not includes_zero(entry["curse"])
