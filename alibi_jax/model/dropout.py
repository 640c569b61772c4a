"""Dropout whose random numbers depend only on a key and on a number, the salt."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


def dropout(
    x: Float[Array, "..."], rate: float, key: Key[Array, ""] | None, salt: int
) -> Float[Array, "..."]:
    """Zeroes a share `rate` of `x` and scales up the rest; returns `x` itself without a key.

    Calls with the same key must have different salts to draw different random numbers.
    """
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(jax.random.fold_in(key, salt), 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)
