"""T5's bias: learned by head and by bucket of the relative position."""

import bisect

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from alibi_jax.biases._positions import positions_by_length, relative_positions


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
    """T5's learned bias of queries and keys at the positions given.

    Float32 `[..., N, T, S]`; the leading axes of the positions broadcast. Raises ValueError as
    `t5_buckets`.

    Raffel et al. 2020 (T5), section 2.1.
    """
    buckets = t5_buckets(
        relative_positions(query_positions, key_positions),
        bidirectional=bidirectional,
        num_buckets=table.shape[0],
        max_distance=max_distance,
    )
    return jnp.moveaxis(jnp.asarray(table, jnp.float32)[buckets], -1, -3)
