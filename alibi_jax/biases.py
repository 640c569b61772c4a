"""Biases that are added to attention scores: ALiBi and T5's relative buckets.

Pure functions, arrays in and arrays out, for a model of any make. A bias is added after the
scores are divided by sqrt(H) and before the mask. Each comes in two forms: by length, for one
run of queries and keys, and `_at` positions given as arrays, for packed, padded, cached or
sharded ones. Where heads are sharded, slice the global slopes: a shard's own number of heads
gives other slopes.
"""

import bisect
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

Slopes = Float[Array, "N"] | Float[np.ndarray, "N"] | Sequence[float]


def alibi_slopes(num_heads: int) -> Float[Array, "N"]:
    """The slope of each head, in the order of the paper's code.

    Float32 `[N]`. For a power of two, head h of N (from 1) has 2^(−8h/N); other counts continue
    the slopes of the power of two below with every other slope of the power of two above, so
    they are not sorted. Raises ValueError for fewer than one head.

    Press et al. 2021, "Train Short, Test Long", section 3 and `get_slopes` of its code.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads={num_heads} must be at least 1")
    power = 1 << (num_heads.bit_length() - 1)
    slopes = _geometric(power) + _geometric(2 * power)[0::2][: num_heads - power]
    return jnp.array(slopes, jnp.float32)


def _geometric(num_heads: int) -> list[float]:
    return [2.0 ** (-8.0 * head / num_heads) for head in range(1, num_heads + 1)]


def alibi_bias(
    num_heads_or_slopes: int | np.integer | Slopes,
    query_length: int,
    key_length: int | None = None,
    *,
    offset: int | Int[Array, ""] | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "N T S"]:
    """ALiBi's bias, −m·|i−j|, of T queries over S keys.

    `[N, T, S]`, computed in float32 and cast to `dtype` last. `key_length` is `query_length`
    unless given. Keys stand at 0 … S−1 and query t at `offset` + t, by default S−T: the queries
    are the last of the keys. `offset` may be traced. Raises ValueError for more queries than
    keys without an offset.

    Press et al. 2021, "Train Short, Test Long", section 3. The absolute value makes it right in
    both directions; masking is left to the attention.
    """
    slopes = (
        alibi_slopes(int(num_heads_or_slopes))
        if isinstance(num_heads_or_slopes, int | np.integer)
        else num_heads_or_slopes
    )
    queries, keys = _positions(query_length, key_length, offset)
    return alibi_bias_at(slopes, queries, keys, dtype=dtype)


def alibi_bias_at(
    slopes: Slopes,
    query_positions: Int[Array, "... T"],
    key_positions: Int[Array, "... S"],
    *,
    future_slopes: Slopes | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "... N T S"]:
    """ALiBi's bias, −m·|i−j|, of queries at positions i over keys at positions j.

    `[..., N, T, S]`, computed in float32 and cast to `dtype` last; the leading axes of the
    positions broadcast. Keys after their query use `future_slopes`, `[N]`, where given, so that
    an encoder can tell the two directions apart. Raises ValueError unless there is one for each
    slope.

    Press et al. 2021, "Train Short, Test Long", section 3; for encoders
    ofirpress/attention_with_linear_biases#5.
    """
    relative = _relative(query_positions, key_positions)[..., None, :, :]
    past = jnp.asarray(slopes, jnp.float32)
    slope = past[:, None, None]
    if future_slopes is not None:
        future = jnp.asarray(future_slopes, jnp.float32)
        if future.shape != past.shape:
            raise ValueError(f"{future.size} future slopes for {past.size} slopes: one a head each")
        slope = jnp.where(relative > 0, future[:, None, None], slope)
    # Negated as an integer: a key at its query's own position gets 0, not -0.
    return (slope * (-jnp.abs(relative)).astype(jnp.float32)).astype(dtype)


def t5_buckets(
    relative_position: Int[Array, "..."],
    *,
    bidirectional: bool,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> Int[Array, "..."]:
    """The bucket of each relative position, key minus query.

    Int32, in the shape given. Half of the buckets hold one distance each, the others grow
    logarithmically until `max_distance`, and the last takes all beyond. Causal: keys after their
    query share bucket 0 with distance 0. Bidirectional: they have the upper half of the buckets
    to themselves. Raises ValueError for buckets that can't be halved so, or a `max_distance`
    within the buckets of one distance.

    Raffel et al. 2020 (T5), section 2.1, and `_relative_position_bucket` of its code.
    """
    per_side, left_over = divmod(num_buckets, 2 if bidirectional else 1)
    if per_side < 2 or left_over:
        wanted = "even and at least 4 if bidirectional" if bidirectional else "at least 2"
        raise ValueError(f"num_buckets={num_buckets} must be {wanted}")
    if max_distance <= per_side // 2:
        raise ValueError(
            f"max_distance={max_distance} must be above {per_side // 2}: "
            "each distance below has a bucket of its own"
        )
    relative = jnp.asarray(relative_position, jnp.int32)
    distance = jnp.abs(relative) if bidirectional else jnp.maximum(-relative, 0)
    starts = jnp.array(_bucket_starts(per_side, max_distance), jnp.int32)
    # Few boundaries: comparing with all is one fused pass, where a search is a loop of gathers.
    buckets = jnp.searchsorted(starts, distance, side="right", method="compare_all")
    return jnp.where(relative > 0, per_side + buckets, buckets) if bidirectional else buckets


def _bucket_starts(num_buckets: int, max_distance: int) -> list[int]:
    """The least distance of each bucket but bucket 0.

    T5's bucket e + floor(log(n/e) / log(M/e) · E), e buckets of one distance and E of logarithms,
    reaches e + k where n^E · e^k ≥ M^k · e^E. A float32 logarithm can fall on either side
    of such a boundary, depending on the device; integers can't.
    """
    exact = num_buckets // 2
    logarithmic = num_buckets - exact
    return list(range(1, exact + 1)) + [
        bisect.bisect_left(
            range(max_distance),
            max_distance**k * exact**logarithmic,
            key=lambda n: n**logarithmic * exact**k,
        )
        for k in range(1, logarithmic)
    ]


def t5_bias(
    table: Float[Array, "buckets N"],
    query_length: int,
    key_length: int | None = None,
    *,
    offset: int | Int[Array, ""] | None = None,
    bidirectional: bool = False,
    max_distance: int = 128,
) -> Float[Array, "N T S"]:
    """T5's learned bias of T queries over S keys.

    Float32 `[N, T, S]`; T5 shares one table among all layers and uses none in cross attention.
    Lengths and `offset` as in `alibi_bias`. Raises ValueError as `alibi_bias` and `t5_buckets`.

    Raffel et al. 2020 (T5), section 2.1.
    """
    queries, keys = _positions(query_length, key_length, offset)
    return t5_bias_at(table, queries, keys, bidirectional=bidirectional, max_distance=max_distance)


def t5_bias_at(
    table: Float[Array, "buckets N"],
    query_positions: Int[Array, "... T"],
    key_positions: Int[Array, "... S"],
    *,
    bidirectional: bool = False,
    max_distance: int = 128,
) -> Float[Array, "... N T S"]:
    """T5's learned bias of queries and keys at the positions given.

    Float32 `[..., N, T, S]`; the leading axes of the positions broadcast. Raises ValueError as
    `t5_buckets`.

    Raffel et al. 2020 (T5), section 2.1.
    """
    buckets = t5_buckets(
        _relative(query_positions, key_positions),
        bidirectional=bidirectional,
        num_buckets=table.shape[0],
        max_distance=max_distance,
    )
    return jnp.moveaxis(jnp.asarray(table, jnp.float32)[buckets], -1, -3)


def _positions(
    query_length: int, key_length: int | None, offset: int | Int[Array, ""] | None
) -> tuple[Int[Array, "T"], Int[Array, "S"]]:
    if key_length is None:
        key_length = query_length
    if offset is None:
        offset = key_length - query_length
        if offset < 0:
            raise ValueError(
                f"{query_length} queries can't be the last of {key_length} keys: "
                "give the offset of the first query"
            )
    queries = offset + jnp.arange(query_length, dtype=jnp.int32)
    return queries, jnp.arange(key_length, dtype=jnp.int32)


def _relative(
    query_positions: Int[Array, "... T"], key_positions: Int[Array, "... S"]
) -> Int[Array, "... T S"]:
    # Integers: float32 and still more bfloat16 would merge far positions before the difference.
    queries = jnp.asarray(query_positions, jnp.int32)
    keys = jnp.asarray(key_positions, jnp.int32)
    return keys[..., None, :] - queries[..., :, None]
