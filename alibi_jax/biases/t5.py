"""T5's bias: one learned value for each head and each bucket of relative positions."""

import bisect

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from alibi_jax.biases.distances import positions_by_length, relative_positions
from alibi_jax.position_arrays import as_positions


def t5_buckets(
    relative_position: Int[Array, "..."],
    *,
    bidirectional: bool,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> Int[Array, "..."]:
    """The bucket of each relative position (key position minus query position).

    Int32, in the shape of `relative_position`. If causal, keys after their query share bucket 0
    with distance 0. If bidirectional, keys after their query have the upper half of the buckets.
    In each direction half of the buckets (rounded down) hold one distance each. The others start at
    distances that are evenly spaced on a logarithmic scale up to `max_distance`. The last bucket
    also holds all larger distances.

    Raises ValueError if positions are not integers, if a direction would have fewer than 2
    buckets, if the two directions would have different numbers of buckets, or if `max_distance` is
    not above the number of buckets that hold one distance each in a direction.

    Raffel et al. 2020 (T5), section 2.1, and `_relative_position_bucket` of its code.
    """
    per_direction, remainder = divmod(num_buckets, 2 if bidirectional else 1)
    if per_direction < 2 or remainder:
        requirement = "even and at least 4 if bidirectional" if bidirectional else "at least 2"
        raise ValueError(f"num_buckets={num_buckets} must be {requirement}")
    if max_distance <= per_direction // 2:
        raise ValueError(
            f"max_distance={max_distance} must be above {per_direction // 2}: "
            f"each distance below {per_direction // 2} has a bucket of its own"
        )
    relative = as_positions(relative_position)
    if not jnp.issubdtype(relative.dtype, jnp.integer):
        raise ValueError(
            f"T5 has a bucket for each whole distance, and positions are {relative.dtype}: "
            "give integers"
        )
    distance = jnp.abs(relative) if bidirectional else jnp.maximum(-relative, 0)
    bucket_starts = jnp.array(_bucket_starts(per_direction, max_distance), jnp.int32)
    # There are few boundaries: comparing with all of them is one fused pass, while a binary search
    # would be a loop of gathers.
    buckets = jnp.searchsorted(bucket_starts, distance, side="right", method="compare_all")
    return jnp.where(relative > 0, per_direction + buckets, buckets) if bidirectional else buckets


def _bucket_starts(num_buckets: int, max_distance: int) -> list[int]:
    """The smallest distance in each bucket except bucket 0.

    Let e be the number of buckets with one distance each, E the number of logarithmic buckets and
    M the `max_distance`. T5 puts a distance n ≥ e into bucket e + floor(log(n/e) / log(M/e) · E).
    So bucket e + k starts at the smallest n with n^E · e^k ≥ M^k · e^E. Near such a boundary a
    float32 logarithm may round to either side, depending on the device; integers are exact.
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

    Float32 `[N, T, S]`. T5 shares one table among all layers and has no bias in cross attention.
    Lengths and `offset` are as in `alibi_bias`. Raises the ValueErrors of `alibi_bias` and
    `t5_buckets`.

    Raffel et al. 2020 (T5), section 2.1.
    """
    queries, keys = positions_by_length(query_length, key_length, offset)
    return t5_bias_at(table, queries, keys, bidirectional=bidirectional, max_distance=max_distance)


def t5_bias_at(
    table: Float[Array, "buckets N"],
    query_positions: Int[Array, "... T"],
    key_positions: Int[Array, "... S"],
    *,
    bidirectional: bool = False,
    max_distance: int = 128,
) -> Float[Array, "... N T S"]:
    """T5's learned bias of queries over keys at the given positions.

    Float32 `[..., N, T, S]`; the leading axes of the positions broadcast. Raises the ValueErrors
    of `t5_buckets`.

    Raffel et al. 2020 (T5), section 2.1.
    """
    buckets = t5_buckets(
        relative_positions(query_positions, key_positions),
        bidirectional=bidirectional,
        num_buckets=table.shape[0],
        max_distance=max_distance,
    )
    return jnp.moveaxis(jnp.asarray(table, jnp.float32)[buckets], -1, -3)
