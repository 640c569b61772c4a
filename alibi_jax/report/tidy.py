"""Results as rows of one number each, for a data frame."""

import math
from collections.abc import Iterator
from typing import Any

from alibi_jax.report.formatting import Entry

ABOUT = ("workdir", "position", "rescaling", "train_length", "step", "split")
COLUMNS = (
    *ABOUT,
    "quantity",
    "protocol",
    "length",
    "stride",
    "layer",
    "head",
    "context_from",
    "context_to",
    "targets",
    "value",
    "low",
    "high",
    "unit",
    "error",
)

# Of a row of results, and their units. `low` and `high` are of nll and perplexity alone.
_ROW = {
    "nll": "nats/token",
    "perplexity": "per token",
    "word_perplexity": "per word",
    "bits_per_byte": "bits/byte",
    "words": "words",
    "bytes": "bytes",
    "min_context": "tokens",
    "smallest_context": "tokens",
    "mean_context": "tokens",
    "largest_context": "tokens",
    "rescaling_factor": "factor",
    "seconds": "s",
    "compile_seconds": "s",
}


def tidy(results: dict[str, Any]) -> list[Entry]:
    """Every number with its quantity and unit; columns that do not apply are left out.

    `context_from` and `context_to` are the bin of a position_nll, the two lengths that a gain or
    a part of it compares, or the two contexts of a gain by token. An error has no quantity.
    """
    parts = (_rows, _positions, _early_tokens, _decomposition, _attention, _gain)
    return [
        {name: run[name] for name in ABOUT} | row
        for run in results["runs"]
        for part in parts
        for row in part(run)
    ]


def _rows(run: Entry) -> Iterator[Entry]:
    for row in run["rows"]:
        about = {name: row[name] for name in ("protocol", "length", "stride")}
        if "error" in row:
            yield about | {"error": row["error"]}
            continue
        about["targets"] = row["targets"]
        for quantity, unit in _ROW.items():
            if row[quantity] is not None:
                yield (
                    about
                    | {"quantity": quantity, "value": row[quantity], "unit": unit}
                    | (_row_interval(row, quantity))
                )


def _row_interval(row: Entry, quantity: str) -> Entry:
    if quantity not in ("nll", "perplexity") or row["nll_low"] is None:
        return {}
    low, high = row["nll_low"], row["nll_high"]
    if quantity == "perplexity":
        low, high = math.exp(low), math.exp(high)
    return {"low": low, "high": high}


def _positions(run: Entry) -> Iterator[Entry]:
    for length, curve in run["position_nll"].items():
        for point in curve:
            yield {
                "quantity": "position_nll",
                "protocol": "nonoverlapping",
                "length": int(length),
                "stride": int(length),
                "context_from": point["context_from"],
                "context_to": point["context_to"],
                "targets": point["targets"],
                "value": point["nll"],
                "unit": "nats/token",
            }


def _early_tokens(run: Entry) -> Iterator[Entry]:
    for length, cost in run["early_token"].items():
        yield {
            "quantity": "early_token",
            "length": int(length),
            "stride": cost["stride"],
            "value": cost["nats"],
            "unit": "nats/token",
        }


def _decomposition(run: Entry) -> Iterator[Entry]:
    parts = run["decomposition"]
    if parts is None:
        return
    for entry in parts["lengths"]:
        about = {"length": entry["length"], "targets": parts["targets"]}
        for protocol in ("nonoverlapping", "fixed"):
            yield about | {"protocol": protocol} | _interval("decomposition_nll", entry[protocol])
        yield about | _interval("curse", entry["curse"])
        for context in ("smallest_context", "mean_context", "largest_context"):
            here = about | {"protocol": "nonoverlapping"}
            yield here | _number(f"decomposition_{context}", float(entry[context]), "tokens")
        between = {"context_from": parts["base"], "context_to": entry["length"]}
        for part in ("gain", "early_tokens", "context"):
            yield about | between | _interval(part, entry[part])


def _attention(run: Entry) -> Iterator[Entry]:
    for entry in run["attention"]:
        length = {"length": entry["length"]}
        if "error" in entry:
            yield length | {"error": f"attention: {entry['error']}"}
            continue
        yield length | _resolution(entry)
        for layer in entry["layers"]:
            about = length | {"layer": layer["layer"]}
            yield about | _resolution(layer)
            for number, head in enumerate(layer["heads"]):
                here = about | {"head": number}
                yield here | _resolution(head)
                yield here | _number("attention_distance", head["distance"], "tokens")
                yield here | _number("attention_entropy", head["entropy"], "nats")


def _gain(run: Entry) -> Iterator[Entry]:
    gain = run["gain"]
    if gain is None:
        return
    about = {
        "context_from": gain["short"],
        "context_to": gain["long"],
        "targets": gain["targets"],
    }
    yield about | _interval("token_gain", gain["nats"])
    yield about | _number("token_gain_improved", gain["improved"], "share of targets")
    for point in gain["quantiles"]:
        yield about | _number(f"token_gain_quantile_{point['share']}", point["nats"], "nats/token")
    for point in gain["concentration"]:
        name = f"token_gain_of_top_{point['targets']}"
        yield about | _number(name, point["gain"], "share of gains")
    if "error" in (gain["passage"] or {}):
        yield about | {"error": f"passage: {gain['passage']['error']}"}
    found = gain["long_ppl"]
    about["targets"] = found.get("key_targets")
    if "error" in found:
        yield about | {"error": f"LongPPL: {found['error']}"}
    else:
        yield about | _number("long_ppl", found["perplexity"], "per token")


def _number(quantity: str, value: float, unit: str) -> Entry:
    return {"quantity": quantity, "value": value, "unit": unit}


def _resolution(entry: Entry) -> Entry:
    return _number("resolution", entry["resolution"], "ratio")


def _interval(quantity: str, interval: Entry) -> Entry:
    bounds = {"low": interval["low"], "high": interval["high"]}
    return _number(quantity, interval["nats"], "nats/token") | bounds
