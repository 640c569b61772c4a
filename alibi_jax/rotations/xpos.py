"""xPos: rotary positions with scores that also decay with the distance."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Real

from alibi_jax.rotations.frequencies import frequencies_in_float64
from alibi_jax.rotations.rotary import centre_positions, rotary


def xpos(
    query: Float[Array, "... T N H"],
    key: Float[Array, "... S K H"],
    query_positions: Real[Array, "... T"],
    key_positions: Real[Array, "... S"],
    *,
    base: float = 10000.0,
    gamma: float = 0.4,
    scale_base: float = 512.0,
) -> tuple[Float[Array, "... T N H"], Float[Array, "... S K H"]]:
    """Queries and keys, rotated and scaled so that scores decay with the distance to the key.

    The results have the dtypes and the layout of `rotary`, and are computed in float32. The score
    of query i with key j is a sum over H/2 pairs of features. The term of pair k is multiplied by
    ζ_k^((i−j)/scale_base), where ζ_k = (k/(H/2) + γ) / (1 + γ), so the pairs that rotate fastest
    decay fastest. If the key comes after the query, the factor grows with the distance instead, and
    at long distances the score overflows float32. The mask must therefore replace the scores of
    such keys, not add to them. The paper scales by ζ^(i−j); the authors' code (torchscale) divides
    the exponent by 512.

    Query and key positions are counted from the middle of the row's range, so shifting all
    positions changes nothing. For the same reason a query and the keys that it attends to must
    come from one call: a cache must hold keys before their rotation. At a position n from the
    middle, a query is scaled by ζ^(n/scale_base) and a key by ζ^(−n/scale_base); |n| is at most
    half of the range, padding included. With the defaults the scale is between 10^−35 and 10^35
    for a range of 65 536 positions, the longest for which float32 and bfloat16 hold ordinary
    queries and keys. It is between 1/150 and 150 for a range of 4096, the longest for float16. A
    larger `scale_base` extends both ranges in proportion.

    Raises ValueError for an odd H, or unless `gamma` and `scale_base` are above 0.

    Sun et al. 2022, "A Length-Extrapolatable Transformer", algorithm 1.
    """
    if gamma <= 0 or scale_base <= 0:
        raise ValueError(f"gamma={gamma} and scale_base={scale_base} must both be above 0")
    frequencies = frequencies_in_float64(query.shape[-1], base)
    fractions = np.arange(frequencies.size) / frequencies.size
    # The logarithm in float64: a power of a float32 base near 1 would multiply its rounding error.
    log_decay = jnp.asarray(np.log((fractions + gamma) / (1 + gamma)) / scale_base, jnp.float32)

    def rotate_and_scale(
        x: Float[Array, "... L M H"], positions: Real[Array, "... L"], sign: int
    ) -> Float[Array, "... L M H"]:
        decay = jnp.expand_dims(sign * log_decay, range(positions.ndim + 1))
        exponents = positions.astype(jnp.float32)[..., None, None] * decay
        scale = jnp.exp(jnp.expand_dims(exponents, range(x.ndim - exponents.ndim)))
        rotated = rotary(x.astype(jnp.float32), positions, frequencies=frequencies)
        return (rotated * jnp.concatenate([scale, scale], axis=-1)).astype(x.dtype)

    queries, keys = centre_positions(query_positions, key_positions)
    return rotate_and_scale(query, queries, 1), rotate_and_scale(key, keys, -1)
