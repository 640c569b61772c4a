"""Next-token loss without the logits: (sum, count) pairs, divided by no one here."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from alibi_jax import sharding

# Logits that a device holds at a time: 64 MiB of float32, whatever the length. Fewer take longer,
# the unembedding's gradient being read and written once a chunk (docs/performance.md).
LOGITS = 2**24


def token_nll(
    hidden: Float[Array, "B T D"],
    unembedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
) -> Float[Array, "B T"]:
    """Negative log-likelihood in nats of each target, float32, in chunks of positions.

    No `[B, T, V]` array exists, forward or backward, where it would be more than `LOGITS` on
    a device: each chunk's logits are computed in float32, reduced, and recomputed when gradients
    are taken.
    """
    batch, length, width = hidden.shape
    rows = max(1, -(-batch // sharding.shards("batch")))
    chunks = -(-length // max(1, LOGITS // (rows * len(unembedding))))

    def chunk_nll(hidden: Array, targets: Array) -> Array:
        # Cast here, so that the table's gradient is added up over chunks in float32.
        table = unembedding.astype(hidden.dtype)
        logits = jnp.einsum("btd,vd->btv", hidden, table, preferred_element_type=jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    if chunks <= 1:
        return chunk_nll(hidden, targets)
    # Alike, so that little is computed of what only fills the last.
    size = -(-length // chunks)
    chunks = -(-length // size)
    padding = chunks * size - length
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    padded_targets = jnp.pad(targets, ((0, 0), (0, padding)))
    # Scanned over chunks, so the batch stays where it is sharded.
    _, nll = jax.lax.scan(
        lambda _, chunk: (None, jax.checkpoint(chunk_nll)(*chunk)),
        None,
        (
            hidden.reshape(batch, chunks, size, width).swapaxes(0, 1),
            padded_targets.reshape(batch, chunks, size).swapaxes(0, 1),
        ),
    )
    return nll.swapaxes(0, 1).reshape(batch, chunks * size)[:, :length]


def weighted_sum(
    nll: Float[Array, "B T"], weights: Float[Array, "B T"] | None = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(sum of weight · nll, sum of weights), float32. Weights are of targets.

    A target of weight 0 adds nothing to either, nor a NaN to the gradient.
    """
    if weights is None:
        return nll.sum(), jnp.asarray(nll.size, jnp.float32)
    weights = weights.astype(jnp.float32)
    return jnp.where(weights > 0, nll * weights, 0.0).sum(), weights.sum()
