"""Runs, protocols and numbers as every part of a report writes them."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

Entry = dict[str, Any]


def suffix(run: Entry) -> str:
    """How a run was rescaled, as it follows a name; empty if it was not."""
    return "" if run["rescaling"] == "none" else f"+{run['rescaling']}"


def label(run: Entry) -> str:
    """The position method, and how it was rescaled, if it was."""
    return run["position"] + suffix(run)


def run_names(runs: Sequence[Entry]) -> list[str]:
    """A short name for each run, no two alike unless the runs are the same one twice."""
    names = [label(run) for run in runs]
    if len(set(names)) < len(names):
        folders = [pathlib.Path(run["workdir"]).name for run in runs]
        if len(set(zip(names, folders))) < len(names):
            folders = [run["workdir"] for run in runs]
        names = [f"{name} ({folder})" for name, folder in zip(names, folders)]
    if len({run["train_length"] for run in runs}) > 1:
        names = [f"{name}, trained at {run['train_length']}" for name, run in zip(names, runs)]
    return names


def protocol_name(row: Entry) -> str:
    """As `--protocols` names it: a sliding window has a stride."""
    return f"sliding:{row['stride']}" if row["protocol"] == "sliding" else row["protocol"]


def lowest(runs: Sequence[Entry]) -> dict[tuple[str, int], float]:
    """The lowest perplexity for each protocol and length; empty for one run alone."""
    best: dict[tuple[str, int], float] = {}
    for run in runs if len(runs) > 1 else ():
        for row in run["rows"]:
            if "error" not in row:
                column = (protocol_name(row), row["length"])
                best[column] = min(best.get(column, math.inf), row["perplexity"])
    return best


def steps(run: Entry) -> list[Entry]:
    """What the decomposition says of each length but the base, by length."""
    parts = run.get("decomposition")
    if parts is None:
        return []
    return sorted(
        (entry for entry in parts["lengths"] if entry["length"] != parts["base"]),
        key=lambda entry: entry["length"],
    )


def nats(value: float) -> str:
    """Four decimals, a true minus sign, no negative zero."""
    return f"{value:z.4f}".replace("-", "−")


def bounds(interval: Entry) -> str:
    """An interval in brackets, as it follows its number; empty where there is none."""
    if interval["low"] is None:
        return ""
    return f" [{nats(interval['low'])}, {nats(interval['high'])}]"


def significant(value: float) -> str:
    """Four significant digits, or all before the point: 4.532, 19.73, 48,210."""
    decimals = max(0, 3 - math.floor(math.log10(value)))
    return f"{value:,.{decimals}f}"


def percent(share: float) -> str:
    """A share as a whole percentage."""
    return f"{100 * share:.0f} %"
