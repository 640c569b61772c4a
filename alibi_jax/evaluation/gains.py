"""Which targets gained from longer context, and how few of them carry the gain."""

import math
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int64

from alibi_jax.evaluation.bootstrap import Clusters
from alibi_jax.evaluation.eval_text import EvaluationText

# LongPPL's thresholds, in nats (Fang et al. 2024, arXiv 2410.23771, section 4).
ALPHA, BETA = 2.0, -2.0
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_TOP = (0.01, 0.05, 0.1, 0.25, 0.5)
_LARGEST = 20
# Tokens of text shown around a target.
_BEFORE, _AFTER = 160, 40


def gain_report(
    short: Float[np.ndarray, "M"], long: Float[np.ndarray, "M"], clusters: Clusters
) -> dict[str, Any]:
    """How the gains, `short` less `long`, are spread over targets; losses in nats."""
    gains = short.astype(np.float64) - long
    falling = np.sort(gains)[::-1]
    positive = np.maximum(falling, 0.0)
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
            for share in _TOP
            if total > 0
        ],
    }


def key_targets(
    short: Float[np.ndarray, "M"], long: Float[np.ndarray, "M"]
) -> Bool[np.ndarray, "M"]:
    """The targets for which long context matters, by a judge's losses in nats.

    Their log-probability rises by more than `ALPHA`, and to more than `BETA` (arXiv 2410.23771,
    equations 5 to 7).
    """
    rise = short.astype(np.float64) - long
    if not np.isfinite(rise).all():
        raise ValueError("the judge's losses are no numbers")
    return (rise > ALPHA) & (-long > BETA)


def long_ppl(nll: Float[np.ndarray, "M"], key: Bool[np.ndarray, "M"], judge: str) -> dict[str, Any]:
    """Perplexity over the judge's key targets alone, at the long context."""
    result: dict[str, Any] = {
        "judge": judge,
        "alpha": ALPHA,
        "beta": BETA,
        "key_targets": int(key.sum()),
    }
    if not key.any():
        return result | {"error": "the judge finds no key target among those sampled"}
    return result | {"perplexity": float(np.exp(nll[key].mean(dtype=np.float64)))}


def largest_gains(
    text: EvaluationText,
    targets: Int64[np.ndarray, "M"],
    short: Float[np.ndarray, "M"],
    long: Float[np.ndarray, "M"],
) -> list[dict[str, Any]]:
    """The targets that gained most, if any did, each with the text around it."""
    found = []
    for i in np.argsort(long - short, kind="stable")[:_LARGEST]:
        target, before, after = int(targets[i]), float(short[i]), float(long[i])
        if after >= before:
            break
        found.append(
            {
                "target": target,
                "before": _decode(text, max(0, target - _BEFORE), target),
                "text": _decode(text, target, target + 1),
                "after": _decode(text, target + 1, target + 1 + _AFTER),
                "nll_short": before,
                "nll_long": after,
                "gain": before - after,
            }
        )
    return found


def passage(
    text: EvaluationText,
    targets: Int64[np.ndarray, "M"],
    short: Float[np.ndarray, "M"],
    long: Float[np.ndarray, "M"],
) -> dict[str, Any]:
    """A passage of consecutive targets, in pieces of whole characters, with each piece's losses."""
    pieces: list[dict[str, Any]] = []
    waiting, before, after = b"", 0.0, 0.0
    for number, target in enumerate(targets):
        waiting += text.tokenizer.byte_strings[text.tokens[target]]
        before, after = before + float(short[number]), after + float(long[number])
        try:
            shown = waiting.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and number + 1 < len(targets):
                continue
            # What a passage that begins inside a character leaves of it.
            shown = waiting.decode(errors="replace")
        pieces.append(
            {"text": shown, "gain": before - after, "nll_short": before, "nll_long": after}
        )
        waiting, before, after = b"", 0.0, 0.0
    return {"first": int(targets[0]), "pieces": pieces}


def _decode(text: EvaluationText, start: int, stop: int) -> str:
    return text.tokenizer.decode(text.tokens[start:stop]).decode(errors="replace")
