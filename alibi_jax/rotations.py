"""Rotary positions: queries and keys turned by angles that grow with their positions.

Pure functions, arrays in and arrays out, for a model of any make. Rotate queries and keys
alike, not values.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int


def rotary_angles(
    positions: Int[Array, "... T"], size: int, *, base: float
) -> Float[Array, "... T {size}//2"]:
    """The angle of each pair of features at each position: position · base^(−2k/size).

    Float32 `[..., T, size/2]`, in radians, whatever the model computes in: bfloat16 holds no
    odd integer above 256. Raises ValueError unless `size` is even and positive.

    Su et al. 2021 (RoFormer), equation 15.
    """
    if size < 2 or size % 2:
        raise ValueError(f"rotary size {size} must be even and positive: it is rotated in pairs")
    frequencies = jnp.asarray(base ** (-np.arange(0, size, 2) / size), jnp.float32)
    return jnp.asarray(positions, jnp.float32)[..., None] * frequencies


def rotary(
    x: Float[Array, "... T N H"],
    positions: Int[Array, "... T"],
    *,
    base: float = 10000.0,
    rotary_size: int | None = None,
) -> Float[Array, "... T N H"]:
    """Queries or keys, each pair of features rotated by its position's angle.

    `[..., T, N, H]` in the dtype of `x`, computed in float32; the leading axes broadcast, so
    positions are `[T]` or `[B, T]`. The layout is half-split, as in GPT-NeoX and Llama: feature k
    pairs with k + R/2 (RoFormer's own pairs 2k with 2k+1). R is `rotary_size`, by default H; with
    R < H the first R features are rotated, by angles with R in their exponents, and the others
    returned as they are. Raises ValueError unless R is even, positive and at most H.

    Su et al. 2021 (RoFormer), equation 34; for R < H, Black et al. 2022 (GPT-NeoX-20B),
    section 2.1.1.
    """
    head_size = x.shape[-1]
    size = head_size if rotary_size is None else rotary_size
    if size > head_size:
        raise ValueError(f"rotary_size={size} is more than the {head_size} features of a head")
    angles = rotary_angles(positions, size, base=base)[..., None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    pairs, rest = x[..., :size].astype(jnp.float32), x[..., size:]
    first, second = jnp.split(pairs, 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1)
