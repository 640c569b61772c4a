"""xPos: rotary positions whose scores also shrink with the distance."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from alibi_jax.rotations.frequencies import rotary_frequencies
from alibi_jax.rotations.rotary import centred, rotary


def xpos(
    query: Float[Array, "... T N H"],
    key: Float[Array, "... S K H"],
    query_positions: Int[Array, "... T"],
    key_positions: Int[Array, "... S"],
    *,
    base: float = 10000.0,
    gamma: float = 0.4,
    scale_base: float = 512.0,
) -> tuple[Float[Array, "... T N H"], Float[Array, "... S K H"]]:
    """Queries and keys, rotated and scaled: a score decays with how far the key lies behind.

    In the dtypes and layout of `rotary`, computed in float32. Pair k of H/2 shrinks by
    ζ_k^((i−j)/scale_base) in the score of query i with key j, ζ_k = (k/(H/2) + γ) / (1 + γ), so
    the fastest pairs forget first. A key after its query grows by as much, at long ranges past
    float32: the mask has to replace its score, not add to it. The paper scales by ζ^(i−j);
    dividing the exponent by 512 is of the authors' code (torchscale).

    Both count their positions from the middle of the row's range, so where a row lies doesn't
    matter, and must be scaled in one call: a cache holds its keys unrotated. A query carries
    ζ^(n/scale_base), its key ζ^(−n/scale_base), and n reaches half of the range, padding
    included. With the defaults that is 10^±35 for a range of 65 536 positions, as far as float32
    and bfloat16 hold ordinary queries and keys, and 150 or 1/150 for 4096, as far as float16
    does; a larger `scale_base` stretches both alike.

    Raises ValueError for an odd H, or unless `gamma` and `scale_base` are above 0.

    Sun et al. 2022, "A Length-Extrapolatable Transformer", algorithm 1.
    """
    if gamma <= 0 or scale_base <= 0:
        raise ValueError(f"gamma={gamma} and scale_base={scale_base} must both be above 0")
    frequencies = rotary_frequencies(query.shape[-1], base=base)
    shares = np.arange(frequencies.size) / frequencies.size
    # By its logarithm, of float64: the power itself would round a base near 1 many times over.
    decay = jnp.asarray(np.log((shares + gamma) / (1 + gamma)) / scale_base, jnp.float32)

    def turned(
        x: Float[Array, "... L M H"], relative: Int[Array, "... L"], sign: int
    ) -> Float[Array, "... L M H"]:
        scale = jnp.exp(sign * relative.astype(jnp.float32)[..., None, None] * decay)
        whole = rotary(x.astype(jnp.float32), relative, frequencies=frequencies)
        return (whole * jnp.concatenate([scale, scale], axis=-1)).astype(x.dtype)

    queries, keys = centred(query_positions, key_positions)
    return turned(query, queries, 1), turned(key, keys, -1)
