"""Which targets gained from longer context, and how the gain is spread over targets."""

import math
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int64

from alibi_jax.evaluation.bootstrap import Clusters
from alibi_jax.evaluation.eval_text import EvaluationText
from alibi_jax.evaluation.scoring import MAX_NLL

# LongPPL's thresholds, in nats (Fang et al. 2024, arXiv 2410.23771, section 4).
ALPHA, BETA = 2.0, -2.0
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_TOP_SHARES = (0.01, 0.05, 0.1, 0.25, 0.5)
_NUM_LARGEST = 20
# Tokens of text shown before and after a target.
_TOKENS_BEFORE, _TOKENS_AFTER = 160, 40


def gain_report(
    short: Float[np.ndarray, "M"], long: Float[np.ndarray, "M"], clusters: Clusters
) -> dict[str, Any]:
    """The distribution of the gains `short - long` over targets; losses in nats."""
    gains = short.astype(np.float64) - long
    descending = np.sort(gains)[::-1]
    positive = np.maximum(descending, 0.0)
    total = positive.sum()
    quantiles = np.quantile(gains, _QUANTILES)
    return {
        "targets": len(gains),
        "nats": clusters.estimate(gains),
        "improved": float((gains > 0).mean()),
        "quantiles": [
            {"share": share, "nats": float(value)} for share, value in zip(_QUANTILES, quantiles)
        ],
        "concentration": [
            {
                "targets": share,
                "gain": float(positive[: math.ceil(share * len(gains))].sum() / total),
            }
            for share in _TOP_SHARES
            if total > 0
        ],
    }


def key_targets(
    short: Float[np.ndarray, "M"], long: Float[np.ndarray, "M"]
) -> Bool[np.ndarray, "M"]:
    """The targets that need long context, according to a judge's losses in nats.

    With the long context, the log-probability of a key target rises by more than `ALPHA` and
    exceeds `BETA` (arXiv 2410.23771, equations 5 to 7). Raises ValueError where the losses are not
    finite.
    """
    rise = short.astype(np.float64) - long
    if not np.isfinite(rise).all():
        raise ValueError("the losses of the judge are not finite")
    return (rise > ALPHA) & (-long > BETA)


def long_ppl(nll: Float[np.ndarray, "M"], key: Bool[np.ndarray, "M"], judge: str) -> dict[str, Any]:
    """LongPPL: the perplexity of the key targets `key`, from losses `nll` at the long context."""
    result: dict[str, Any] = {
        "judge": judge,
        "alpha": ALPHA,
        "beta": BETA,
        "key_targets": int(key.sum()),
    }
    if not key.any():
        return result | {"error": "the judge finds no key target in the sample"}
    mean = float(nll[key].mean(dtype=np.float64))
    if not mean < MAX_NLL:
        return result | {"error": f"the mean loss of the key targets is {mean} nats"}
    return result | {"perplexity": float(np.exp(mean))}


def largest_gains(
    text: EvaluationText,
    targets: Int64[np.ndarray, "M"],
    short: Float[np.ndarray, "M"],
    long: Float[np.ndarray, "M"],
) -> list[dict[str, Any]]:
    """The targets with the largest positive gains, each with the text around it."""
    largest = []
    for i in np.argsort(long - short, kind="stable")[:_NUM_LARGEST]:
        target, nll_short, nll_long = int(targets[i]), float(short[i]), float(long[i])
        if nll_long >= nll_short:
            break
        largest.append(
            {
                "target": target,
                "before": _decode(text, max(0, target - _TOKENS_BEFORE), target),
                "text": _decode(text, target, target + 1),
                "after": _decode(text, target + 1, target + 1 + _TOKENS_AFTER),
                "nll_short": nll_short,
                "nll_long": nll_long,
                "gain": nll_short - nll_long,
            }
        )
    return largest


def passage(
    text: EvaluationText,
    targets: Int64[np.ndarray, "M"],
    short: Float[np.ndarray, "M"],
    long: Float[np.ndarray, "M"],
) -> dict[str, Any]:
    """Consecutive targets in pieces of whole characters, each with the sum of its losses.

    Raises ValueError unless all losses are finite.
    """
    if not np.isfinite(short).all() or not np.isfinite(long).all():
        raise ValueError("the losses of the passage are not finite: the model's outputs diverged")
    pieces: list[dict[str, Any]] = []
    pending, nll_short, nll_long = b"", 0.0, 0.0
    for index, target in enumerate(targets):
        pending += text.tokenizer.byte_strings[text.tokens[target]]
        nll_short, nll_long = nll_short + float(short[index]), nll_long + float(long[index])
        try:
            piece = pending.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and index + 1 < len(targets):
                continue
            # The passage begins or ends inside a character.
            piece = pending.decode(errors="replace")
        pieces.append(
            {
                "text": piece,
                "gain": nll_short - nll_long,
                "nll_short": nll_short,
                "nll_long": nll_long,
            }
        )
        pending, nll_short, nll_long = b"", 0.0, 0.0
    return {"first": int(targets[0]), "pieces": pieces}


def _decode(text: EvaluationText, start: int, stop: int) -> str:
    return text.tokenizer.decode(text.tokens[start:stop]).decode(errors="replace")
