"""Sentences about the gain from longer inputs, and about its two parts."""

import math

from alibi_jax.report.formatting import (
    Entry,
    format_confidence,
    format_nats,
    format_percent,
    format_perplexity,
    has_interval,
)
from alibi_jax.report.runs import gains_by_length, includes_zero, whole_context_hurts


def gain_sentences(run: Entry, confidence: float) -> list[str]:
    """The gain from the base length to the longest length with results, and its parts.

    Without a decomposition: from the shortest length to the longest, without the parts.
    """
    decomposition, rows = run["decomposition"], nonoverlapping_rows(run)
    if decomposition is None or len(decomposition["lengths"]) == 1:
        return _gain_without_parts(rows)
    gains = gains_by_length(run)
    if not gains:
        return []
    (first,) = (
        entry for entry in decomposition["lengths"] if entry["length"] == decomposition["base"]
    )
    last = gains[-1]
    sentences = _perplexity_change(rows, first, last, decomposition["targets"], confidence)
    if whole_context_hurts(last):
        return sentences + _harmful_context(last, confidence)
    early, context = last["early_tokens"], last["context"]
    # A share of a loss, or of a gain that is not significant, means nothing.
    gain = last["gain"]
    total = gain["nats"] if gain["nats"] > 0 and not includes_zero(gain) else None
    if early["nats"] >= 0:
        early_sentence = f"Fewer early tokens alone lower the loss by {size_with_interval(early)}"
    else:
        early_sentence = (
            f"Early tokens raise the loss by {size_with_interval(early)} more at "
            f"{last['length']:,} tokens than at {first['length']:,}"
        )
    return [
        *sentences,
        early_sentence + _share_or_significance(early, total, confidence) + ".",
        _context_effect(context) + _share_or_significance(context, total, confidence) + ".",
    ]


def nonoverlapping_rows(run: Entry) -> list[Entry]:
    """The rows with numbers in non-overlapping windows, in order of length."""
    return sorted(
        (row for row in run["rows"] if row["protocol"] == "nonoverlapping" and "error" not in row),
        key=lambda row: row["length"],
    )


def size_with_interval(estimate: Entry, unit: str = "nats") -> str:
    """The size of a gain or loss, without sign, and its interval, negated for a loss."""
    size = f"{format_nats(abs(estimate['nats']))} {unit}"
    if size.startswith("0.0000 "):
        size = f"less than 0.0001 {unit}"
    if not has_interval(estimate):
        return size
    low, high = estimate["low"], estimate["high"]
    if estimate["nats"] < 0:
        low, high = -high, -low
    return f"{size} ({format_nats(low)} to {format_nats(high)})"


def significance_note(estimate: Entry, confidence: float) -> str:
    """The note, with a comma before it, that an estimate is not significant; empty if it is."""
    if not includes_zero(estimate):
        return ""
    return f", not significant (the {format_confidence(confidence)} interval includes 0)"


def _gain_without_parts(rows: list[Entry]) -> list[str]:
    if len(rows) < 2:
        return []
    first, last = rows[0], rows[-1]
    gain = {"nats": first["nll"] - last["nll"], "low": None, "high": None}
    return [
        f"{_perplexity_in_windows(first['length'], last['length'])} "
        f"{_change(first['nll'], last['nll'])} over {_all_targets(first, last)}: "
        f"{_gain_or_loss(gain)} of {size_with_interval(gain, 'nats per token')}.",
        "The evaluation did not measure how much of this change is due to longer context.",
    ]


def _perplexity_change(
    rows: list[Entry], first: Entry, last: Entry, targets: int, confidence: float
) -> list[str]:
    """The change of perplexity over all targets, if rows have it, and over the sampled targets."""
    gain = size_with_interval(last["gain"], "nats per token")
    note = significance_note(last["gain"], confidence)
    windows = _perplexity_in_windows(first["length"], last["length"])
    sampled_change = _change(first["nonoverlapping"]["nats"], last["nonoverlapping"]["nats"])
    by_length = {row["length"]: row for row in rows}
    first_row, last_row = by_length.get(first["length"]), by_length.get(last["length"])
    gain_clause = f"{_gain_or_loss(last['gain'])} of {gain}{note}"
    if first_row is None or last_row is None:
        return [f"{windows} {sampled_change} over {targets:,} sampled targets: {gain_clause}."]
    if first_row["targets"] == last_row["targets"] == targets:
        return [f"{windows} {sampled_change} over all {targets:,} targets: {gain_clause}."]
    change = _change(first_row["nll"], last_row["nll"])
    verb, _, perplexities = sampled_change.partition(" ")
    # The verb is not repeated if both perplexities move the same way.
    same_verb = change.startswith(f"{verb} ")
    second = f"and {perplexities}" if same_verb else f"but {sampled_change}"
    return [
        f"{windows} {change} over {_all_targets(first_row, last_row)}, {second} over the "
        f"{targets:,} sampled targets.",
        f"The sampled targets {'gain' if last['gain']['nats'] >= 0 else 'lose'} {gain}{note}.",
    ]


def _harmful_context(last: Entry, confidence: float) -> list[str]:
    """The parts of the gain where the whole context gives a higher loss than the windows do."""
    early, context = last["early_tokens"], last["context"]
    context_sentence = f"{_context_effect(context)}{significance_note(context, confidence)}."
    note = significance_note(early, confidence)
    if context["nats"] < 0 < early["nats"] <= -context["nats"] and not includes_zero(context):
        return [
            context_sentence,
            "Non-overlapping windows, where most targets see less than the whole context, hide "
            f"{size_with_interval(early)} of this increase{note}.",
        ]
    return [
        context_sentence,
        f"The rest, {_gain_or_loss(early)} of {size_with_interval(early)}{note}, does not come "
        f"from fewer early tokens: at {last['length']:,} tokens, the loss with the whole context "
        "is higher than in non-overlapping windows, where most targets see less context.",
    ]


def _context_effect(context: Entry) -> str:
    verb = "lowers" if context["nats"] >= 0 else "raises"
    return f"Longer context alone {verb} the loss by {size_with_interval(context)}"


def _share_or_significance(part: Entry, total: float | None, confidence: float) -> str:
    """How a part's sentence ends: that it is not significant, or its share of the total gain."""
    if includes_zero(part):
        return significance_note(part, confidence)
    if total is None or part["nats"] < 0:
        return ""
    share = part["nats"] / total
    return ", more than the whole gain" if share > 1 else f", {format_percent(share)} of the gain"


def _perplexity_in_windows(short: int, long: int) -> str:
    return f"From {short:,} to {long:,} tokens, perplexity in non-overlapping windows"


def _change(nll_before: float, nll_after: float) -> str:
    """How perplexity changes; perplexities that are equal as written stay the same."""
    before, after = format_perplexity(math.exp(nll_before)), format_perplexity(math.exp(nll_after))
    if before == after:
        return f"stays at {before}"
    return f"{'falls' if nll_after < nll_before else 'rises'} from {before} to {after}"


def _all_targets(first: Entry, last: Entry) -> str:
    if first["targets"] != last["targets"]:
        return "all targets"
    return f"all {first['targets']:,} targets"


def _gain_or_loss(gain: Entry) -> str:
    return "a gain" if gain["nats"] >= 0 else "a loss"
