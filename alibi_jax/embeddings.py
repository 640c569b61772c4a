"""Position embeddings that are added to the embeddings of the tokens.

Pure functions, arrays in and arrays out, for a model of any make.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int


def sinusoidal(
    positions: Int[Array, "... T"], width: int, *, layout: str = "interleaved"
) -> Float[Array, "... T {width}"]:
    """Sines and cosines of each position, computed for any position; the first is 0.

    Float32 `[..., T, width]`. `layout` says where feature pair k, of frequency f, stands:
    - "interleaved": sin at 2k, cos at 2k+1; f = 10000^(−2k/width). Vaswani et al. 2017,
      section 3.5.
    - "halves": sin at k, cos at k + width/2; f = 10000^(−k/(width/2−1)). The code of
      tensor2tensor and fairseq (whose first position is not 0 but `padding_idx` + 1).

    Raises ValueError for an odd or no width, or an unknown layout.
    """
    if width < 2 or width % 2:
        raise ValueError(
            f"width={width} must be even and positive: sines and cosines come in pairs"
        )
    half = width // 2
    match layout:
        case "interleaved":
            pairs, axis = half, -1
        case "halves":
            # Width 2 has only the frequency 1, whatever its exponent is divided by.
            pairs, axis = max(half - 1, 1), -2
        case _:
            raise ValueError(f"layout={layout!r} must be 'interleaved' or 'halves'")
    frequencies = jnp.asarray(10000.0 ** (-np.arange(half) / pairs), jnp.float32)
    angles = jnp.asarray(positions, jnp.float32)[..., None] * frequencies
    waves = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=axis)
    return waves.reshape(*angles.shape[:-1], width)
