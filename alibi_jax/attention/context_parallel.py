"""Context parallelism: causal attention whose sequence is sharded over devices.

Each device has a shard of the queries, keys and values, and calls `context_attention` inside
`jax.shard_map`. The queries stay on their device and the keys come to them: all keys, or only the
keys of the previous shard, where a linear bias makes the other keys irrelevant. Distances are the
distances in the whole sequence.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Real

from alibi_jax.attention import attention
from alibi_jax.attention.reach import NEGLIGIBLE, norm_bound
from alibi_jax.attention.rolling_cache import omitted_share, reach_length
from alibi_jax.biases import LinearBias
from alibi_jax.biases.alibi import Slopes

# Expected gap between the bound of a query's scores and the score with its own key, as in
# `rolling_cache`. It predicts which heads have a reach that ends within the previous shard.
# Each call verifies the prediction.
_EXPECTED_GAP = 16.0


def short_range_heads(slopes: Slopes, num_kv_heads: int, length: int) -> tuple[int, ...]:
    """The key heads whose query heads are all expected to reach at most `length` tokens back.

    The slopes must be concrete, not traced.
    """
    reaches = reach_length(slopes, _EXPECTED_GAP, NEGLIGIBLE).reshape(num_kv_heads, -1).max(axis=1)
    return tuple(head for head, reach in enumerate(reaches.tolist()) if reach <= length)


def context_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    slopes: Slopes | None = None,
    *,
    axes: tuple[str, ...],
    short_range: tuple[int, ...] = (),
    positions: Real[Array, "*#B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N V"]:
    """Attention of a shard's queries to the whole sequence, sharded over the mesh's `axes`.

    Shard i holds tokens i·T to (i+1)·T − 1. `positions` (default: indices) and `segment_ids`
    belong to the shard's tokens. `slopes` are the slopes of a linear bias; None means no bias.

    The key heads in `short_range` fetch only the previous shard's keys, if the other keys provably
    have at most a share of `NEGLIGIBLE` of each row's weight, in every shard and on every device
    of the mesh. Otherwise they fetch all keys. With `short_range`, positions must be the indices,
    and the heads must not be sharded.
    """
    if slopes is None:
        return _attend_to_all(query, key, value, None, axes, positions, segment_ids)
    slopes = jnp.asarray(slopes)
    if not short_range:
        return _attend_to_all(query, key, value, slopes, axes, positions, segment_ids)
    long_range = sorted(set(range(key.shape[2])) - set(short_range))
    outs, head_order = [], []
    for heads in filter(len, (short_range, long_range)):
        key_heads, queries_per_key = np.array(heads), query.shape[2] // key.shape[2]
        query_heads = (key_heads[:, None] * queries_per_key + np.arange(queries_per_key)).ravel()
        arrays = (
            query[:, :, query_heads],
            key[:, :, key_heads],
            value[:, :, key_heads],
            slopes[query_heads],
        )
        if heads is short_range:
            outs.append(_attend_to_previous_shard(*arrays, axes, segment_ids))
        else:
            outs.append(_attend_to_all(*arrays, axes, positions, segment_ids))
        head_order.append(query_heads)
    return jnp.concatenate(outs, axis=2)[:, :, np.argsort(np.concatenate(head_order))]


def _attend_to_all(
    query: Array,
    key: Array,
    value: Array,
    slopes: Array | None,
    axes: tuple[str, ...],
    positions: Array | None,
    segment_ids: Array | None,
) -> Array:
    """Attention to the gathered keys of all shards."""

    def gather(x: Array, axis: int = 1) -> Array:
        return jax.lax.all_gather(x, axes, axis=axis, tiled=True)

    return attention(
        query,
        gather(key),
        gather(value),
        bias=None if slopes is None else LinearBias(slopes),
        offset=jax.lax.axis_index(axes) * query.shape[1],
        query_positions=positions,
        key_positions=None if positions is None else gather(positions, positions.ndim - 1),
        query_segment_ids=segment_ids,
        key_segment_ids=None if segment_ids is None else gather(segment_ids),
    )


def _attend_to_previous_shard(
    query: Array,
    key: Array,
    value: Array,
    slopes: Array,
    axes: tuple[str, ...],
    segment_ids: Array | None,
) -> Array:
    """Attention to the keys of this and the previous shard; to all keys if others may matter."""
    share = _share_beyond_previous_shard(*jax.lax.stop_gradient((query, key, slopes)), axes)
    # All devices must take the same branch, because the branches contain collectives.
    share = jax.lax.pmax(share, jax.sharding.get_abstract_mesh().axis_names)
    # The first shard has no previous shard: it receives zeros. Their segment id 0 marks padding.
    ids = jnp.ones(query.shape[:2], jnp.int32) if segment_ids is None else segment_ids
    to_next_shard = [(shard, shard + 1) for shard in range(jax.lax.axis_size(axes) - 1)]

    def with_previous(x: Array) -> Array:
        return jnp.concatenate([jax.lax.ppermute(x, axes, to_next_shard), x], axis=1)

    def attend_to_two_shards(query: Array, key: Array, value: Array) -> Array:
        return attention(
            query,
            with_previous(key),
            with_previous(value),
            bias=LinearBias(slopes),
            query_segment_ids=ids,
            key_segment_ids=with_previous(ids),
        )

    def attend_to_all(query: Array, key: Array, value: Array) -> Array:
        return _attend_to_all(query, key, value, slopes, axes, None, segment_ids)

    return jax.lax.cond(share <= NEGLIGIBLE, attend_to_two_shards, attend_to_all, query, key, value)


def _share_beyond_previous_shard(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    slopes: Float[Array, "N"],
    axes: tuple[str, ...],
) -> Float[Array, ""]:
    """An upper bound on the share of any row's weight in keys before the previous shard."""
    batch, length = query.shape[:2]
    # The greatest norm over all shards also bounds the keys before the previous shard.
    norms = norm_bound(key)
    # A maximum may lose a NaN (openxla/xla#21461), but not an infinity.
    norms = jnp.where(jnp.isnan(norms), jnp.inf, norms)
    norms = jax.lax.pmax(norms.max(axis=1, keepdims=True), axes)
    distance = jnp.broadcast_to(length + 1 + jnp.arange(length, dtype=jnp.int32), (batch, length))
    norms = jnp.broadcast_to(norms, key.shape[:3])
    share = omitted_share(query, key, slopes, norms, distance).max()
    # The first two shards have no keys before their previous shard.
    return jnp.where(jax.lax.axis_index(axes) < 2, 0.0, share)
