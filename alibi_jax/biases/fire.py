"""FIRE: a learned function of the distance relative to the query's own position."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Real

from alibi_jax.biases.distances import distances, positions_by_length, same_rank
from alibi_jax.position_arrays import as_positions

# The number of queries that are computed at a time: the hidden units of all queries together would
# take F/N times the memory of the bias.
_QUERIES_PER_CHUNK = 64


class FireWeights(NamedTuple):
    """FIRE's parameters, with F hidden units for N heads.

    A shard of the heads needs its slice of `out_kernel` and `out_bias`, and the other parameters
    whole.
    """

    rate: Float[Array, ""]  # c, the steepness of the logarithm
    threshold: Float[Array, ""]  # L, the query position up to which the divisor is constant
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

    Float32 `[N, T, S]`. Lengths, `offset` and the ValueError are as in `alibi_bias`, the formula
    as in `fire_bias_at`.

    Li et al. 2023 (FIRE), section 3.
    """
    return fire_bias_at(weights, *positions_by_length(query_length, key_length, offset))


def fire_bias_at(
    weights: FireWeights,
    query_positions: Real[Array, "... T"],
    key_positions: Real[Array, "... S"],
) -> Float[Array, "... N T S"]:
    """FIRE's bias, f(ψ(|i−j|) / ψ(max(L, i))), for query positions i and key positions j.

    Float32 `[..., N, T, S]`; the leading axes of the positions broadcast. Query positions are
    counted from 0. Positions need not be whole. ψ(x) = log(c·x + 1), and f is a perceptron with one
    hidden layer of ReLUs. As in the authors' code, the signs of c and L are ignored, and 1e-6 is
    added to the divisor. The bias depends on i as well as on the distance, so it changes when all
    positions are shifted. The hidden units, `[..., T, S, F]`, exist for 64 queries at a time, and
    the gradient recomputes them.

    Li et al. 2023 (FIRE), section 3.
    """
    rate, threshold, hidden_kernel, hidden_bias, out_kernel, out_bias = (
        jnp.asarray(weight, jnp.float32) for weight in weights
    )

    def log_transform(x: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.log1p(jnp.abs(rate) * x)

    queries = as_positions(query_positions).astype(jnp.float32)
    normalizer = log_transform(jnp.maximum(jnp.abs(threshold), queries)) + 1e-6
    numerator, normalizer = same_rank(
        log_transform(distances(query_positions, key_positions)), normalizer[..., None]
    )

    @jax.checkpoint
    def query_bias(inputs: Float[Array, "... S"]) -> Float[Array, "... N S"]:
        over_inputs = tuple(range(inputs.ndim))
        kernel, bias = (jnp.expand_dims(x, over_inputs) for x in (hidden_kernel, hidden_bias))
        hidden = jax.nn.relu(inputs[..., None] * kernel + bias)
        highest = jax.lax.Precision.HIGHEST
        outputs = jnp.einsum("...sf,fn->...ns", hidden, out_kernel, precision=highest)
        return outputs + jnp.expand_dims(out_bias, (*over_inputs[:-1], inputs.ndim))

    bias = jax.lax.map(
        query_bias, jnp.moveaxis(numerator / normalizer, -2, 0), batch_size=_QUERIES_PER_CHUNK
    )
    return jnp.moveaxis(bias, 0, -2)
