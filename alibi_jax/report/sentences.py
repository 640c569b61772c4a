"""What the numbers of runs say, in plain sentences."""

import math
from typing import Any

from alibi_jax.report.formatting import (
    Entry,
    alike,
    breaks_down,
    counted,
    has_interval,
    is_noise,
    label,
    listed,
    measured_attention,
    nats,
    percent,
    run_names,
    significant,
    steps,
)

# By more than a tenth something falls or breaks down; by less it holds, or gets worse.
_CLEAR = 0.1
# A perplexity that rises by less is not worth a sentence.
_SLIGHT = 0.01
# Of fewer targets a mean says little.
_FEW = 30
# Of fewer targets 1 % is not even one.
_HUNDRED = 100


def summary(results: dict[str, Any]) -> str:
    """What was evaluated, and which run has the lowest perplexity where, in one paragraph."""
    runs = results["runs"]
    names = run_names(runs)
    lengths = sorted({row["length"] for run in runs for row in run["rows"] if "error" not in row})
    ends = list(dict.fromkeys([*lengths[:1], *lengths[-1:]]))
    trained = {run["train_length"] for run in runs}
    # Runs of several training lengths have theirs in their names.
    at = f", trained at {trained.pop():,} tokens," if len(trained) == 1 else ""
    splits = dict.fromkeys(f"the {run['split']} split{_corpus(run)}" for run in runs)
    was = "was" if len(runs) == 1 else "were"
    evaluated = f"{listed(names)}{at} {was} evaluated"
    if ends:
        evaluated += f" at {' to '.join(f'{length:,}' for length in ends)} tokens"
    sentences = [f"{evaluated} on {listed(list(splits))}."]
    if not ends:
        sentences.append("No length has a number.")
    if len(runs) == 1:
        return " ".join(sentences + reading(runs[0]))
    groups: list[list[Entry]] = []
    for run in runs:
        if alike(runs, run) not in groups:
            groups.append(alike(runs, run))
    if len(groups) > 1:
        sentences.append(
            "Not all have the same text and tokenizer: perplexities per token of different tokens "
            "do not compare, bits per byte of one text do."
        )
    for group in groups:
        named = [name for name, run in zip(names, runs) if run in group]
        among = f"of {listed(named)}, " if len(groups) > 1 else ""
        for length in ends:
            scored = [
                (row["perplexity"], name)
                for name, run in zip(named, group)
                for row in _whole_windows(run)
                if row["length"] == length
            ]
            if len(scored) > 1:
                perplexity, name = min(scored)
                sentences.append(
                    f"At {length:,} tokens, {among}{name} has the lowest perplexity in "
                    f"non-overlapping windows: {significant(perplexity)}."
                )
    return " ".join(sentences)


def reading(run: dict[str, Any]) -> list[str]:
    """What longer inputs gave, how much of it longer context did, and what attention made of them.

    The parts of the gain are those of Press et al. 2021, appendix B: fewer tokens early in a
    window, and longer context. What was not measured has no sentence.
    """
    parts = (_gain, _past_training, _failures, _resolution, _tokens, _long_ppl)
    return [sentence for part in parts for sentence in part(run)]


def _gain(run: Entry) -> list[str]:
    """From the base, or the shortest length, to the longest one with numbers."""
    whole, rows = run["decomposition"], _whole_windows(run)
    if whole is None or len(whole["lengths"]) == 1:
        if len(rows) < 2:
            return []
        first, last = rows[0], rows[-1]
        nll = {"nats": first["nll"] - last["nll"], "low": None, "high": None}
        return [
            f"{_windows(first['length'], last['length'])} {_move(first['nll'], last['nll'])} over "
            f"{_all_targets(first, last)}: {_noun(nll)} of {_amount(nll)} a token.",
            "How much of that is due to longer context was not measured.",
        ]
    parts = steps(run)
    if not parts:
        return []
    last = parts[-1]
    (first,) = (entry for entry in whole["lengths"] if entry["length"] == whole["base"])
    gain, early, context = last["gain"], last["early_tokens"], last["context"]
    sentence = f"{_both_sets(rows, first, last, whole['targets'])} a token{_doubt(gain)}."
    if breaks_down(last):
        return [sentence, *_spared(early, context, last["length"])]
    # Shares of a loss, or of what may be nothing, mean nothing.
    total = gain["nats"] if gain["nats"] > 0 and not is_noise(gain) else None
    explain = "Fewer early tokens explain" if total else "Fewer early tokens alone gave"
    return [
        sentence,
        _part(early, explain, "Early tokens cost more, by", total),
        _part(context, "Longer context itself gave", "Longer context itself lost", total),
    ]


def _both_sets(rows: list[Entry], first: Entry, last: Entry, targets: int) -> str:
    """What windows do to all targets, where they have rows, and to the sampled ones."""
    nll = [entry["nonoverlapping"]["nats"] for entry in (first, last)]
    gain = f"{_noun(last['gain'])} of {_amount(last['gain'])}"
    windows, move = _windows(first["length"], last["length"]), _move(*nll)
    by_length = {row["length"]: row for row in rows}
    every = [by_length.get(entry["length"]) for entry in (first, last)]
    if every[0] is None or every[1] is None:
        return f"{windows} {move} over {targets:,} sampled targets: {gain}"
    if every[0]["targets"] == every[1]["targets"] == targets:
        return f"{windows} {move} over all {targets:,} targets: {gain}"
    of_all = _move(every[0]["nll"], every[1]["nll"])
    verb, _, numbers = move.partition(" ")
    again = f"and {numbers}" if of_all.startswith(f"{verb} ") else f"but {move}"
    return (
        f"{windows} {of_all} over {_all_targets(every[0], every[1])}, {again} over the "
        f"{targets:,} sampled ones: there {gain}"
    )


def _windows(short: int, long: int) -> str:
    return f"From {short:,} to {long:,} tokens, perplexity in non-overlapping windows"


def _move(before: float, after: float) -> str:
    """How perplexity changes with the loss, as it reads: what reads alike stays."""
    one, other = significant(math.exp(before)), significant(math.exp(after))
    if one == other:
        return f"stays at {one}"
    return f"{'falls' if after < before else 'rises'} from {one} to {other}"


def _all_targets(first: Entry, last: Entry) -> str:
    if first["targets"] != last["targets"]:
        return "all targets"
    return f"all {first['targets']:,} targets"


def _spared(early: Entry, context: Entry, length: int) -> list[str]:
    """Where the whole context hurts, what windows save is not of early tokens."""
    lost = _part(context, "Longer context itself gave", "Longer context itself lost", None)
    if context["nats"] < 0 < early["nats"] <= -context["nats"] and not is_noise(context):
        return [
            f"{lost[:-1]}; windows spare most targets that context, which hides {_amount(early)} "
            f"of it{_doubt(early)}."
        ]
    return [
        lost,
        f"The rest, {_noun(early)} of {_amount(early)}, is not of early tokens: at {length:,} "
        "tokens windows spare most targets a context that hurts.",
    ]


def _part(part: Entry, gave: str, lost: str, total: float | None) -> str:
    sentence = f"{gave if part['nats'] >= 0 else lost} {_amount(part)}"
    if is_noise(part):
        return f"{sentence}{_doubt(part)}."
    if total is None or part["nats"] < 0:
        return f"{sentence}."
    share = part["nats"] / total
    return f"{sentence}, {'more than all' if share > 1 else percent(share)} of it."


def _past_training(run: Entry) -> list[str]:
    """Whether perplexity over all targets rises past the training length."""
    rows = _whole_windows(run)
    known = [row for row in rows if row["length"] <= run["train_length"]]
    if not known or rows[-1]["length"] <= run["train_length"]:
        return []
    at, past = known[-1], rows[-1]
    rise = past["perplexity"] / at["perplexity"] - 1
    if rise <= _SLIGHT:
        return []
    verb = "breaks down" if rise > _CLEAR else "gets worse"
    return [
        f"Past its training length of {run['train_length']:,} tokens the model {verb}: over all "
        f"targets, perplexity {significant(at['perplexity'])} at {at['length']:,}, "
        f"{significant(past['perplexity'])} at {past['length']:,}."
    ]


def _failures(run: Entry) -> list[str]:
    """That no length, or none past the training length, has a number."""
    trained = run["train_length"]
    past = [row for row in run["rows"] if row["length"] > trained]
    for rows, where in ((run["rows"], ""), (past, f" past {trained:,} tokens")):
        if rows and all("error" in row for row in rows):
            return [f"{label(run)} has no number{where}: {rows[0]['error'].rstrip('.')}."]
    return []


def _resolution(run: Entry) -> list[str]:
    measured = measured_attention(run)
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
    gain = run["gain"]
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
        verb = "gain" if gain["nats"]["nats"] >= 0 else "lose"
        mean = f" targets {verb} {_amount(gain['nats'])} on average{_doubt(gain['nats'])};"
    sentences = [
        f"{context}{mean} {percent(gain['improved'])} of {counted(gain['targets'], 'target')} gain."
    ]
    if gain["targets"] < _HUNDRED:
        return sentences
    count = math.ceil(0.01 * gain["targets"])
    top = "1 target (1 %) that gains" if count == 1 else f"{count:,} targets (1 %) that gain"
    # A few large gains are no sign of anything where losses weigh as much.
    nothing = (
        " (single targets gain and lose also where the mean gain is nothing)"
        if is_noise(gain["nats"])
        else ""
    )
    return sentences + [
        f"The {top} most {'carries' if count == 1 else 'carry'} {percent(part['gain'])} of all "
        f"gains{nothing}."
        for part in gain["concentration"]
        if part["targets"] == 0.01
    ]


def _long_ppl(run: Entry) -> list[str]:
    if run["gain"] is None:
        return []
    found = run["gain"]["long_ppl"]
    if "error" in found:
        return [f"LongPPL has no number: {found['error'].rstrip('.')}."]
    count = found["key_targets"]
    few = ", too few to say much" if count < _FEW else ""
    return [
        f"LongPPL, the perplexity of the {counted(count, 'target')} that "
        f"{found['judge']} finds to need long context, is {significant(found['perplexity'])}{few}."
    ]


def _amount(part: Entry) -> str:
    """A gain or a loss by its size, the interval turned with it."""
    size = f"{nats(abs(part['nats']))} nats"
    if size == "0.0000 nats":
        size = "less than 0.0001 nats"
    if not has_interval(part):
        return size
    low, high = part["low"], part["high"]
    if part["nats"] < 0:
        low, high = -high, -low
    return f"{size} ({nats(low)} to {nats(high)})"


def _noun(part: Entry) -> str:
    return "a gain" if part["nats"] >= 0 else "a loss"


def _doubt(part: Entry) -> str:
    return ", not told apart from nothing" if is_noise(part) else ""


def _whole_windows(run: Entry) -> list[Entry]:
    """The rows with numbers in non-overlapping windows, by length."""
    return sorted(
        (row for row in run["rows"] if row["protocol"] == "nonoverlapping" and "error" not in row),
        key=lambda row: row["length"],
    )


def _corpus(run: Entry) -> str:
    corpus = run["corpus"]
    documents = counted(corpus["documents"], "document")
    return f" of {corpus['dataset']} ({counted(corpus['tokens'], 'token')}, {documents})"
