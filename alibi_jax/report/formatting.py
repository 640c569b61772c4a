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
        names = [f"{name} trained at {run['train_length']}" for name, run in zip(names, runs)]
    return names


def protocol_name(row: Entry) -> str:
    """As `--protocols` names it: a sliding window has a stride."""
    return f"sliding:{row['stride']}" if row["protocol"] == "sliding" else row["protocol"]


def lowest(runs: Sequence[Entry]) -> list[dict[tuple[str, int], float]]:
    """For each run, the lowest perplexities by protocol and length of the runs it compares with.

    Perplexities per token compare on the same tokens only. Empty where no other run has them.
    """
    tables = []
    for group in (alike(runs, run) for run in runs):
        best: dict[tuple[str, int], float] = {}
        for run in group if len(group) > 1 else ():
            for row in run["rows"]:
                if "error" not in row:
                    column = (protocol_name(row), row["length"])
                    best[column] = min(best.get(column, math.inf), row["perplexity"])
        tables.append(best)
    return tables


def alike(runs: Sequence[Entry], run: Entry) -> list[Entry]:
    """The runs of the same text and tokenizer as this one, itself among them."""
    return [other for other in runs if _tokens(other) == _tokens(run)]


def _tokens(run: Entry) -> tuple[Any, ...]:
    corpus = (run["corpus"][key] for key in ("dataset", "split", "tokens", "bytes"))
    return (*corpus, run["config"]["data"]["tokenizer"])


def steps(run: Entry) -> list[Entry]:
    """What the decomposition says of each length greater than the base, by length."""
    parts = run["decomposition"]
    if parts is None:
        return []
    return sorted(
        (entry for entry in parts["lengths"] if entry["length"] > parts["base"]),
        key=lambda entry: entry["length"],
    )


def measured_attention(run: Entry) -> list[Entry]:
    """What attention does at each length that has numbers, by length."""
    return sorted(
        (entry for entry in run["attention"] if "error" not in entry),
        key=lambda entry: entry["length"],
    )


def errors(run: Entry) -> list[str]:
    """What has no number, and why."""
    found = [(f"{protocol_name(row)} at {row['length']:,}", row) for row in run["rows"]] + [
        (f"attention at {entry['length']:,}", entry) for entry in run["attention"]
    ]
    found.append(("passage", (run["gain"] or {}).get("passage") or {}))
    return [f"{what}: {entry['error']}" for what, entry in found if "error" in entry]


def is_noise(part: Entry) -> bool:
    """Whether the interval has 0 in it."""
    return has_interval(part) and part["low"] <= 0 <= part["high"]


def has_interval(part: Entry) -> bool:
    """Whether both ends were measured."""
    return part["low"] is not None and part["high"] is not None


def breaks_down(entry: Entry) -> bool:
    """Whether a length's whole context is worse than what its windows show: F(L) > N(L).

    Then what windows save is not of early tokens: they spare most targets a context that hurts.
    """
    return entry["curse"]["nats"] < 0 and not is_noise(entry["curse"])


def nats(value: float | None) -> str:
    """Four decimals, a true minus sign, no negative zero; a dash for no number."""
    if value is None:
        return "—"
    return f"{value:z.4f}".replace("-", "−")


def bounds(interval: Entry) -> str:
    """An interval in brackets, as it follows its number; empty where there is none."""
    if not has_interval(interval):
        return ""
    return f" [{nats(interval['low'])}, {nats(interval['high'])}]"


def significant(value: float | None) -> str:
    """Four significant digits, or all before the point: 4.532, 19.73, 48,210; or a dash."""
    if value is None:
        return "—"
    decimals = max(0, 3 - math.floor(math.log10(value)))
    return f"{value:,.{decimals}f}"


def percent(share: float) -> str:
    """A share as a whole percentage."""
    return f"{100 * share:.0f} %"


def unbroken(sentence: str) -> str:
    """With percentages that no line's end divides."""
    return sentence.replace(" %", "\u00a0%")


def counted(number: int, noun: str) -> str:
    """`1 document`, `12 documents`."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def listed(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))
