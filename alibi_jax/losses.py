"""Next-token loss without the logits: (sum, count) pairs, divided by no one here."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

# Positions projected to the vocabulary at a time: with a vocabulary of 32k and 8 sequences a
# device, 64 positions are 64 MiB of float32 logits, whatever the length.
CHUNK = 64


def token_nll(
    hidden: Float[Array, "B T D"],
    unembedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
) -> Float[Array, "B T"]:
    """Negative log-likelihood in nats of each target, float32, in chunks of positions.

    No `[B, T, V]` array exists, forward or backward, for T above the chunk: each chunk's
    logits are computed in float32, reduced, and recomputed when gradients are taken.
    """
    batch, length, width = hidden.shape

    def chunk_nll(hidden: Array, targets: Array) -> Array:
        # Cast here, so that the table's gradient is added up over chunks in float32.
        table = unembedding.astype(hidden.dtype)
        logits = jnp.einsum("btd,vd->btv", hidden, table, preferred_element_type=jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    if length <= CHUNK:
        return chunk_nll(hidden, targets)
    chunks = -(-length // CHUNK)
    padding = chunks * CHUNK - length
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    padded_targets = jnp.pad(targets, ((0, 0), (0, padding)))
    # Scanned over chunks, so the batch stays where it is sharded.
    _, nll = jax.lax.scan(
        lambda _, chunk: (None, jax.checkpoint(chunk_nll)(*chunk)),
        None,
        (
            hidden.reshape(batch, chunks, CHUNK, width).swapaxes(0, 1),
            padded_targets.reshape(batch, chunks, CHUNK).swapaxes(0, 1),
        ),
    )
    return nll.swapaxes(0, 1).reshape(batch, chunks * CHUNK)[:, :length]


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
