"""How attention attends: how widely, how far back, and how scores change with the distance."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from alibi_jax.attention.blocks import take_block, take_token_block
from alibi_jax.attention.visibility import Visibility, bias_between, token_metadata
from alibi_jax.biases import Bias
from alibi_jax.distributed.sharding import num_shards

# Scores that a device holds at a time: 16 MiB of float32, whatever the length.
SCORES = 2**22


class AttentionStatistics(NamedTuple):
    """Of the weights p and the scores e of causal self-attention, by row and head, float32.

    `entropy`: the mean over queries of -Σ_j p_ij log p_ij, in nats. `distance`: the mean over
    queries of Σ_j p_ij (i−j), in tokens. `scores[..., n]`: the mean of e_ij, as softmax gets
    them, over the T−n pairs with i−j = n (Sun et al. 2022, arXiv 2212.10554, equation 11).
    """

    entropy: Float[Array, "*L B N"]
    distance: Float[Array, "*L B N"]
    scores: Float[Array, "*L B N T"]


def attention_statistics(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    *,
    bias: Bias | None,
    query_features: Any = None,
    key_features: Any = None,
) -> AttentionStatistics:
    """Statistics of causal self-attention at positions 0, 1, 2, ...; arguments as `attention`'s.

    In chunks of queries: no device holds many more than `SCORES` scores, or those of one query.
    """
    batch, length, num_heads, size = query.shape
    rows, heads = -(-batch // num_shards("batch")), -(-num_heads // num_shards("heads"))
    chunk = min(length, max(1, SCORES // (rows * heads * length)))
    key = jnp.repeat(key, num_heads // key.shape[2], axis=2)
    queries, keys = token_metadata(Visibility(), length, length, query_features, key_features)

    def add(number: Array, sums: AttentionStatistics) -> AttentionStatistics:
        own = take_token_block(queries, number, chunk)
        # A last chunk that would reach past the end is moved back over queries that are counted.
        new = own.indices >= number * chunk
        scores = jnp.einsum(
            "btnh,bsnh->bnts",
            take_block(query, number, chunk, axis=1),
            key,
            preferred_element_type=jnp.float32,
        )
        scores *= size**-0.5
        added = bias_between(bias, own, keys)
        if added is not None:
            scores += added.astype(jnp.float32)
        distance = own.indices[:, None] - keys.indices
        visible = distance >= 0
        shifted = jnp.where(visible, scores, -jnp.inf)
        shifted -= shifted.max(axis=-1, keepdims=True)
        weights = jnp.exp(shifted)
        total = weights.sum(axis=-1, keepdims=True)
        # Of terms that are not negative, so that nothing cancels.
        surprise = jnp.where(weights > 0.0, jnp.log(total) - shifted, 0.0)

        def summed(x: Array) -> Array:
            means = (weights * x).sum(axis=-1) / total[..., 0]
            return jnp.where(new, means, 0.0).sum(axis=-1)

        counted = jnp.where(visible & new[:, None], scores, 0.0)
        return AttentionStatistics(
            sums.entropy + summed(surprise),
            sums.distance + summed(distance),
            sums.scores + _by_distance(counted, own.indices[0]),
        )

    zeros = jnp.zeros((batch, num_heads, length))
    start = AttentionStatistics(zeros[..., 0], zeros[..., 0], zeros)
    sums = jax.lax.fori_loop(0, -(-length // chunk), add, start)
    return AttentionStatistics(
        sums.entropy / length,
        sums.distance / length,
        sums.scores / jnp.arange(length, 0, -1, dtype=jnp.float32),
    )


def _by_distance(scores: Float[Array, "B N t T"], first: Int[Array, ""]) -> Float[Array, "B N T"]:
    """Sums of the scores of queries from `first` on over the pairs at each distance."""
    batch, heads, rows, length = scores.shape
    width = rows + length
    # Keys backwards, and each row moved one place further right than the one before, by reading
    # rows as one place shorter than they are: then pairs at one distance are a column.
    padded = jnp.pad(scores[..., ::-1], ((0, 0), (0, 0), (0, 0), (0, rows)))
    flat = padded.reshape(batch, heads, rows * width)[..., : rows * (width - 1)]
    sums = flat.reshape(batch, heads, rows, width - 1).sum(axis=2)
    # The first column is the first query with the last key, at distance `first` - (T - 1).
    sums = jnp.pad(sums, ((0, 0), (0, 0), (0, length)))
    return jax.lax.dynamic_slice_in_dim(sums, length - 1 - first, length, axis=2)


def attention_resolution(scores: Float[np.ndarray, "... T"]) -> Float[np.ndarray, "..."]:
    """How well attention tells positions apart by s, the mean scores at distances 0 to T−1.

    Σ e^s[n] (e^s[n] − e^s[n+1]) / (Σ e^s[n])², in float64. There is no s[T]: the numerator ends
    with the term of T−2, so that scores that are all the same, or one alone, have 0.

    Sun et al. 2022 (xPos), arXiv 2212.10554, equation 3.
    """
    scores = np.asarray(scores, np.float64)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    falls = weights[..., :-1] - weights[..., 1:]
    return np.asarray((weights[..., :-1] * falls).sum(axis=-1) / weights.sum(axis=-1) ** 2)
