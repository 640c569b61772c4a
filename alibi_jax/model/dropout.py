"""Dropout of a share of an array, by a key that is told apart by its use."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


def dropout(
    x: Float[Array, "..."], rate: float, key: Key[Array, ""] | None, salt: int
) -> Float[Array, "..."]:
    """Zeroes a share of `x` and scales up the rest; `x` itself without a key.

    `salt` tells the uses of one key apart.
    """
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(jax.random.fold_in(key, salt), 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)
