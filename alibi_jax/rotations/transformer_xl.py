"""Transformer-XL's relative positions, as more features of queries and keys."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from alibi_jax.rotations.frequencies import rotary_frequencies
from alibi_jax.rotations.rotary import centred, rotary_angles


def transformer_xl(
    query: Float[Array, "... T N H"],
    key: Float[Array, "... S K H"],
    query_positions: Int[Array, "... T"],
    key_positions: Int[Array, "... S"],
    content_bias: Float[Array, "N H"],
    position_bias: Float[Array, "N H"],
    kernel: Float[Array, "D N H"],
) -> tuple[Float[Array, "... T N H+D"], Float[Array, "... S K H+D"]]:
    """Queries and keys whose plain attention is Transformer-XL's.

    With u = `content_bias`, v = `position_bias` and W = `kernel`, which are learned, the scores
    that come out, divided by sqrt(H + D), are those of the paper divided by sqrt(H):
    (q_i + u) · k_j + (q_i + v) · W R_(i−j), R_d the sines, then the cosines, of d · 10000^(−2k/D),
    k from 0 to D/2 − 1. A sine of i − j is made of sines and cosines of i and of j, so the second
    term is a product too, of D more features; those of the keys are one for all heads. There is
    no `[T, S]` array and no shift of one, and positions may be any.

    In the dtypes of `query` and `key`; products are summed and angles computed in float32.
    Positions are counted from the middle of the row's range, so where a row lies doesn't matter,
    and both must come from one call: a cache holds its keys as they were. Raises ValueError for
    an odd D.

    Dai et al. 2019 (Transformer-XL), section 3.3.
    """
    head_size, width = query.shape[-1], kernel.shape[0]
    queries, keys = centred(query_positions, key_positions)
    frequencies = rotary_frequencies(width)

    position_query = jnp.einsum(
        "...TNH,DNH->...TND",
        (query + position_bias).astype(query.dtype),
        kernel.astype(query.dtype),
        preferred_element_type=jnp.float32,
    )
    by_sine, by_cosine = jnp.split(position_query, 2, axis=-1)
    angles = rotary_angles(queries, frequencies)[..., None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    query_features = [
        (query + content_bias).astype(jnp.float32),
        by_cosine * sin - by_sine * cos,
        by_sine * sin + by_cosine * cos,
    ]
    # The attention divides by the square root of the size that it sees, H + D.
    rescale = ((head_size + width) / head_size) ** 0.5

    angles = rotary_angles(keys, frequencies)[..., None, :]
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(key.dtype)
    waves = jnp.broadcast_to(waves, (*key.shape[:-1], width))
    return (
        (jnp.concatenate(query_features, axis=-1) * rescale).astype(query.dtype),
        jnp.concatenate([key, waves], axis=-1),
    )
