"""Rolling key-value cache: a circular buffer of the last tokens for each group of heads.

A linear bias makes old keys irrelevant, so each head keeps only as many keys as its slope makes
relevant. A bound on the weight of the other keys gives this number. Let q be a query of a head
with slope m, and s the score with its own key, which is at distance 0. Let K be the greatest norm
of the keys at distance d or more. A key k at distance δ ≥ d weighs exp(q·k/sqrt(H) − m·δ), at most
exp(|q|·K/sqrt(H) − m·δ). There is at most one key at each distance, and the sum of e^(−m·δ) over
all δ ≥ d is e^(−m·d)/(1 − e^(−m)). The whole row weighs at least as much as its own key, e^s. Hence
all keys at distance d or more together have a share of the row's weight of at most

    exp(gap − m·d) / (1 − e^(−m)),  gap = |q|·K/sqrt(H) − s.

`reach_length` returns the distance d for an expected gap. `omitted_share` returns the share for
the actual gap. The bias is ALiBi's (Press et al. 2021, section 3).
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from alibi_jax.attention import attention
from alibi_jax.attention.reach import norm_bound
from alibi_jax.biases import LinearBias
from alibi_jax.biases.alibi import Slopes


class CachedTokens(NamedTuple):
    """Keys and values of tokens for some key heads.

    The segment id of padding, and of a slot without a token, is 0.
    """

    key: Float[Array, "B R K H"]
    value: Float[Array, "B R K V"]
    positions: Int[Array, "B R"]
    segment_ids: Int[Array, "B R"]


class HeadGroupCache(NamedTuple):
    """The last R tokens for one group of heads: token t, counted from 0, is in slot t mod R.

    The other fields describe the evicted tokens, those overwritten so far: the greatest norm of
    their keys, and their greatest position, -1 if there are none. `omitted_share` is an
    upper bound of their share of a row's weight: the greatest over all rows so far.
    """

    slots: CachedTokens
    evicted_norm: Float[Array, "B K"]
    evicted_position: Int[Array, "B"]
    omitted_share: Float[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RollingCache:
    """The cache of a layer, in groups of heads, with the key heads of each group."""

    groups: tuple[HeadGroupCache, ...]
    key_heads: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})


def reach_length(slopes: Slopes, gap: float, tolerance: float) -> Int[np.ndarray, "N"]:
    """The number of last keys that each head has to keep, the query's own included, int32.

    It is the least d ≥ 1 with exp(gap − m·d)/(1 − e^(−m)) ≤ `tolerance`, or the greatest int32
    where d is greater. Slopes must be concrete, because shapes depend on the result. Raises
    ValueError for slopes that are not above 0, a gap that is not finite, and a tolerance that is
    not between 0 and 1.
    """
    m = np.asarray(slopes, np.float64)
    if not (m > 0.0).all():
        raise ValueError(f"a slope of {m.min():g} does not bound the reach: slopes must be above 0")
    if not math.isfinite(gap):
        raise ValueError(f"gap={gap} must be finite")
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance={tolerance} must be above 0 and below 1")
    length = np.ceil((gap - math.log(tolerance) - np.log(-np.expm1(-m))) / m)
    return np.clip(length, 1, np.iinfo(np.int32).max).astype(np.int32)


def omitted_share(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    slopes: Slopes,
    evicted_norm: Float[Array, "B T K"],
    distance: Int[Array, "B T"],
) -> Float[Array, "B T N"]:
    """An upper bound on the share of each row's weight in keys at `distance` or more, float32.

    `key` holds each query's own key, `evicted_norm` the greatest norm of the keys at `distance`
    or more. No two of those keys may have the same position. The bound is at most 1 and never 0.
    """
    size, queries_per_key = query.shape[-1], query.shape[2] // key.shape[2]
    # The slack covers rounding: the scores and their bounds are sums of H products.
    slack = 4 * (size + 4) * 2.0**-24
    m = jnp.asarray(slopes, jnp.float32)
    query = query.astype(jnp.float32) * size**-0.5
    key, evicted_norm = (
        jnp.repeat(x.astype(jnp.float32), queries_per_key, axis=2) for x in (key, evicted_norm)
    )
    query_norm, own_norm = norm_bound(query), norm_bound(key)
    max_score, own_score = query_norm * evicted_norm, (query * key).sum(axis=-1)
    bias = m * distance[..., None].astype(jnp.float32)
    log_series = -jnp.log(-jnp.expm1(-m))
    magnitudes = max_score + query_norm * own_norm + bias + jnp.abs(log_series)
    log_share = max_score - own_score - bias + log_series + slack * magnitudes
    # The 1 % covers the rounding of exp and log. A share is at most 1. The lower limit keeps a
    # share that float32 cannot represent from becoming 0.
    return jnp.exp(jnp.clip(log_share + 0.01, -80.0, 0.0))


def init_rolling_cache(
    slopes: Slopes,
    *,
    batch_size: int,
    capacity: int,
    num_kv_heads: int,
    head_size: int,
    dtype: DTypeLike,
    gap: float,
    tolerance: float,
) -> RollingCache:
    """An empty cache for heads with these slopes, with at most `capacity` slots per head.

    The number of slots of a head is its `reach_length`, rounded up to a power of two so that there
    are few groups: heads with the same number of slots form a group. The reach of a key head is
    the greatest reach of its query heads.
    """
    reaches = reach_length(slopes, gap, tolerance).reshape(num_kv_heads, -1).max(axis=1)
    heads_by_slots: dict[int, tuple[int, ...]] = {}
    for head, reach in enumerate(reaches.tolist()):
        num_slots = min(1 << (reach - 1).bit_length(), capacity)
        heads_by_slots[num_slots] = (*heads_by_slots.get(num_slots, ()), head)

    def empty_group(num_slots: int, num_heads: int) -> HeadGroupCache:
        int_zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
        shape = batch_size, num_slots, num_heads, head_size
        slots = CachedTokens(
            key=jnp.zeros(shape, dtype),
            value=jnp.zeros(shape, dtype),
            positions=int_zeros((batch_size, num_slots)),
            segment_ids=int_zeros((batch_size, num_slots)),
        )
        return HeadGroupCache(
            slots,
            evicted_norm=jnp.zeros((batch_size, num_heads), jnp.float32),
            evicted_position=int_zeros(batch_size) - 1,
            omitted_share=jnp.zeros(batch_size, jnp.float32),
        )

    groups = tuple(
        empty_group(num_slots, len(heads)) for num_slots, heads in heads_by_slots.items()
    )
    return RollingCache(groups, tuple(heads_by_slots.values()))


def rolling_cache_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    slopes: Slopes,
    cache: RollingCache,
    *,
    used: int | Int[Array, ""],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T N V"], RollingCache]:
    """Causal attention of the next T tokens with bias -m·|i-j|, and the cache with them added.

    A query sees the last R tokens, its own included, where R is the number of slots of its head.
    The result does not depend on the division into chunks. `used` is the number of earlier
    tokens. The `positions` of a batch row increase, except at padding. Padding has segment id 0:
    it sees nothing and is invisible.
    """
    queries_per_key = query.shape[2] // key.shape[2]
    slopes = jnp.asarray(slopes, jnp.float32)
    if segment_ids is None:
        segment_ids = jnp.ones_like(positions)
    outs, groups, head_order = [], [], []
    for group, key_heads in zip(cache.groups, cache.key_heads):
        key_indices = np.array(key_heads)
        query_indices = (
            key_indices[:, None] * queries_per_key + np.arange(queries_per_key)
        ).ravel()
        new_tokens = CachedTokens(
            key[:, :, key_indices], value[:, :, key_indices], positions, segment_ids
        )
        out, group = _attend(
            query[:, :, query_indices], slopes[query_indices], new_tokens, group, used
        )
        outs.append(out)
        groups.append(group)
        head_order.append(query_indices)
    original_order = np.argsort(np.concatenate(head_order))
    out = jnp.concatenate(outs, axis=2)[:, :, original_order]
    return out, RollingCache(tuple(groups), cache.key_heads)


def _attend(
    query: Float[Array, "B T N H"],
    slopes: Float[Array, "N"],
    new_tokens: CachedTokens,
    group: HeadGroupCache,
    used: int | Int[Array, ""],
) -> tuple[Float[Array, "B T N V"], HeadGroupCache]:
    """`rolling_cache_attention` for the heads of one group."""
    length, num_slots = query.shape[1], group.slots.key.shape[1]

    def oldest_tokens(count: int) -> CachedTokens:
        """The first `count` tokens, in order, of the cached tokens followed by the new ones."""
        slots = (used + np.arange(min(count, num_slots))) % num_slots
        num_new = max(count - num_slots, 0)
        return jax.tree.map(
            lambda cached, new: jnp.concatenate([cached[:, slots], new[:, :num_new]], axis=1),
            group.slots,
            new_tokens,
        )

    # New token t evicts token t of `evicted`. The bound for its query covers all tokens that are
    # evicted by then.
    evicted = oldest_tokens(length)
    norms = jnp.where(evicted.segment_ids[..., None] == 0, 0.0, norm_bound(evicted.key))
    norms = jnp.maximum(jax.lax.cummax(norms, axis=1), group.evicted_norm[:, None])
    position = jnp.where(evicted.segment_ids == 0, -1, evicted.positions)
    position = jnp.maximum(jax.lax.cummax(position, axis=1), group.evicted_position[:, None])
    distance = new_tokens.positions - position
    share = omitted_share(query, new_tokens.key, slopes, norms, distance).max(axis=2)
    share = jnp.where((position < 0) | (new_tokens.segment_ids == 0), 0.0, share).max(axis=1)

    num_written = min(length, num_slots)
    slots = (used + length - num_written + np.arange(num_written)) % num_slots
    written = jax.tree.map(
        lambda cached, new: cached.at[:, slots].set(
            new[:, length - num_written :], unique_indices=True
        ),
        group.slots,
        new_tokens,
    )
    # A single query sees exactly the slots after the write, in any order. Several queries have
    # different ranges of visible keys: they need the cached and the new tokens in order.
    visible = written if length == 1 else oldest_tokens(num_slots + length)
    out = attention(
        query,
        visible.key,
        visible.value,
        bias=LinearBias(slopes),
        causal=length > 1,
        offset=num_slots if length > 1 else None,
        window=num_slots if length > 1 else None,
        query_positions=new_tokens.positions,
        key_positions=visible.positions,
        query_segment_ids=new_tokens.segment_ids,
        key_segment_ids=visible.segment_ids,
    )
    group = HeadGroupCache(
        written,
        evicted_norm=norms[:, -1],
        evicted_position=position[:, -1],
        omitted_share=jnp.maximum(group.omitted_share, share),
    )
    return out, group
