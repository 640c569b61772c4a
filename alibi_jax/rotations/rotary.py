"""Rotary positions: queries and keys are rotated by angles proportional to their positions."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from alibi_jax.rotations.frequencies import rotary_frequencies


def rotary_angles(
    positions: Int[Array, "... T"], frequencies: Float[Array, "F"]
) -> Float[Array, "... T F"]:
    """The angle of each pair of features at each position: position · frequency.

    Float32 `[..., T, F]`, in radians, whatever the model's dtype: bfloat16 can't represent odd
    integers above 256.

    Su et al. 2021 (RoFormer), equation 15.
    """
    return jnp.asarray(positions, jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)


def rotary(
    x: Float[Array, "... T N H"],
    positions: Int[Array, "... T"],
    *,
    frequencies: Float[Array, "F"] | None = None,
) -> Float[Array, "... T N H"]:
    """Queries or keys with each pair of features rotated by the angle of its position.

    `[..., T, N, H]` in the dtype of `x`, computed in float32; the leading axes broadcast, so
    positions are `[T]` or `[B, T]`. `frequencies`, in radians per position, default to
    `rotary_frequencies(H)`. The layout is half-split, as in GPT-NeoX and Llama: with F
    frequencies, frequency k rotates features k and k + F (RoFormer pairs features 2k and 2k+1).
    Frequencies for fewer features, `rotary_frequencies(R)`, rotate the first R features and leave
    the others unchanged. Raises ValueError for more than H/2 frequencies, or for an odd H without
    `frequencies`.

    Su et al. 2021 (RoFormer), equation 34; for R < H, Black et al. 2022 (GPT-NeoX-20B),
    section 2.1.1.
    """
    if frequencies is None:
        frequencies = rotary_frequencies(x.shape[-1])
    size = 2 * frequencies.size
    if size > x.shape[-1]:
        raise ValueError(
            f"{frequencies.size} frequencies rotate {size} features, "
            f"more than the {x.shape[-1]} of a head"
        )
    angles = rotary_angles(positions, frequencies)[..., None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    paired, unpaired = x[..., :size].astype(jnp.float32), x[..., size:]
    first, second = jnp.split(paired, 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), unpaired], axis=-1)


def centre_positions(
    query_positions: Int[Array, "... T"], key_positions: Int[Array, "... S"]
) -> tuple[Int[Array, "... T"], Int[Array, "... S"]]:
    """Query and key positions, counted from the middle of the range that they span together.

    Int32; each row has its own middle, and the leading axes broadcast. For methods that depend on
    differences of positions only, this makes large positions as exact as small ones: a float32
    angle of 100 000 radians is off by 0.004.
    """
    queries = jnp.asarray(query_positions, jnp.int32)
    keys = jnp.asarray(key_positions, jnp.int32)
    first = jnp.minimum(queries.min(-1, keepdims=True), keys.min(-1, keepdims=True))
    last = jnp.maximum(queries.max(-1, keepdims=True), keys.max(-1, keepdims=True))
    # Halve the span, not the sum of the ends: the sum of two large positions would overflow int32.
    middle = first + (last - first) // 2
    return queries - middle, keys - middle
