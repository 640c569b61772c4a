"""Statistics of attention: its entropy, its mean distance, and its mean scores by distance."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from alibi_jax.attention.blocks import take_block, take_token_block
from alibi_jax.attention.visibility import Visibility, bias_between, token_metadata
from alibi_jax.biases import Bias
from alibi_jax.biases.distances import same_rank

# Scores that a device holds at a time: 16 MiB of float32, whatever the length.
MAX_SCORES = 2**22


class AttentionStatistics(NamedTuple):
    """Statistics of causal self-attention with weights p and scores e, per row and head, float32.

    `entropy` is the mean over queries of -Σ_j p_ij log p_ij, in nats. `distance` is the mean over
    queries of Σ_j p_ij (i−j), in tokens. `scores[..., n]` is the mean of the scores e_ij, the
    inputs of the softmax, over the T−n pairs with i−j = n (Sun et al. 2022, arXiv 2212.10554,
    equation 11).
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
    num_shards: int = 1,
) -> AttentionStatistics:
    """Computes statistics of causal self-attention at positions 0, 1, 2, ...

    The other arguments have the names and meanings of `attention`'s arguments. `num_shards` is
    the number of devices over which batch rows and heads are sharded. Queries are processed in
    chunks: a device holds at most about `MAX_SCORES` scores at a time, or the scores of one query
    per batch row and head if these are more.
    """
    batch, length, num_heads, size = query.shape
    rows_of_scores = -(-batch * num_heads // num_shards)
    chunk_size = min(length, max(1, MAX_SCORES // (rows_of_scores * length)))
    key = jnp.repeat(key, num_heads // key.shape[2], axis=2)
    queries, keys = token_metadata(Visibility(), length, length, query_features, key_features)

    def add_chunk(index: Array, sums: AttentionStatistics) -> AttentionStatistics:
        chunk = take_token_block(queries, index, chunk_size)
        # If the last chunk would pass the end, JAX moves it back, over queries already counted.
        is_new = chunk.indices >= index * chunk_size
        scores = jnp.einsum(
            "btnh,bsnh->bnts",
            take_block(query, index, chunk_size, axis=1),
            key,
            preferred_element_type=jnp.float32,
        )
        scores *= size**-0.5
        chunk_bias = bias_between(bias, chunk, keys)
        if chunk_bias is not None:
            scores, chunk_bias = same_rank(scores, chunk_bias.astype(jnp.float32))
            scores += chunk_bias
        distance = (chunk.indices[:, None] - keys.indices[None, :])[None, None]
        visible = distance >= 0
        shifted = jnp.where(visible, scores, -jnp.inf)
        shifted -= shifted.max(axis=-1, keepdims=True)
        weights = jnp.exp(shifted)
        total = weights.sum(axis=-1, keepdims=True)
        # This is -log p. It is never negative, so nothing cancels in the sum.
        surprise = jnp.where(weights > 0.0, jnp.log(total) - shifted, 0.0)

        def sum_of_means(x: Array) -> Array:
            means = (weights * x).sum(axis=-1) / total[..., 0]
            return jnp.where(is_new, means, 0.0).sum(axis=-1)

        new_scores = jnp.where(visible & is_new[None, None, :, None], scores, 0.0)
        return AttentionStatistics(
            sums.entropy + sum_of_means(surprise),
            sums.distance + sum_of_means(distance),
            sums.scores + _sum_by_distance(new_scores, chunk.indices[0]),
        )

    zeros = jnp.zeros((batch, num_heads, length))
    init = AttentionStatistics(zeros[..., 0], zeros[..., 0], zeros)
    sums = jax.lax.fori_loop(0, -(-length // chunk_size), add_chunk, init)
    return AttentionStatistics(
        sums.entropy / length,
        sums.distance / length,
        sums.scores / jnp.arange(length, 0, -1, dtype=jnp.float32)[None, None],
    )


def _sum_by_distance(
    scores: Float[Array, "B N t T"], first: Int[Array, ""]
) -> Float[Array, "B N T"]:
    """Sums of scores over the pairs at each distance; the queries are `first`, `first` + 1, ..."""
    batch, heads, rows, length = scores.shape
    width = rows + length
    # The keys are reversed, and row r is shifted right by r entries, so that each column has one
    # distance. The shift is a reshape: the rows of `width` entries are read as rows of `width` - 1.
    padded = jnp.pad(scores[..., ::-1], ((0, 0), (0, 0), (0, 0), (0, rows)))
    flat = padded.reshape(batch, heads, rows * width)[..., : rows * (width - 1)]
    sums = flat.reshape(batch, heads, rows, width - 1).sum(axis=2)
    # The first column has the distance of the first query and the last key, `first` - (T - 1).
    sums = jnp.pad(sums, ((0, 0), (0, 0), (0, length)))
    return jax.lax.dynamic_slice_in_dim(sums, length - 1 - first, length, axis=2)


def attention_resolution(scores: Float[np.ndarray, "... T"]) -> Float[np.ndarray, "..."]:
    """How well attention distinguishes positions; s[n] is the mean score at distance n < T.

    Σ e^s[n] (e^s[n] − e^s[n+1]) / (Σ e^s[n])², in float64. There is no s[T], so the numerator's sum
    ends at n = T−2. Equal scores have resolution 0, and so has a single score.

    Sun et al. 2022 (xPos), arXiv 2212.10554, equation 3.
    """
    scores = np.asarray(scores, np.float64)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    falls = weights[..., :-1] - weights[..., 1:]
    return np.asarray((weights[..., :-1] * falls).sum(axis=-1) / weights.sum(axis=-1) ** 2)
