"""The results of one run: its entry of results.json."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from alibi_jax.evaluation.attention_diagnostics import attention_report
from alibi_jax.evaluation.bootstrap import make_clusters
from alibi_jax.evaluation.decomposition import decompose
from alibi_jax.evaluation.gains import gain_report, key_targets, largest_gains, long_ppl, passage
from alibi_jax.evaluation.protocols import FIXED, NONOVERLAPPING
from alibi_jax.evaluation.row_metrics import early_token_costs, loss_metrics, position_curve
from alibi_jax.evaluation.run_evaluation import RunEvaluation

# Attention is measured over at most 16 windows, which together have at most 32768 tokens unless a
# single window has more.
_MAX_ATTENTION_WINDOWS, _MAX_ATTENTION_TOKENS = 16, 32768
# The errors that a length raises if the text, the model or the memory does not allow it.
_LENGTH_ERRORS = (ValueError, jax.errors.JaxRuntimeError)


def evaluate_run(
    evaluation: RunEvaluation,
    lengths: Sequence[int],
    attention_lengths: Sequence[int] = (),
    judge: RunEvaluation | None = None,
) -> dict[str, Any]:
    """Evaluates a run at all lengths and returns its entry of results.json.

    A length that the model, the text or the memory does not allow gives a row with the reason under
    "error"; the other lengths are still evaluated.
    """
    run, text, options = evaluation.run, evaluation.text, evaluation.options
    rows: list[dict[str, Any]] = []
    curves: dict[str, Any] = {}
    sample = evaluation.sample.targets
    # For the sampled targets, by length: losses and contexts in non-overlapping windows, and losses
    # with fixed context.
    nonoverlapping: dict[int, np.ndarray] = {}
    contexts: dict[int, np.ndarray] = {}
    fixed: dict[int, np.ndarray] = {}
    for protocol in options.parsed_protocols:
        for length in lengths:
            row: dict[str, Any] = {
                "protocol": protocol.name,
                "length": length,
                "stride": protocol.stride_at(length),
                "rescaling_factor": evaluation.rescaling.factor_at(run.config, length),
            }
            rows.append(row)
            sampled = protocol.spec.scores_sample
            try:
                scores, windows = evaluation.score(protocol, length)
                row |= loss_metrics(scores, text, options.seed, sampled=sampled)
            except _LENGTH_ERRORS as error:
                row["error"] = _first_line(error)
                continue
            row["windows"] = len(windows.num_scored)
            row["min_context"] = windows.min_context
            if protocol.spec is FIXED:
                fixed[length] = scores.nll
            if protocol.spec is NONOVERLAPPING:
                curves[str(length)] = position_curve(scores)
                indices = np.searchsorted(scores.targets, sample)
                nonoverlapping[length] = scores.nll[indices]
                contexts[length] = scores.contexts[indices]
    train_length = run.config.train.length
    common_lengths = sorted(nonoverlapping.keys() & fixed.keys())
    return {
        "workdir": str(run.workdir),
        "position": run.config.model.position,
        "rescaling": str(evaluation.rescaling),
        "train_length": train_length,
        "step": run.metadata.step,
        "split": options.split,
        "config": run.metadata.config,
        "trained_by": run.metadata.provenance,
        "corpus": {"dataset": run.metadata.config["data"]["dataset"], "split": options.split}
        | text.summary(),
        "rows": rows,
        "position_nll": curves,
        "early_token": early_token_costs(rows),
        "decomposition": decompose(
            nonoverlapping,
            contexts,
            fixed,
            train_length if train_length in common_lengths else common_lengths[0],
            make_clusters(sample, text.document_starts, options.seed),
        )
        if common_lengths
        else None,
        "attention": [_attention(evaluation, length) for length in attention_lengths],
        "gain": _gain(evaluation, sorted(fixed), judge or evaluation),
    }


def _attention(evaluation: RunEvaluation, length: int) -> dict[str, Any]:
    num_windows = max(1, min(_MAX_ATTENTION_WINDOWS, _MAX_ATTENTION_TOKENS // length))
    run, tokens = evaluation.run, evaluation.text.tokens
    try:
        graphdef = evaluation.graphdef(length)
        return attention_report(graphdef, run.mesh, run.params, tokens, length, num_windows)
    except _LENGTH_ERRORS as error:
        return {"length": length, "error": _first_line(error)}


def _gain(
    evaluation: RunEvaluation, lengths: list[int], judge: RunEvaluation
) -> dict[str, Any] | None:
    """The gain from a short length to the longest of `lengths`; None if these are the same.

    The short length is the training length if `lengths` contains it, and the shortest of `lengths`
    if not.
    """
    train_length = evaluation.run.config.train.length
    short = train_length if train_length in lengths else min(lengths, default=0)
    long = max(lengths, default=0)
    if short == long:
        return None
    text, sample = evaluation.text, evaluation.sample.targets
    clusters = make_clusters(sample, text.document_starts, evaluation.options.seed)
    nll_short, nll_long = evaluation.sample_losses(short), evaluation.sample_losses(long)
    report: dict[str, Any] = {"short": short, "long": long}
    report |= gain_report(nll_short, nll_long, clusters)
    judge_name = str(judge.run.workdir)
    try:
        key = key_targets(judge.sample_losses(short), judge.sample_losses(long))
        report["long_ppl"] = long_ppl(nll_long, key, judge_name)
    except _LENGTH_ERRORS as error:
        report["long_ppl"] = {"judge": judge_name, "error": _first_line(error)}
    report["largest"] = largest_gains(text, sample, nll_short, nll_long)
    report["passage"] = _passage(evaluation, short, long)
    return report


def _passage(evaluation: RunEvaluation, short: int, long: int) -> dict[str, Any] | None:
    """Consecutive targets at the middle of the sample, with their losses at both contexts.

    The choice does not depend on any loss, so that all runs show the same passage. None where no
    target there has `long` tokens of context.
    """
    text, sample = evaluation.text, evaluation.sample.targets
    middle = sample[len(sample) // 2]
    index = np.searchsorted(text.bounds, middle, side="right")
    start, stop = text.bounds[index - 1], text.bounds[index]
    first = max(start + long, min(middle, stop - evaluation.options.passage))
    targets = np.arange(first, min(first + evaluation.options.passage, stop))
    if not len(targets):
        return None
    try:
        losses = [evaluation.losses(targets, context) for context in (short, long)]
        return passage(text, targets, *losses)
    except _LENGTH_ERRORS as error:
        return {"error": _first_line(error)}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
