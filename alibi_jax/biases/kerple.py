"""KERPLE: biases that fall with the logarithm or a power of the distance, learned per head."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Real

from alibi_jax.biases.distances import distances, per_head, positions_by_length


def kerple_log_bias(
    scale: Float[Array, "N"],
    rate: Float[Array, "N"],
    query_length: int,
    key_length: int | None = None,
    *,
    offset: int | Int[Array, ""] | None = None,
) -> Float[Array, "N T S"]:
    """KERPLE's logarithmic bias, −r₁·log(1 + r₂·|i−j|), of T queries over S keys.

    Float32 `[N, T, S]`. `scale` is r₁ and `rate` is r₂, both positive. Lengths, `offset` and
    the ValueError are as in `alibi_bias`.

    Chi et al. 2022 (KERPLE), section 4.
    """
    return kerple_log_bias_at(scale, rate, *positions_by_length(query_length, key_length, offset))


def kerple_log_bias_at(
    scale: Float[Array, "N"],
    rate: Float[Array, "N"],
    query_positions: Real[Array, "... T"],
    key_positions: Real[Array, "... S"],
) -> Float[Array, "... N T S"]:
    """KERPLE's logarithmic bias, −r₁·log(1 + r₂·|i−j|), for query positions i, key positions j.

    Float32 `[..., N, T, S]`; the leading axes of the positions broadcast. Positions need not be
    whole. `scale` is r₁ and `rate` is r₂, both positive.

    Chi et al. 2022 (KERPLE), section 4.
    """
    distance = distances(query_positions, key_positions)[..., None, :, :]
    return -per_head(scale, distance.ndim) * jnp.log1p(per_head(rate, distance.ndim) * distance)


def kerple_power_bias(
    scale: Float[Array, "N"],
    exponent: Float[Array, "N"],
    query_length: int,
    key_length: int | None = None,
    *,
    offset: int | Int[Array, ""] | None = None,
) -> Float[Array, "N T S"]:
    """KERPLE's power bias, −r₁·|i−j|^r₂, of T queries over S keys.

    Float32 `[N, T, S]`. `scale` is r₁, positive, and `exponent` is r₂, above 0 and at most 2. With
    r₂ = 1 the bias is ALiBi with slope r₁. Lengths, `offset` and the ValueError are as in
    `alibi_bias`.

    Chi et al. 2022 (KERPLE), section 4.
    """
    queries, keys = positions_by_length(query_length, key_length, offset)
    return kerple_power_bias_at(scale, exponent, queries, keys)


def kerple_power_bias_at(
    scale: Float[Array, "N"],
    exponent: Float[Array, "N"],
    query_positions: Real[Array, "... T"],
    key_positions: Real[Array, "... S"],
) -> Float[Array, "... N T S"]:
    """KERPLE's power bias, −r₁·|i−j|^r₂, for query positions i and key positions j.

    Float32 `[..., N, T, S]`; the leading axes of the positions broadcast. Positions need not be
    whole. `scale` is r₁, positive, and `exponent` is r₂, above 0 and at most 2.

    Chi et al. 2022 (KERPLE), section 4.
    """
    distance = distances(query_positions, key_positions)[..., None, :, :]
    # JAX's derivative of 0^p with respect to p is 0, where the formula 0^p · log 0 gives NaN.
    return -per_head(scale, distance.ndim) * distance ** per_head(exponent, distance.ndim)
