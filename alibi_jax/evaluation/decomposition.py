"""The gain of a longer input in two parts: fewer early tokens, and longer context itself.

In non-overlapping windows of L tokens the targets have 1 to L tokens of context; their mean loss is
N(L). Given exactly c tokens of context each, their mean loss is F(c). The early tokens of a window
cost curse(L) = N(L) - F(L), so that

    N(L) - N(L') = [curse(L) - curse(L')] + [F(L) - F(L')]

is an identity. The first part is the gain from fewer early tokens in longer windows (Press et al.
2021, appendix B); the second part is the gain from longer context itself.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Int64

from alibi_jax.evaluation.bootstrap import Clusters


def decompose(
    nonoverlapping: dict[int, Float[np.ndarray, "M"]],
    contexts: dict[int, Int64[np.ndarray, "M"]],
    fixed: dict[int, Float[np.ndarray, "M"]],
    base: int,
    clusters: Clusters,
) -> dict[str, Any]:
    """The parts of the gain from length `base` to each length, in nats; `base` itself gains 0.

    `nonoverlapping` and `fixed` hold, by length, the losses of the same targets; a length that one
    of them lacks is left out. `contexts` holds each target's context in non-overlapping windows.
    Each loss and each gain comes with its interval. A gain's interval is computed from the
    difference of each target's losses, so that the difficulty that a target has at both lengths
    does not count as noise. All intervals use the same resamples.
    """
    lengths = sorted(nonoverlapping.keys() & fixed.keys())
    base_losses = _losses(nonoverlapping[base], fixed[base])
    entries: list[dict[str, Any]] = []
    for length in lengths:
        losses = _losses(nonoverlapping[length], fixed[length])
        gains = {
            "gain": base_losses["nonoverlapping"] - losses["nonoverlapping"],
            "early_tokens": base_losses["curse"] - losses["curse"],
            "context": base_losses["fixed"] - losses["fixed"],
        }
        entries.append(
            {
                "length": length,
                "smallest_context": int(contexts[length].min()),
                "mean_context": float(contexts[length].mean()),
                "largest_context": int(contexts[length].max()),
            }
            | {name: clusters.estimate(values) for name, values in (losses | gains).items()}
        )
    return {
        "base": base,
        "targets": len(clusters.ids),
        "resampled": str(clusters),
        "lengths": entries,
    }


def _losses(
    nonoverlapping: Float[np.ndarray, "M"], fixed: Float[np.ndarray, "M"]
) -> dict[str, np.ndarray]:
    """The two losses of each target and their difference, in float64."""
    nonoverlapping, fixed = nonoverlapping.astype(np.float64), fixed.astype(np.float64)
    return {"nonoverlapping": nonoverlapping, "fixed": fixed, "curse": nonoverlapping - fixed}
