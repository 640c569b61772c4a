"""What a longer input gained, split in two: fewer early tokens, and longer context itself.

In windows of L that do not overlap the targets see 1 to L tokens: their mean loss is N(L). Given
exactly c tokens each, it is F(c). With curse(L) = N(L) - F(L), what the early tokens cost,

    N(L) - N(L') = [curse(L) - curse(L')] + [F(L) - F(L')]

identically: the first part is only that longer windows have fewer early tokens (Press et al. 2021,
appendix B), the second what longer context itself gave.
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
    """The parts for each length in both, against `base`, from losses of the same targets, in nats.

    `contexts` are what each target saw in windows that do not overlap. Each number comes with its
    interval; all are of the same draws of the clusters, so that what the targets have in common
    does not count as noise.
    """
    lengths = sorted(nonoverlapping.keys() & fixed.keys())
    first = _parts(nonoverlapping[base], fixed[base])
    entries: list[dict[str, Any]] = []
    for length in lengths:
        parts = _parts(nonoverlapping[length], fixed[length])
        parts |= {
            "gain": first["nonoverlapping"] - parts["nonoverlapping"],
            "early_tokens": first["curse"] - parts["curse"],
            "context": first["fixed"] - parts["fixed"],
        }
        entries.append(
            {
                "length": length,
                "smallest_context": int(contexts[length].min()),
                "mean_context": float(contexts[length].mean()),
                "largest_context": int(contexts[length].max()),
            }
            | {name: clusters.estimate(values) for name, values in parts.items()}
        )
    return {
        "base": base,
        "targets": len(clusters.ids),
        "resampled": str(clusters),
        "lengths": entries,
    }


def _parts(
    nonoverlapping: Float[np.ndarray, "M"], fixed: Float[np.ndarray, "M"]
) -> dict[str, np.ndarray]:
    nonoverlapping, fixed = nonoverlapping.astype(np.float64), fixed.astype(np.float64)
    return {"nonoverlapping": nonoverlapping, "fixed": fixed, "curse": nonoverlapping - fixed}
