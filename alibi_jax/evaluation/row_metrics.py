"""The numbers of a row of results, from its losses: units, contexts, interval, position curve."""

import math
from typing import Any

import numpy as np

from alibi_jax.evaluation.bootstrap import make_clusters
from alibi_jax.evaluation.eval_text import EvaluationText
from alibi_jax.evaluation.protocols import NONOVERLAPPING, SLIDING
from alibi_jax.evaluation.scoring import MAX_NLL, Scores


def loss_metrics(
    scores: Scores, text: EvaluationText, seed: int, *, sampled: bool
) -> dict[str, Any]:
    """The mean loss of a row's targets in several units, with counts, contexts and times.

    Sums are float64 and divided once. A row of `sampled` targets has no perplexity per word, since
    words are not sampled whole. Raises ValueError where the mean loss is NaN or its perplexity
    overflows.
    """
    total, mean = scores.total_nll, scores.mean_nll
    if not mean < MAX_NLL:
        raise ValueError(f"the mean loss is {mean} nats: the model's outputs diverged")
    clusters = make_clusters(scores.targets, text.document_starts, seed)
    estimate = clusters.estimate(scores.nll)
    words = int(text.words[scores.targets].sum(dtype=np.int64))
    num_bytes = int(text.num_bytes[scores.targets].sum(dtype=np.int64))
    return {
        "nll": mean,
        "nll_low": estimate["low"],
        "nll_high": estimate["high"],
        "perplexity": math.exp(mean),
        "word_perplexity": None if sampled else _perplexity(total, words),
        "bits_per_byte": total / (math.log(2) * num_bytes) if num_bytes else None,
        "targets": len(scores.targets),
        "words": words,
        "bytes": num_bytes,
        "smallest_context": int(scores.contexts.min()),
        "mean_context": float(scores.contexts.mean()),
        "largest_context": int(scores.contexts.max()),
        "resampled": str(clusters),
        "seconds": None if scores.resumed else scores.seconds,
        "compile_seconds": scores.compile_seconds,
    }


def _perplexity(total: float, count: int) -> float | None:
    """Returns exp(total / count), or None where `count` is 0 or the result overflows."""
    return math.exp(total / count) if count and total / count < MAX_NLL else None


def position_curve(scores: Scores) -> list[dict[str, Any]]:
    """The mean loss by context, in bins of 1, 2, 3-4, 5-8, ... tokens; empty bins are left out."""
    nll, targets = scores.by_context(scores.nll), scores.by_context()
    curve, start = [], 0
    while start < len(nll):
        stop = min(max(2 * start, start + 1), len(nll))
        count = int(targets[start:stop].sum())
        if count:
            curve.append(
                {
                    "context_from": start + 1,
                    "context_to": stop,
                    "nll": float(nll[start:stop].sum() / count),
                    "targets": count,
                }
            )
        start = stop
    return curve


def early_token_costs(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The cost of short contexts at the start of each window, in nats, by length.

    The cost is the loss in non-overlapping windows minus the loss in sliding windows of the
    smallest stride measured (Press et al. 2021, appendix B: the early token curse). A length
    without both rows is left out.
    """
    costs: dict[str, Any] = {}
    scored = [row for row in rows if "nll" in row]
    for row in scored:
        sliding = [
            other
            for other in scored
            if other["protocol"] == SLIDING.name and other["length"] == row["length"]
        ]
        if row["protocol"] == NONOVERLAPPING.name and sliding:
            smallest_stride = min(sliding, key=lambda other: other["stride"])
            costs[str(row["length"])] = {
                "nats": row["nll"] - smallest_stride["nll"],
                "stride": smallest_stride["stride"],
            }
    return costs
