"""What the numbers of runs say, in plain sentences."""

import math
from typing import Any

from alibi_jax.report.names import Entry, nats, percent, run_names, significant, steps

# By more than a tenth something falls or breaks down; by less it holds, or gets a little worse.
_CLEAR = 0.1
# Of fewer targets a mean says little.
_FEW = 30


def summary(results: dict[str, Any]) -> str:
    """What was evaluated, and which run has the lowest perplexity where, in one paragraph."""
    runs = results["runs"]
    names = run_names(runs)
    lengths = sorted({row["length"] for run in runs for row in run["rows"]})
    ends = list(dict.fromkeys(_ends(lengths)))
    trained = sorted({run["train_length"] for run in runs})
    splits = dict.fromkeys(f"the {run['split']} split{_corpus(run)}" for run in runs)
    sentences = [
        f"{_listed(names)}, trained at {_listed([f'{length:,}' for length in trained])} tokens, "
        f"{'was' if len(runs) == 1 else 'were'} evaluated at "
        f"{' to '.join(f'{length:,}' for length in ends)} tokens on {_listed(list(splits))}."
    ]
    if len(runs) == 1:
        return " ".join(sentences + reading(runs[0]))
    for length in ends:
        scored = [
            (row["perplexity"], name)
            for name, run in zip(names, runs)
            for row in _whole_windows(run)
            if row["length"] == length
        ]
        if scored:
            perplexity, name = min(scored)
            sentences.append(
                f"At {length:,} tokens, {name} has the lowest perplexity in non-overlapping "
                f"windows: {significant(perplexity)}."
            )
    return " ".join(sentences)


def reading(run: dict[str, Any]) -> list[str]:
    """What longer inputs gave, how much of it longer context did, and what attention made of them.

    The parts of the gain are those of Press et al. 2021, appendix B: fewer tokens early in a
    window, and longer context. What was not measured has no sentence.
    """
    return [*_gain(run), *_past_training(run), *_resolution(run), *_tokens(run), *_long_ppl(run)]


def _gain(run: Entry) -> list[str]:
    """From the base, or the shortest length, to the longest one with numbers."""
    parts = steps(run)
    if not parts:
        rows = _whole_windows(run)
        if len(rows) < 2:
            return []
        first, last = _ends(rows)
        nll = {"nats": first["nll"] - last["nll"], "low": None, "high": None}
        return [
            _windows(first["length"], last["length"], first["nll"], last["nll"], nll) + ".",
            "How much of that is due to longer context was not measured.",
        ]
    whole, last = run["decomposition"], parts[-1]
    (first,) = (entry for entry in whole["lengths"] if entry["length"] == whole["base"])
    gain, early, context = last["gain"], last["early_tokens"], last["context"]
    windows = _windows(
        first["length"],
        last["length"],
        first["nonoverlapping"]["nats"],
        last["nonoverlapping"]["nats"],
        gain,
    )
    # Shares of a loss, or of what may be nothing, mean nothing.
    total = gain["nats"] if gain["nats"] > 0 and not _noise(gain) else None
    explain = "Fewer early tokens explain" if total else "Fewer early tokens alone gave"
    return [
        f"{windows} over {whole['targets']:,} targets{_doubt(gain)}.",
        _part(early, explain, "Early tokens cost another", total),
        _part(context, "Longer context itself gave", "Longer context itself lost", total),
    ]


def _windows(short: int, long: int, before: float, after: float, gain: Entry) -> str:
    verb, noun = ("falls", "gain") if gain["nats"] >= 0 else ("rises", "loss")
    return (
        f"From {short:,} to {long:,} tokens, perplexity in non-overlapping windows {verb} from "
        f"{significant(math.exp(before))} to {significant(math.exp(after))}: a {noun} of "
        f"{_amount(gain)} a token"
    )


def _part(part: Entry, gave: str, lost: str, total: float | None) -> str:
    sentence = f"{gave if part['nats'] >= 0 else lost} {_amount(part)}"
    if _noise(part):
        return f"{sentence}{_doubt(part)}."
    if total is None or part["nats"] < 0:
        return f"{sentence}."
    share = part["nats"] / total
    return f"{sentence}, {'more than all' if share > 1 else percent(share)} of it."


def _past_training(run: Entry) -> list[str]:
    """Whether perplexity rises past the training length."""
    rows = _whole_windows(run)
    known = [row for row in rows if row["length"] <= run["train_length"]]
    if not known or rows[-1]["length"] <= run["train_length"]:
        return []
    at, past = known[-1], rows[-1]
    rise = past["perplexity"] / at["perplexity"] - 1
    parts = steps(run)
    measured = bool(parts) and run["decomposition"]["base"] == at["length"]
    if rise <= 0 or (measured and _noise(parts[-1]["gain"])):
        return []
    verb = "breaks down" if rise > _CLEAR else "gets a little worse"
    return [
        f"Past its training length of {run['train_length']:,} tokens the model {verb}: perplexity "
        f"{significant(at['perplexity'])} at {at['length']:,}, "
        f"{significant(past['perplexity'])} at {past['length']:,}."
    ]


def _resolution(run: Entry) -> list[str]:
    measured = sorted(
        (entry for entry in run.get("attention", []) if "error" not in entry),
        key=lambda entry: entry["length"],
    )
    known = [entry for entry in measured if entry["length"] <= run["train_length"]]
    if not known or measured[-1]["length"] <= run["train_length"]:
        return []
    at, past = known[-1], measured[-1]
    if past["resolution"] < (1 - _CLEAR) * at["resolution"]:
        verb = "falls"
    else:
        verb = "rises" if past["resolution"] > (1 + _CLEAR) * at["resolution"] else "holds"
    return [
        f"Attention resolution {verb} past the training length: {at['resolution']:.2g} at "
        f"{at['length']:,} tokens, {past['resolution']:.2g} at {past['length']:,}."
    ]


def _tokens(run: Entry) -> list[str]:
    """How many targets more context helps, and how few carry most of it."""
    gain = run.get("gain")
    if gain is None:
        return []
    context = f"With exactly {gain['long']:,} tokens of context in place of {gain['short']:,},"
    parts = steps(run)
    if parts and (gain["short"], gain["long"]) == (
        run["decomposition"]["base"],
        parts[-1]["length"],
    ):
        # The mean is what longer context gave, which has been said.
        mean = ""
    else:
        noun = "gain" if gain["nats"]["nats"] >= 0 else "loss"
        mean = f" the mean {noun} is {_amount(gain['nats'])} a token{_doubt(gain['nats'])};"
    sentences = [
        f"{context}{mean} {percent(gain['improved'])} of {gain['targets']:,} targets gain."
    ]
    sentences += [
        f"The top 1 % of targets carry {percent(part['gain'])} of all gains."
        for part in gain["concentration"]
        if part["targets"] == 0.01
    ]
    return sentences


def _long_ppl(run: Entry) -> list[str]:
    found = (run.get("gain") or {}).get("long_ppl")
    if found is None:
        return []
    if "error" in found:
        return [f"LongPPL has no number: {found['error']}."]
    count = found["key_targets"]
    few = ", too few to say much" if count < _FEW else ""
    return [
        f"LongPPL, the perplexity of the {count:,} {'target' if count == 1 else 'targets'} that "
        f"{found['judge']} finds to need long context, is {significant(found['perplexity'])}{few}."
    ]


def _amount(part: Entry) -> str:
    """A gain or a loss by its size, the interval turned with it."""
    size = f"{nats(abs(part['nats']))} nats"
    if part["low"] is None:
        return size
    low, high = part["low"], part["high"]
    if part["nats"] < 0:
        low, high = -high, -low
    return f"{size} ({nats(low)} to {nats(high)})"


def _noise(part: Entry) -> bool:
    return part["low"] is not None and part["low"] <= 0 <= part["high"]


def _doubt(part: Entry) -> str:
    return ", not told apart from nothing" if _noise(part) else ""


def _whole_windows(run: Entry) -> list[Entry]:
    """The rows with numbers in non-overlapping windows, by length."""
    return sorted(
        (row for row in run["rows"] if row["protocol"] == "nonoverlapping" and "error" not in row),
        key=lambda row: row["length"],
    )


def _corpus(run: Entry) -> str:
    corpus = run.get("corpus")
    if corpus is None:
        return ""
    return f" of {corpus['dataset']} ({corpus['tokens']:,} tokens, {corpus['documents']} documents)"


def _ends(items: list[Any]) -> list[Any]:
    return [items[0], items[-1]]


def _listed(items: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(items[:-1]), items[-1]]))
