"""From losses one by one to the numbers of a row: units, contexts, intervals, position curve."""

import math
from typing import Any

import numpy as np

from alibi_jax.evaluation.bootstrap import clusters
from alibi_jax.evaluation.eval_text import EvaluationText
from alibi_jax.evaluation.scoring import Scores

# Nats whose perplexity a float64, and so the results' JSON, still holds.
_LARGEST_NLL = 700.0


def numbers(scores: Scores, text: EvaluationText, seed: int, *, sampled: bool) -> dict[str, Any]:
    """What a row says of its targets: sums and counts, each divided once, in float64.

    Of `sampled` targets there is no loss a word: words are not sampled whole. Raises ValueError
    where the losses are no numbers, or none that could be written down.
    """
    total, mean = scores.total_nll, scores.mean_nll
    if not mean < _LARGEST_NLL:
        raise ValueError(f"the mean loss is {mean} nats: the model's numbers ran away")
    groups = clusters(scores.targets, text.starts, seed)
    estimate = groups.estimate(scores.nll)
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
        "resampled": str(groups),
        "seconds": None if scores.resumed else scores.seconds,
        "compile_seconds": scores.compile_seconds,
    }


def _perplexity(total: float, count: int) -> float | None:
    """Exp(total / count), None where there is none or it would not be finite."""
    return math.exp(total / count) if count and total / count < _LARGEST_NLL else None


def position_curve(scores: Scores) -> list[dict[str, Any]]:
    """Mean loss by context in bins 1, 2, 3-4, 5-8, ...: where in the window the loss falls."""
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


def early_token(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What short contexts at the start of each window cost, in nats, by length.

    The loss in non-overlapping windows less that in sliding ones of the smallest stride
    measured (Press et al. 2021, Appendix B: the early token curse); empty without both.
    """
    cost: dict[str, Any] = {}
    scored = [row for row in rows if "nll" in row]
    for row in scored:
        sliding = [
            other
            for other in scored
            if other["protocol"] == "sliding" and other["length"] == row["length"]
        ]
        if row["protocol"] == "nonoverlapping" and sliding:
            finest = min(sliding, key=lambda other: other["stride"])
            cost[str(row["length"])] = {
                "nats": row["nll"] - finest["nll"],
                "stride": finest["stride"],
            }
    return cost
