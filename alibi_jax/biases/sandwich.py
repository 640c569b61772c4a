"""Sandwich: a bias of inner products of sinusoidal embeddings, without parameters."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Real

from alibi_jax.angles import rotary_angles
from alibi_jax.biases.distances import per_head, positions_by_length


def sandwich_ratios(num_heads: int) -> Float[Array, "N"]:
    """The divisor of each head's bias: head h (from 1 to N) has 8h/N.

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

    Float32 `[N, T, S]`. Lengths and `offset` are as in `alibi_bias`, the formula as in
    `sandwich_bias_at`. Raises the ValueErrors of both functions.

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
    query_positions: Real[Array, "... T"],
    key_positions: Real[Array, "... S"],
    *,
    width: int = 128,
) -> Float[Array, "... N T S"]:
    """Sandwich's bias, (pᵢ·pⱼ − d/2) / ratio, for query positions i and key positions j.

    Float32 `[..., N, T, S]`; the leading axes of the positions broadcast. pᵢ is the sinusoidal
    embedding of position i, of size d = `width`; i need not be whole. Hence pᵢ·pⱼ = Σ
    cos((i−j)·10000^(−2k/d)) over k from 0 to d/2−1. Subtracting d/2 does not change the softmax; it
    makes the bias 0 at distance 0 and negative elsewhere. Before the division, the error is at most
    2e-5 for a width of 128, at any positions. Raises ValueError unless `width` is even and
    positive.

    Chi et al. 2023 (Sandwich), arXiv 2212.10356.
    """
    products = jnp.einsum(
        "...td,...sd->...ts",
        _sinusoids(query_positions, width),
        _sinusoids(key_positions, width),
        precision=jax.lax.Precision.HIGHEST,
    )
    products = products[..., None, :, :]
    return (products - width / 2) / per_head(ratios, products.ndim)


def _sinusoids(positions: Real[Array, "... T"], width: int) -> Float[Array, "... T {width}"]:
    """The cosines, then the sines, of each position's angles."""
    if width < 2 or width % 2:
        raise ValueError(
            f"width={width} must be even and positive: sines and cosines come in pairs"
        )
    frequencies = 10000.0 ** (-np.arange(0, width, 2) / width)
    angles = rotary_angles(positions, frequencies)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
