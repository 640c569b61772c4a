"""Position embeddings that are added to the embeddings of the tokens.

All functions are pure, take and return arrays, and work in any JAX model.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Real

from alibi_jax.angles import rotary_angles


def sinusoidal(
    positions: Real[Array, "... T"], width: int, *, layout: str = "interleaved"
) -> Float[Array, "... T {width}"]:
    """Sinusoidal embeddings of any positions; the first position of a text is 0.

    Float32 `[..., T, width]`, within 3e-6 of the formula at positions between −2^31 and 2^31.
    `layout` sets the indices and the frequency f of feature pair k:
    - "interleaved": sin at 2k, cos at 2k+1; f = 10000^(−2k/width). Vaswani et al. 2017,
      section 3.5.
    - "halves": sin at k, cos at k + width/2; f = 10000^(−k/(width/2−1)). The code of
      tensor2tensor and fairseq (in fairseq the first position is `padding_idx` + 1, not 0).

    Raises ValueError unless `width` is even and positive, or for an unknown layout.
    """
    if width < 2 or width % 2:
        raise ValueError(
            f"width={width} must be even and positive: sines and cosines come in pairs"
        )
    half = width // 2
    match layout:
        case "interleaved":
            exponent_divisor, axis = half, -1
        case "halves":
            # Width 2 has only the frequency 1, whatever the divisor, which must not be 0.
            exponent_divisor, axis = max(half - 1, 1), -2
        case _:
            raise ValueError(f"layout={layout!r} must be 'interleaved' or 'halves'")
    angles = rotary_angles(positions, 10000.0 ** (-np.arange(half) / exponent_divisor))
    sinusoids = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=axis)
    return sinusoids.reshape(*angles.shape[:-1], width)
