"""The next-token loss, without storing the logits of all tokens.

`token_nll` gives one loss per target. `weighted_sum` gives the sum of the losses and the sum of
their weights, and the caller divides the two.

Axes: B batch, T tokens, D width, R rows of the unembedding.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from alibi_jax.distributed import sharding

# The most logits that a device holds at a time: 64 MiB of float32, at any length. Smaller chunks
# take longer, because each chunk reads and writes the unembedding's gradient (docs/performance.md).
MAX_CHUNK_LOGITS = 2**24


def token_nll(
    hidden: Float[Array, "B T D"],
    unembedding: Float[Array, "R D"],
    targets: Int[Array, "B T"],
    *,
    vocab_size: int | None = None,
) -> Float[Array, "B T"]:
    """Negative log-likelihood of each target in nats, float32, computed in chunks of tokens.

    Rows of `unembedding` from `vocab_size` on are padding. No `[B, T, R]` array exists, forward or
    backward, if it has more than `MAX_CHUNK_LOGITS` elements on a device: the logits of each chunk
    are computed in float32, reduced, and recomputed for the gradient.
    """
    num_rows = len(unembedding)

    def chunk_nll(hidden: Array, targets: Array) -> Array:
        # The cast is inside the chunk, so that the table's gradient is summed in float32.
        table = unembedding.astype(hidden.dtype)
        logits = jnp.einsum("btd,vd->btv", hidden, table, preferred_element_type=jnp.float32)
        if vocab_size not in (None, num_rows):
            logits = jnp.where(jnp.arange(num_rows) < vocab_size, logits, -jnp.inf)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    return map_token_chunks(chunk_nll, hidden, targets, logits_per_token=num_rows)


def map_token_chunks(
    function: Callable[[Array, Array], Array],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    *,
    logits_per_token: int,
) -> Float[Array, "B T"]:
    """Applies `function` to chunks of tokens that are small enough for their logits to fit.

    `function` computes each token independently, and holds `logits_per_token` logits per token.
    """
    batch, length = targets.shape
    shards = sharding.num_shards("sequence")
    # Each device divides its own shard of the sequence into chunks.
    shards = shards if length % shards == 0 else 1
    rows = max(1, -(-batch // sharding.num_shards("batch")))
    length //= shards
    chunks = -(-length // max(1, MAX_CHUNK_LOGITS // (rows * logits_per_token)))
    if chunks <= 1:
        return function(hidden, targets)
    # All chunks have the same size; the smallest size that needs no more chunks pads the least.
    size = -(-length // chunks)
    chunks = -(-length // size)
    padding = chunks * size - length

    def split_into_chunks(x: Array) -> Array:
        x = x.reshape(batch, shards, length, *x.shape[2:])
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), *((0, 0),) * (x.ndim - 3)))
        return jnp.moveaxis(x.reshape(batch, shards, chunks, size, *x.shape[3:]), 2, 0)

    def apply_to_chunk(_: None, chunk: tuple[Array, Array]) -> tuple[None, Array]:
        # The chunks of all shards stand side by side along the sequence, so that each device
        # computes the chunk of its own shard.
        hidden, targets = (x.reshape(batch, shards * size, *x.shape[3:]) for x in chunk)
        if shards > 1:
            hidden = sharding.constrain(hidden, "batch", "sequence", None)
        nll = jax.checkpoint(function)(hidden, targets)
        return None, nll.reshape(batch, shards, size)

    # The scan is over chunks, so that the sharding of batch and sequence does not change.
    scanned = split_into_chunks(hidden), split_into_chunks(targets)
    _, nll = jax.lax.scan(apply_to_chunk, None, scanned)
    nll = jnp.moveaxis(nll, 0, 2).reshape(batch, shards, chunks * size)[:, :, :length]
    return nll.reshape(targets.shape)


def weighted_sum(
    nll: Float[Array, "B T"], weights: Float[Array, "B T"] | None = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(sum of weight · nll, sum of weights), float32, with one weight per target, by default 1.

    A target of weight 0 adds nothing to either sum, and no NaN to the gradient.
    """
    if weights is None:
        return nll.sum(), jnp.asarray(nll.size, jnp.float32)
    weights = weights.astype(jnp.float32)
    return jnp.where(weights > 0, nll * weights, 0.0).sum(), weights.sum()
