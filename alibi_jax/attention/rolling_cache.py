"""Rings: of each head the last keys alone, as many as a linear bias lets matter.

With slope m, let q be a query, s the score with its own key, at distance 0, and K the greatest
norm of the keys that stand at distance d or more before it. A key at distance δ weighs
exp(q·k/sqrt(H) − m·δ), at most exp(|q|·K/sqrt(H) − m·δ); no two stand at one distance, and the
sum of e^(−m·δ) over all δ from d on is e^(−m·d)/(1 − e^(−m)). The row as a whole weighs no less
than its own key, e^s. Keys at d and beyond have together a share of at most

    exp(gap − m·d) / (1 − e^(−m)),  gap = |q|·K/sqrt(H) − s,

however many they are. `reach_length` is the d for a gap that one expects, and `omitted_share` the
share for the gap that there is. The bias is ALiBi's (Press et al. 2021, section 3).
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
from alibi_jax.attention.reach import norm
from alibi_jax.biases import LinearBias
from alibi_jax.biases.alibi import Slopes


class CachedTokens(NamedTuple):
    """Tokens as some key heads have them. A segment id is 0 for padding and for an empty slot."""

    key: Float[Array, "B R K H"]
    value: Float[Array, "B R K V"]
    positions: Int[Array, "B R"]
    segment_ids: Int[Array, "B R"]


class HeadGroupCache(NamedTuple):
    """The last R tokens, token t, from 0 on, in slot t mod R; and what is known of those lost.

    Of the tokens that were overwritten: the greatest norm of their keys, and the last position,
    -1 without any. `omitted_share` is the greatest share of a row's weight that they can have
    had, of all rows so far.
    """

    slots: CachedTokens
    evicted_norm: Float[Array, "B K"]
    evicted_position: Int[Array, "B"]
    omitted_share: Float[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RollingCache:
    """The rings of a layer, and the key heads that each is for."""

    groups: tuple[HeadGroupCache, ...]
    heads: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})


def reach_length(slopes: Slopes, gap: float, tolerance: float) -> Int[np.ndarray, "N"]:
    """How many keys a head has to hold, its query's own among them, for so small a loss.

    Int32 `[N]`: the least d ≥ 1 with exp(gap − m·d)/(1 − e^(−m)) ≤ `tolerance`, or the greatest
    int32 where it is beyond. Numbers, not traced: they decide on shapes. Raises ValueError for
    slopes that bound nothing, a gap that is not finite, and a tolerance not between 0 and 1.
    """
    m = np.asarray(slopes, np.float64)
    if not (m > 0.0).all():
        raise ValueError(f"a slope of {m.min():g} bounds no reach: slopes must be above 0")
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
    """No less than the share of each row's weight in keys at `distance` or farther back, float32.

    `key` is each query's own, and `evicted_norm` the greatest norm of those keys; no two of them
    stand at one position. At most 1, and never 0.
    """
    size, groups = query.shape[-1], query.shape[2] // key.shape[2]
    # For rounding: the scores and these bounds of them are sums of H products.
    slack = 4 * (size + 4) * 2.0**-24
    m = jnp.asarray(slopes, jnp.float32)
    query = query.astype(jnp.float32) * size**-0.5
    key, evicted_norm = (
        jnp.repeat(x.astype(jnp.float32), groups, axis=2) for x in (key, evicted_norm)
    )
    query_norm, own_norm = norm(query), norm(key)
    most, own = query_norm * evicted_norm, (query * key).sum(axis=-1)
    bias = m * distance[..., None].astype(jnp.float32)
    count = -jnp.log(-jnp.expm1(-m))
    share = (
        most - own - bias + count + slack * (most + query_norm * own_norm + bias + jnp.abs(count))
    )
    # 1 % is room for the functions' own rounding. A share is at most 1; and what float32 has no
    # number for is not 0.
    return jnp.exp(jnp.clip(share + 0.01, -80.0, 0.0))


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
    """Rings for heads with these slopes, none longer than `capacity`.

    A ring is as long as the reach of its heads, rounded up to a power of two, so that there are
    but few: heads of one length share it. A key head has the greatest reach of its query heads.
    """
    reaches = reach_length(slopes, gap, tolerance).reshape(num_kv_heads, -1).max(axis=1)
    heads: dict[int, tuple[int, ...]] = {}
    for head, reach in enumerate(reaches.tolist()):
        length = min(1 << (reach - 1).bit_length(), capacity)
        heads[length] = (*heads.get(length, ()), head)

    def empty(length: int, count: int) -> HeadGroupCache:
        rows = functools.partial(jnp.zeros, dtype=jnp.int32)
        shape = batch_size, length, count, head_size
        slots = CachedTokens(
            jnp.zeros(shape, dtype),
            jnp.zeros(shape, dtype),
            rows((batch_size, length)),
            rows((batch_size, length)),
        )
        return HeadGroupCache(
            slots, jnp.zeros((batch_size, count)), rows(batch_size) - 1, jnp.zeros(batch_size)
        )

    rings = tuple(empty(length, len(group)) for length, group in heads.items())
    return RollingCache(rings, tuple(heads.values()))


def rolling_cache_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    slopes: Slopes,
    rings: RollingCache,
    *,
    used: int | Int[Array, ""],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T N V"], RollingCache]:
    """Causal attention with -m·|i-j| of the next T tokens, and the rings with them in it.

    A query sees as many of the last tokens as its head's ring has slots, its own among them,
    whatever chunks they come in. `used` tokens came before; `positions` of a row increase, but
    for its padding, whose segment id is 0: it sees nothing and is not seen.
    """
    groups = query.shape[2] // key.shape[2]
    slopes = jnp.asarray(slopes, jnp.float32)
    if segment_ids is None:
        segment_ids = jnp.ones_like(positions)
    outs, kept, order = [], [], []
    for ring, heads in zip(rings.groups, rings.heads):
        key_heads = np.array(heads)
        served = (key_heads[:, None] * groups + np.arange(groups)).ravel()
        new = CachedTokens(key[:, :, key_heads], value[:, :, key_heads], positions, segment_ids)
        out, ring = _attend(query[:, :, served], slopes[served], new, ring, used)
        outs.append(out)
        kept.append(ring)
        order.append(served)
    back = np.argsort(np.concatenate(order))
    return jnp.concatenate(outs, axis=2)[:, :, back], RollingCache(tuple(kept), rings.heads)


def _attend(
    query: Float[Array, "B T N H"],
    slopes: Float[Array, "N"],
    new: CachedTokens,
    ring: HeadGroupCache,
    used: int | Int[Array, ""],
) -> tuple[Float[Array, "B T N V"], HeadGroupCache]:
    """`rolling_cache_attention` of the heads of one ring."""
    length, size = query.shape[1], ring.slots.key.shape[1]

    def oldest(count: int) -> CachedTokens:
        """The first so many of the ring's tokens and the new ones, in their order."""
        slots = (used + np.arange(min(count, size))) % size
        return jax.tree.map(
            lambda old, x: jnp.concatenate([old[:, slots], x[:, : max(count - size, 0)]], axis=1),
            ring.slots,
            new,
        )

    # New token t pushes out the t-th of them.
    lost = oldest(length)
    norms = jnp.where(lost.segment_ids[..., None] == 0, 0.0, norm(lost.key))
    norms = jnp.maximum(jax.lax.cummax(norms, axis=1), ring.evicted_norm[:, None])
    position = jnp.where(lost.segment_ids == 0, -1, lost.positions)
    position = jnp.maximum(jax.lax.cummax(position, axis=1), ring.evicted_position[:, None])
    share = omitted_share(query, new.key, slopes, norms, new.positions - position).max(axis=2)
    share = jnp.where((position < 0) | (new.segment_ids == 0), 0.0, share).max(axis=1)

    last = min(length, size)
    slots = (used + length - last + np.arange(last)) % size
    written = jax.tree.map(
        lambda old, x: old.at[:, slots].set(x[:, length - last :], unique_indices=True),
        ring.slots,
        new,
    )
    # A lone query sees the ring as it will be, where it lies; of more, each has its own last keys.
    seen = written if length == 1 else oldest(size + length)
    out = attention(
        query,
        seen.key,
        seen.value,
        bias=LinearBias(slopes),
        causal=length > 1,
        offset=size if length > 1 else None,
        window=size if length > 1 else None,
        query_positions=new.positions,
        key_positions=seen.positions,
        query_segment_ids=new.segment_ids,
        key_segment_ids=seen.segment_ids,
    )
    ring = HeadGroupCache(
        written, norms[:, -1], position[:, -1], jnp.maximum(ring.omitted_share, share)
    )
    return out, ring
