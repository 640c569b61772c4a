"""Sentences about the results of one run."""

import math
from typing import Any

from alibi_jax.report.formatting import (
    Entry,
    count_noun,
    format_percent,
    format_perplexity,
)
from alibi_jax.report.gain_sentences import (
    gain_sentences,
    nonoverlapping_rows,
    significance_note,
    size_with_interval,
)
from alibi_jax.report.runs import (
    gains_by_length,
    includes_zero,
    measured_attention,
    position_label,
)

# A relative rise of perplexity above this number counts as a break-down. A relative change of
# attention resolution above it counts as a fall or a rise.
_CLEAR_CHANGE = 0.1
# No sentence mentions a relative rise of perplexity up to this number.
_SLIGHT_RISE = 0.01
# Number of key targets below which LongPPL is called uncertain.
_MIN_KEY_TARGETS = 30
# Number of targets below which 1 % of them is less than one target.
_MIN_TARGETS_FOR_TOP = 100


def run_sentences(run: dict[str, Any], confidence: float) -> list[str]:
    """The gain from longer inputs and its parts, failures, attention, gains by token, LongPPL.

    `confidence` is that of the intervals. The parts of the gain are those of Press et al. 2021,
    appendix B: fewer tokens early in a window, and longer context. A part of the results that was
    not measured has no sentence.
    """
    return [
        *gain_sentences(run, confidence),
        *_past_training_length(run),
        *_failures(run),
        *_attention_resolution(run),
        *_token_gains(run, confidence),
        *_long_ppl(run),
    ]


def _past_training_length(run: Entry) -> list[str]:
    """Whether perplexity over all targets rises past the training length."""
    rows = nonoverlapping_rows(run)
    trained = [row for row in rows if row["length"] <= run["train_length"]]
    if not trained or rows[-1]["length"] <= run["train_length"]:
        return []
    before, after = trained[-1], rows[-1]
    rise = after["perplexity"] / before["perplexity"] - 1
    if rise <= _SLIGHT_RISE:
        return []
    verb = "breaks down" if rise > _CLEAR_CHANGE else "gets worse"
    return [
        f"Past its training length of {run['train_length']:,} tokens the model {verb}: perplexity "
        f"over all targets rises from {format_perplexity(before['perplexity'])} at "
        f"{before['length']:,} tokens to {format_perplexity(after['perplexity'])} at "
        f"{after['length']:,}."
    ]


def _failures(run: Entry) -> list[str]:
    """That all lengths, or all lengths past the training length, have an error."""
    trained = run["train_length"]
    past = [row for row in run["rows"] if row["length"] > trained]
    for rows, where in ((run["rows"], ""), (past, f" past {trained:,} tokens")):
        if rows and all("error" in row for row in rows):
            error = rows[0]["error"].rstrip(".")
            return [f"{position_label(run)} has no result{where}: {error}."]
    return []


def _attention_resolution(run: Entry) -> list[str]:
    measured = measured_attention(run)
    trained = [entry for entry in measured if entry["length"] <= run["train_length"]]
    if not trained or measured[-1]["length"] <= run["train_length"]:
        return []
    before, after = trained[-1], measured[-1]
    if after["resolution"] < (1 - _CLEAR_CHANGE) * before["resolution"]:
        verb = "falls"
    else:
        rises = after["resolution"] > (1 + _CLEAR_CHANGE) * before["resolution"]
        verb = "rises" if rises else "holds"
    return [
        f"Attention resolution {verb} past the training length: {before['resolution']:.2g} at "
        f"{before['length']:,} tokens, {after['resolution']:.2g} at {after['length']:,}."
    ]


def _token_gains(run: Entry, confidence: float) -> list[str]:
    """The share of targets that longer context helps, and the share of the top 1 % in all gains."""
    gain = run["gain"]
    if gain is None:
        return []
    context = f"With exactly {gain['long']:,} instead of {gain['short']:,} tokens of context,"
    gains = gains_by_length(run)
    if gains and (gain["short"], gain["long"]) == (
        run["decomposition"]["base"],
        gains[-1]["length"],
    ):
        # The mean equals the part that is due to longer context, which has its sentence.
        mean = ""
    else:
        verb = "falls" if gain["nats"]["nats"] >= 0 else "rises"
        note = significance_note(gain["nats"], confidence)
        mean = f" the mean loss {verb} by {size_with_interval(gain['nats'])}{note};"
    sentences = [
        f"{context}{mean} {format_percent(gain['improved'])} of "
        f"{count_noun(gain['targets'], 'target')} have a lower loss."
    ]
    if gain["targets"] < _MIN_TARGETS_FOR_TOP:
        return sentences
    count = math.ceil(0.01 * gain["targets"])
    top = (
        "1 target (1 %) with the largest gain makes up"
        if count == 1
        else f"{count:,} targets (1 %) with the largest gains make up"
    )
    # Large gains of a few targets mean little if losses of other targets cancel them.
    caution = (
        " (individual targets gain and lose even if the mean gain is zero)"
        if includes_zero(gain["nats"])
        else ""
    )
    return sentences + [
        f"The {top} {format_percent(part['gain'])} of all positive gains{caution}."
        for part in gain["concentration"]
        if part["targets"] == 0.01
    ]


def _long_ppl(run: Entry) -> list[str]:
    if run["gain"] is None:
        return []
    long_ppl = run["gain"]["long_ppl"]
    if "error" in long_ppl:
        return [f"LongPPL has no result: {long_ppl['error'].rstrip('.')}."]
    count = long_ppl["key_targets"]
    caution = " (too few targets to conclude much)" if count < _MIN_KEY_TARGETS else ""
    needs = "needs" if count == 1 else "need"
    return [
        f"LongPPL, the perplexity of the {count_noun(count, 'target')} that {needs} long context "
        f"according to {long_ppl['judge']}, is {format_perplexity(long_ppl['perplexity'])}"
        f"{caution}."
    ]
