"""Next-token loss without the logits: (sum, count) pairs, divided by no one here."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from alibi_jax.distributed import sharding

# Logits that a device holds at a time: 64 MiB of float32, whatever the length. Fewer take longer,
# the unembedding's gradient being read and written once a chunk (docs/performance.md).
LOGITS = 2**24


def token_nll(
    hidden: Float[Array, "B T D"],
    unembedding: Float[Array, "R D"],
    targets: Int[Array, "B T"],
    *,
    vocab_size: int | None = None,
) -> Float[Array, "B T"]:
    """Negative log-likelihood in nats of each target, float32, in chunks of positions.

    Rows of `unembedding` from `vocab_size` on are no token's. No `[B, T, R]` array exists, forward
    or backward, where it would be more than `LOGITS` on a device: each chunk's logits are computed
    in float32, reduced, and recomputed when gradients are taken.
    """
    num_rows = len(unembedding)

    def chunk_nll(hidden: Array, targets: Array) -> Array:
        # Cast here, so that the table's gradient is added up over chunks in float32.
        table = unembedding.astype(hidden.dtype)
        logits = jnp.einsum("btd,vd->btv", hidden, table, preferred_element_type=jnp.float32)
        if vocab_size not in (None, num_rows):
            logits = jnp.where(jnp.arange(num_rows) < vocab_size, logits, -jnp.inf)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    return in_chunks(chunk_nll, hidden, targets, num_rows)


def in_chunks(
    function: Callable[[Array, Array], Array],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    logits: int,
) -> Float[Array, "B T"]:
    """`function` of positions alone, which holds so many `logits` of each, in chunks of them."""
    batch, length = targets.shape
    parts = sharding.num_shards("sequence")
    # Each device goes through its own part of the sequence.
    parts = parts if length % parts == 0 else 1
    rows = max(1, -(-batch // sharding.num_shards("batch")))
    length //= parts
    chunks = -(-length // max(1, LOGITS // (rows * logits)))
    if chunks <= 1:
        return function(hidden, targets)
    # Alike, so that little is computed of what only fills the last.
    size = -(-length // chunks)
    chunks = -(-length // size)
    padding = chunks * size - length

    def divided(x: Array) -> Array:
        x = x.reshape(batch, parts, length, *x.shape[2:])
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), *((0, 0),) * (x.ndim - 3)))
        return jnp.moveaxis(x.reshape(batch, parts, chunks, size, *x.shape[3:]), 2, 0)

    def one(_: None, chunk: tuple[Array, Array]) -> tuple[None, Array]:
        # The parts side by side: as many rows to each device as before.
        hidden, targets = (x.reshape(batch, parts * size, *x.shape[3:]) for x in chunk)
        if parts > 1:
            hidden = sharding.constrain(hidden, "batch", "sequence", None)
        nll = jax.checkpoint(function)(hidden, targets)
        return None, nll.reshape(batch, parts, size)

    # Scanned over chunks, so that batch and sequence stay where they are sharded.
    _, nll = jax.lax.scan(one, None, (divided(hidden), divided(targets)))
    nll = jnp.moveaxis(nll, 0, 2).reshape(batch, parts, chunks * size)[:, :, :length]
    return nll.reshape(targets.shape)


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
