"""Causal attention whose sequence is split over devices: each has a part of queries and keys.

To be called by each of them, in `jax.shard_map`. Queries stay; keys come to them, all of them or,
where a linear bias lets no others matter, those of the neighbour before alone. Distances are those
in the whole sequence.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from alibi_jax.attention import attention
from alibi_jax.attention.reach import NEGLIGIBLE, norm
from alibi_jax.attention.rolling_cache import omitted_share, reach_length
from alibi_jax.biases import LinearBias
from alibi_jax.biases.alibi import Slopes

# How much wider than the score with its own key a query's scores are taken to spread, where it is
# guessed which heads' reach ends with the neighbour's keys. Whether it does is proved each time.
_GAP = 16.0


def near_heads(slopes: Slopes, num_kv_heads: int, length: int) -> tuple[int, ...]:
    """The key heads all of whose query heads, as far as one expects, see no farther than `length`.

    The slopes must be numbers, not traced.
    """
    reaches = reach_length(slopes, _GAP, NEGLIGIBLE).reshape(num_kv_heads, -1).max(axis=1)
    return tuple(head for head, reach in enumerate(reaches.tolist()) if reach <= length)


def context_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    slopes: Slopes | None = None,
    *,
    axes: tuple[str, ...],
    near: tuple[int, ...] = (),
    positions: Int[Array, "*#B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N V"]:
    """Attention of a part's queries to the whole sequence, which is split over the mesh's `axes`.

    Part i has tokens i·T to (i+1)·T − 1, whose `positions` (default: indices) and `segment_ids`
    are given. `slopes` are those of a linear bias, if there is one.

    The key heads in `near` fetch no more than the neighbour's keys, unless in any part, on any
    device of the mesh, all others can have more than a share of `NEGLIGIBLE` of a row's weight.
    For them positions are indices, and heads are split over no device.
    """
    if slopes is None:
        return _far(query, key, value, None, axes, positions, segment_ids)
    slopes = jnp.asarray(slopes)
    if not near:
        return _far(query, key, value, slopes, axes, positions, segment_ids)
    far = sorted(set(range(key.shape[2])) - set(near))
    outs, order = [], []
    for heads in filter(len, (near, far)):
        kv_heads, groups = np.array(heads), query.shape[2] // key.shape[2]
        served = (kv_heads[:, None] * groups + np.arange(groups)).ravel()
        parts = query[:, :, served], key[:, :, kv_heads], value[:, :, kv_heads], slopes[served]
        if heads is near:
            outs.append(_near(*parts, axes, segment_ids))
        else:
            outs.append(_far(*parts, axes, positions, segment_ids))
        order.append(served)
    return jnp.concatenate(outs, axis=2)[:, :, np.argsort(np.concatenate(order))]


def _far(
    query: Array,
    key: Array,
    value: Array,
    slopes: Array | None,
    axes: tuple[str, ...],
    positions: Array | None,
    segment_ids: Array | None,
) -> Array:
    """With the keys of all parts."""

    def whole(x: Array, axis: int = 1) -> Array:
        return jax.lax.all_gather(x, axes, axis=axis, tiled=True)

    return attention(
        query,
        whole(key),
        whole(value),
        bias=None if slopes is None else LinearBias(slopes),
        offset=jax.lax.axis_index(axes) * query.shape[1],
        query_positions=positions,
        key_positions=None if positions is None else whole(positions, positions.ndim - 1),
        query_segment_ids=segment_ids,
        key_segment_ids=None if segment_ids is None else whole(segment_ids),
    )


def _near(
    query: Array,
    key: Array,
    value: Array,
    slopes: Array,
    axes: tuple[str, ...],
    segment_ids: Array | None,
) -> Array:
    """With the keys of the neighbour before, where it is proved that no others matter."""
    share = _beyond_neighbour(*jax.lax.stop_gradient((query, key, slopes)), axes)
    # All devices go one way, for they meet in what it has of collectives.
    share = jax.lax.pmax(share, jax.sharding.get_abstract_mesh().axis_names)
    # The first part's neighbour is nobody: its keys, which are zeros, are padding.
    ids = jnp.ones(query.shape[:2], jnp.int32) if segment_ids is None else segment_ids
    to_next = [(part, part + 1) for part in range(jax.lax.axis_size(axes) - 1)]

    def both(x: Array) -> Array:
        return jnp.concatenate([jax.lax.ppermute(x, axes, to_next), x], axis=1)

    def with_neighbour(query: Array, key: Array, value: Array) -> Array:
        return attention(
            query,
            both(key),
            both(value),
            bias=LinearBias(slopes),
            query_segment_ids=ids,
            key_segment_ids=both(ids),
        )

    def with_all(query: Array, key: Array, value: Array) -> Array:
        return _far(query, key, value, slopes, axes, None, segment_ids)

    return jax.lax.cond(share <= NEGLIGIBLE, with_neighbour, with_all, query, key, value)


def _beyond_neighbour(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    slopes: Float[Array, "N"],
    axes: tuple[str, ...],
) -> Float[Array, ""]:
    """No less than the share of any row's weight in keys farther back than the neighbour's."""
    batch, length = query.shape[:2]
    # Of all parts: those beyond are among them.
    longest = jax.lax.pmax(norm(key).max(axis=1, keepdims=True), axes)
    distance = jnp.broadcast_to(length + 1 + jnp.arange(length, dtype=jnp.int32), (batch, length))
    longest = jnp.broadcast_to(longest, key.shape[:3])
    share = omitted_share(query, key, slopes, longest, distance).max()
    # The first two parts have no keys beyond.
    return jnp.where(jax.lax.axis_index(axes) < 2, 0.0, share)
