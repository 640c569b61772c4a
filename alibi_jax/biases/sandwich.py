"""Sandwich: the inner products of sinusoidal embeddings, with nothing to learn."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from alibi_jax.biases._positions import positions_by_length


def sandwich_ratios(num_heads: int) -> Float[Array, "N"]:
    """What each head divides by: head h of N (from 1) has 8h/N.

    Float32 `[N]`. Raises ValueError for fewer than one head.

    Chi et al. 2023 (Sandwich), arXiv 2212.10356.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads={num_heads} must be at least 1")
    return jnp.asarray(8 * np.arange(1, num_heads + 1) / num_heads, jnp.float32)


def sandwich_bias(
    num_heads_or_ratios: int | np.integer | Float[Array, "N"],
    query_length: int,
    key_length: int | None = None,
    *,
    offset: int | Int[Array, ""] | None = None,
    width: int = 128,
) -> Float[Array, "N T S"]:
    """Sandwich's bias, (pᵢ·pⱼ − d/2) / ratio, of T queries over S keys.

    Float32 `[N, T, S]`. Lengths and `offset` as in `alibi_bias`, the rest as in
    `sandwich_bias_at`. Raises ValueError as both.

    Chi et al. 2023 (Sandwich), arXiv 2212.10356.
    """
    ratios = (
        sandwich_ratios(int(num_heads_or_ratios))
        if isinstance(num_heads_or_ratios, int | np.integer)
        else num_heads_or_ratios
    )
    queries, keys = positions_by_length(query_length, key_length, offset)
    return sandwich_bias_at(ratios, queries, keys, width=width)


def sandwich_bias_at(
    ratios: Float[Array, "N"],
    query_positions: Int[Array, "... T"],
    key_positions: Int[Array, "... S"],
    *,
    width: int = 128,
) -> Float[Array, "... N T S"]:
    """Sandwich's bias, (pᵢ·pⱼ − d/2) / ratio, at positions i and j.

    Float32 `[..., N, T, S]`; the leading axes of the positions broadcast. p are the sinusoids of
    `width` d, so that pᵢ·pⱼ = Σ cos((i−j)·10000^(−2k/d)) over k from 0 to d/2−1. Less d/2, which
    the softmax does not see, the bias is 0 at distance 0 and below it elsewhere. Before the
    division it is exact to 5e-5 at distances up to 4096 and to 1e-3 at 10^5, wherever the two
    stand. Raises ValueError unless `width` is even and positive.

    Chi et al. 2023 (Sandwich), arXiv 2212.10356.
    """
    products = jnp.einsum(
        "...td,...sd->...ts",
        _waves(query_positions, width),
        _waves(key_positions, width),
        precision=jax.lax.Precision.HIGHEST,
    )
    by_head = jnp.asarray(ratios, jnp.float32)[:, None, None]
    return (products - width / 2)[..., None, :, :] / by_head


def _waves(positions: Int[Array, "... T"], width: int) -> Float[Array, "... T {width}"]:
    """Cosines and sines of each position's angles."""
    if width < 2 or width % 2:
        raise ValueError(
            f"width={width} must be even and positive: sines and cosines come in pairs"
        )
    frequencies = 10000.0 ** (-np.arange(0, width, 2) / width)
    # Angles as integers, 2^32 a turn: they wrap as turns do, so that their differences are exact
    # and only the distance of two positions matters. In float32 an angle of 10^5 is off by 0.004.
    steps = jnp.asarray(np.round(frequencies * 2**32 / (2 * np.pi)), jnp.int32)
    turns = jnp.asarray(positions, jnp.int32)[..., None] * steps
    angles = turns.astype(jnp.float32) * (2 * np.pi / 2**32)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
