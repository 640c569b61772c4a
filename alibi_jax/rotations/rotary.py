"""Rotary positions: queries and keys turned by angles that grow with their positions."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from alibi_jax.rotations.frequencies import rotary_frequencies


def rotary_angles(
    positions: Int[Array, "... T"], frequencies: Float[Array, "F"]
) -> Float[Array, "... T F"]:
    """The angle of each pair of features at each position: position · frequency.

    Float32 `[..., T, F]`, in radians, whatever the model computes in: bfloat16 holds no odd
    integer above 256.

    Su et al. 2021 (RoFormer), equation 15.
    """
    return jnp.asarray(positions, jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)


def rotary(
    x: Float[Array, "... T N H"],
    positions: Int[Array, "... T"],
    *,
    frequencies: Float[Array, "F"] | None = None,
) -> Float[Array, "... T N H"]:
    """Queries or keys, each pair of features rotated by its position's angle.

    `[..., T, N, H]` in the dtype of `x`, computed in float32; the leading axes broadcast, so
    positions are `[T]` or `[B, T]`. `frequencies`, in radians a position, are by default
    `rotary_frequencies(H)`. The layout is half-split, as in GPT-NeoX and Llama: of F frequencies,
    number k turns features k and k + F (RoFormer's own pairs are 2k and 2k+1). Those of a smaller
    size, `rotary_frequencies(R)`, turn the first R features, and the others are returned as they
    are. Raises ValueError for more than H/2 frequencies, or for an odd H without any.

    Su et al. 2021 (RoFormer), equation 34; for R < H, Black et al. 2022 (GPT-NeoX-20B),
    section 2.1.1.
    """
    if frequencies is None:
        frequencies = rotary_frequencies(x.shape[-1])
    size = 2 * frequencies.size
    if size > x.shape[-1]:
        raise ValueError(
            f"{frequencies.size} frequencies turn {size} features, "
            f"more than the {x.shape[-1]} of a head"
        )
    angles = rotary_angles(positions, frequencies)[..., None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    pairs, rest = x[..., :size].astype(jnp.float32), x[..., size:]
    first, second = jnp.split(pairs, 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1)


def centred(
    query_positions: Int[Array, "... T"], key_positions: Int[Array, "... S"]
) -> tuple[Int[Array, "... T"], Int[Array, "... S"]]:
    """Both kinds of positions, counted from the middle of the range that they span together.

    Int32; each row has a middle of its own, and the leading axes broadcast. Where differences
    alone matter, it keeps far positions as exact as near ones: float32 is 0.004 radians off at
    an angle of 100 000.
    """
    queries = jnp.asarray(query_positions, jnp.int32)
    keys = jnp.asarray(key_positions, jnp.int32)
    first = jnp.minimum(queries.min(-1, keepdims=True), keys.min(-1, keepdims=True))
    last = jnp.maximum(queries.max(-1, keepdims=True), keys.max(-1, keepdims=True))
    # Half of the span, not of the sum: that would overflow, and round by where the range lies.
    middle = first + (last - first) // 2
    return queries - middle, keys - middle
