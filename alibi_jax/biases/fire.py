"""FIRE: a bias learned as a function of the distance, relative to the query's own position."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from alibi_jax.biases._positions import distances, positions_by_length

# Query rows at a time: the hidden units of all would be F/N times the size of the bias.
_ROWS = 64


class FireWeights(NamedTuple):
    """What FIRE learns, F hidden units for N heads.

    A shard of the heads takes its slice of `out_kernel` and `out_bias` and all of the others.
    """

    rate: Float[Array, ""]  # c, the steepness of the logarithm
    threshold: Float[Array, ""]  # L, the position up to which distances are not interpolated
    hidden_kernel: Float[Array, "F"]
    hidden_bias: Float[Array, "F"]
    out_kernel: Float[Array, "F N"]
    out_bias: Float[Array, "N"]


def fire_bias(
    weights: FireWeights,
    query_length: int,
    key_length: int | None = None,
    *,
    offset: int | Int[Array, ""] | None = None,
) -> Float[Array, "N T S"]:
    """FIRE's bias, f(ψ(|i−j|) / ψ(max(L, i))), of T queries over S keys.

    Float32 `[N, T, S]`. Lengths and `offset` as in `alibi_bias`, the rest as in `fire_bias_at`.
    Raises ValueError as `alibi_bias`.

    Li et al. 2023 (FIRE), section 3.
    """
    return fire_bias_at(weights, *positions_by_length(query_length, key_length, offset))


def fire_bias_at(
    weights: FireWeights,
    query_positions: Int[Array, "... T"],
    key_positions: Int[Array, "... S"],
) -> Float[Array, "... N T S"]:
    """FIRE's bias, f(ψ(|i−j|) / ψ(max(L, i))), at positions i, counted from 0, and j.

    Float32 `[..., N, T, S]`; the leading axes of the positions broadcast. ψ(x) = log(c·x + 1),
    f is a perceptron with one layer of ReLU. As in the authors' code, the signs of c and L do not
    count, and the divisor is 1e-6 more. It is no function of the distance alone: moving all
    positions changes it. The hidden units, `[..., T, S, F]`, exist for 64 queries at a time, and
    the gradient computes them again.

    Li et al. 2023 (FIRE), section 3.
    """
    rate, threshold, hidden_kernel, hidden_bias, out_kernel, out_bias = (
        jnp.asarray(weight, jnp.float32) for weight in weights
    )

    def stretched(x: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.log1p(jnp.abs(rate) * x)

    queries = jnp.asarray(query_positions, jnp.float32)
    reach = stretched(jnp.maximum(jnp.abs(threshold), queries)) + 1e-6
    interpolated = stretched(distances(query_positions, key_positions)) / reach[..., None]

    @jax.checkpoint
    def row(inputs: Float[Array, "... S"]) -> Float[Array, "... N S"]:
        hidden = jax.nn.relu(inputs[..., None] * hidden_kernel + hidden_bias)
        highest = jax.lax.Precision.HIGHEST
        outputs = jnp.einsum("...sf,fn->...ns", hidden, out_kernel, precision=highest)
        return outputs + out_bias[:, None]

    bias = jax.lax.map(row, jnp.moveaxis(interpolated, -2, 0), batch_size=_ROWS)
    return jnp.moveaxis(bias, 0, -2)
