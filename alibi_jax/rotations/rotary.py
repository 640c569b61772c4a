"""Rotary positions: queries and keys are rotated by angles proportional to their positions."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Real

from alibi_jax.angles import rotary_angles
from alibi_jax.position_arrays import as_positions
from alibi_jax.rotations.frequencies import rotary_frequencies


def rotary(
    x: Float[Array, "... T N H"],
    positions: Real[Array, "... T"],
    *,
    frequencies: Float[Array | np.ndarray, "F"] | None = None,
) -> Float[Array, "... T N H"]:
    """Queries or keys with each pair of features rotated by the angle of its position.

    `[..., T, N, H]` in the dtype of `x`, computed in float32; the leading axes broadcast, so
    positions are `[T]` or `[B, T]`. `frequencies`, in radians per position, default to
    `rotary_frequencies(H)`. The angles are exact at any position (`rotary_angles`). The layout is
    half-split, as in GPT-NeoX and Llama: with F frequencies, frequency k rotates features k and k +
    F (RoFormer pairs features 2k and 2k+1). Frequencies for fewer features,
    `rotary_frequencies(R)`, rotate the first R features and leave the others unchanged. Raises
    ValueError for more than H/2 frequencies, or for an odd H without `frequencies`.

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
    angles = jnp.expand_dims(angles, range(x.ndim - angles.ndim))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    paired, unpaired = x[..., :size].astype(jnp.float32), x[..., size:]
    first, second = jnp.split(paired, 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), unpaired], axis=-1)


def centre_positions(
    query_positions: Real[Array, "... T"], key_positions: Real[Array, "... S"]
) -> tuple[Real[Array, "... T"], Real[Array, "... S"]]:
    """Query and key positions, counted from the middle of the range that they span together.

    Int32, or floating point if one of them is; each row has its own middle, and the leading axes
    broadcast. There may be no queries or no keys. Methods that depend on differences of positions
    only give exactly the same results after a shift of all positions.
    """
    queries, keys = as_positions(query_positions), as_positions(key_positions)
    dtype = jnp.promote_types(queries.dtype, keys.dtype)
    whole = jnp.issubdtype(dtype, jnp.integer)
    queries, keys = queries.astype(dtype), keys.astype(dtype)
    limits = jnp.iinfo(dtype) if whole else jnp.finfo(dtype)
    least, most = limits.min, limits.max
    first = jnp.minimum(*(x.min(-1, keepdims=True, initial=most) for x in (queries, keys)))
    last = jnp.maximum(*(x.max(-1, keepdims=True, initial=least) for x in (queries, keys)))
    # The mean of two int32, rounded up so that both differences fit, without the sum of the two,
    # which can overflow.
    middle = (first | last) - ((first ^ last) >> 1) if whole else first / 2 + last / 2
    return queries - middle, keys - middle
