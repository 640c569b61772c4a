"""Results as rows of one number each, for a data frame."""

import math
from collections.abc import Iterator
from typing import Any

from alibi_jax.report.formatting import Entry

_RUN_COLUMNS = ("workdir", "position", "rescaling", "train_length", "step", "split")
COLUMNS = (
    *_RUN_COLUMNS,
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

# Numbers in a row of results, with their units. Only nll and perplexity have `low` and `high`.
_ROW_UNITS = {
    "nll": "nats/token",
    "perplexity": "per token",
    "word_perplexity": "per word",
    "bits_per_byte": "bits/byte",
    "words": "words",
    "bytes": "bytes",
    "windows": "windows",
    "min_context": "tokens",
    "smallest_context": "tokens",
    "mean_context": "tokens",
    "largest_context": "tokens",
    "rescaling_factor": "factor",
    "seconds": "s",
    "compile_seconds": "s",
}


def tidy(results: dict[str, Any]) -> list[Entry]:
    """Rows of one number each, with its quantity and unit; columns that do not apply are left out.

    `context_from` and `context_to` are the bin of a position_nll, the two lengths that a gain or
    a part of it compares, or the two contexts that a gain by token compares. A row with an error
    has no quantity.
    """
    sections = (_rows, _positions, _early_tokens, _decomposition, _attention, _gain)
    return [
        {name: run[name] for name in _RUN_COLUMNS} | row
        for run in results["runs"]
        for section in sections
        for row in section(run)
    ]


def _rows(run: Entry) -> Iterator[Entry]:
    for row in run["rows"]:
        columns = {name: row[name] for name in ("protocol", "length", "stride")}
        if "error" in row:
            yield columns | {"error": row["error"]}
            continue
        columns["targets"] = row["targets"]
        for quantity, unit in _ROW_UNITS.items():
            # Files of earlier versions have no numbers of windows.
            if row.get(quantity) is not None:
                yield (
                    columns
                    | {"quantity": quantity, "value": row[quantity], "unit": unit}
                    | _row_interval(row, quantity)
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
    decomposition = run["decomposition"]
    if decomposition is None:
        return
    for entry in decomposition["lengths"]:
        columns = {"length": entry["length"], "targets": decomposition["targets"]}
        for protocol in ("nonoverlapping", "fixed"):
            loss = _interval("decomposition_nll", entry[protocol])
            yield columns | {"protocol": protocol} | loss
        yield columns | _interval("curse", entry["curse"])
        for context in ("smallest_context", "mean_context", "largest_context"):
            number = _number(f"decomposition_{context}", float(entry[context]), "tokens")
            yield columns | {"protocol": "nonoverlapping"} | number
        columns |= {"context_from": decomposition["base"], "context_to": entry["length"]}
        for part in ("gain", "early_tokens", "context"):
            yield columns | _interval(part, entry[part])


def _attention(run: Entry) -> Iterator[Entry]:
    for entry in run["attention"]:
        length = {"length": entry["length"]}
        if "error" in entry:
            yield length | {"error": f"attention: {entry['error']}"}
            continue
        yield length | _resolution(entry)
        for layer in entry["layers"]:
            layer_columns = length | {"layer": layer["layer"]}
            yield layer_columns | _resolution(layer)
            for number, head in enumerate(layer["heads"]):
                head_columns = layer_columns | {"head": number}
                yield head_columns | _resolution(head)
                yield head_columns | _number("attention_distance", head["distance"], "tokens")
                yield head_columns | _number("attention_entropy", head["entropy"], "nats")


def _gain(run: Entry) -> Iterator[Entry]:
    gain = run["gain"]
    if gain is None:
        return
    columns = {
        "context_from": gain["short"],
        "context_to": gain["long"],
        "targets": gain["targets"],
    }
    yield columns | _interval("token_gain", gain["nats"])
    yield columns | _number("token_gain_improved", gain["improved"], "share of targets")
    for point in gain["quantiles"]:
        yield columns | _number(
            f"token_gain_quantile_{point['share']}", point["nats"], "nats/token"
        )
    for point in gain["concentration"]:
        name = f"token_gain_of_top_{point['targets']}"
        yield columns | _number(name, point["gain"], "share of gains")
    if "error" in (gain["passage"] or {}):
        yield columns | {"error": f"passage: {gain['passage']['error']}"}
    long_ppl = gain["long_ppl"]
    columns["targets"] = long_ppl.get("key_targets")
    if "error" in long_ppl:
        yield columns | {"error": f"LongPPL: {long_ppl['error']}"}
    else:
        yield columns | _number("long_ppl", long_ppl["perplexity"], "per token")


def _number(quantity: str, value: float, unit: str) -> Entry:
    return {"quantity": quantity, "value": value, "unit": unit}


def _resolution(entry: Entry) -> Entry:
    return _number("resolution", entry["resolution"], "ratio")


def _interval(quantity: str, interval: Entry) -> Entry:
    bounds = {"low": interval["low"], "high": interval["high"]}
    return _number(quantity, interval["nats"], "nats/token") | bounds
