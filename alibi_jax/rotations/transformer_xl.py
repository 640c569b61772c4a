"""Transformer-XL's relative positions, as additional features of queries and keys."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Real

from alibi_jax.angles import rotary_angles
from alibi_jax.rotations.frequencies import frequencies_in_float64
from alibi_jax.rotations.rotary import centre_positions


def transformer_xl(
    query: Float[Array, "... T N H"],
    key: Float[Array, "... S K H"],
    query_positions: Real[Array, "... T"],
    key_positions: Real[Array, "... S"],
    content_bias: Float[Array, "N H"],
    position_bias: Float[Array, "N H"],
    kernel: Float[Array, "D N H"],
) -> tuple[Float[Array, "... T N H+D"], Float[Array, "... S K H+D"]]:
    """Adds D features to queries and keys, so that plain attention has Transformer-XL's scores.

    The paper's score of query i and key j is
    ((q_i + u) · k_j + (q_i + v) · W R_(i−j)) / sqrt(H). Here u is `content_bias`, v is
    `position_bias` and W is `kernel`; all three are learned. R_d holds the sines, then the cosines,
    of d · 10000^(−2k/D) for k from 0 to D/2 − 1. The dot product of the returned queries and keys,
    divided by sqrt(H + D), is this score.

    A sine or cosine of i − j is a sum of products of sines and cosines of i and of j. So the
    second term is a dot product of D additional features; the additional features of a key are
    the same for all heads. No `[T, S]` array is made and shifted, and positions may have any
    values.

    The results have the dtypes of `query` and `key`; products are summed and angles are computed
    in float32. Positions are counted from the middle of the row's range, so shifting all positions
    changes nothing. For the same reason a query and the keys that it attends to must come from
    one call: a cache must hold keys as they were before this function. Raises ValueError for an
    odd D.

    Dai et al. 2019 (Transformer-XL), section 3.3.
    """
    head_size, width = query.shape[-1], kernel.shape[0]
    over_heads = tuple(range(query.ndim - 2))
    content_bias, position_bias = (
        jnp.expand_dims(x, over_heads) for x in (content_bias, position_bias)
    )
    queries, keys = centre_positions(query_positions, key_positions)
    frequencies = frequencies_in_float64(width)

    position_query = jnp.einsum(
        "...TNH,DNH->...TND",
        (query + position_bias).astype(query.dtype),
        kernel.astype(query.dtype),
        preferred_element_type=jnp.float32,
    )
    sine_part, cosine_part = jnp.split(position_query, 2, axis=-1)
    angles = rotary_angles(queries, frequencies)[..., None, :]
    angles = jnp.expand_dims(angles, range(query.ndim - angles.ndim))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    query_features = [
        (query + content_bias).astype(jnp.float32),
        cosine_part * sin - sine_part * cos,
        sine_part * sin + cosine_part * cos,
    ]
    # The attention divides by the square root of the number of features that it gets, H + D.
    rescale = ((head_size + width) / head_size) ** 0.5

    angles = rotary_angles(keys, frequencies)[..., None, :]
    key_features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(key.dtype)
    key_features = jnp.broadcast_to(key_features, (*key.shape[:-1], width))
    return (
        (jnp.concatenate(query_features, axis=-1) * rescale).astype(query.dtype),
        jnp.concatenate([key, key_features], axis=-1),
    )
