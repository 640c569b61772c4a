"""The plain form of attention, which computes all scores at once; the tests' reference engine."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from alibi_jax.biases.distances import same_rank

# Finite, so that the gradients of a row that sees no key are 0 and not NaN.
_MASKED = float(jnp.finfo(jnp.float32).min)


def dense(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    bias: Float[Array, "*#B N T S"] | None,
    mask: Bool[Array, "*#B #N T S"] | None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Computes softmax(query · key / sqrt(H) + bias) · value over the keys where `mask` is true.

    Returns the result, in the dtype of `query`, and the log-sum-exp of each row of scores, -inf
    where the row sees nothing. Scores, bias and softmax are float32, or float64 where `query` is
    float64. Query head n reads key head n // (N/K). Rows that see nothing are zero.
    """
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    batch, length, num_heads, size = query.shape
    num_kv_heads, key_length = key.shape[2], key.shape[1]
    group_size = num_heads // num_kv_heads
    query = query.reshape(batch, length, num_kv_heads, group_size, size)
    scores = jnp.einsum("btkgh,bskh->bkgts", query, key, preferred_element_type=dtype)
    scores *= size**-0.5

    def group_heads(x: Array) -> Array:
        # [..., N, T, S] to [..., K, G, T, S]: the heads of a group are neighbours.
        heads = (1, 1) if x.shape[-3] == 1 else (num_kv_heads, group_size)
        return x.reshape(*x.shape[:-3], *heads, length, key_length)

    if bias is not None:
        scores, bias = same_rank(scores, group_heads(bias.astype(dtype)))
        scores += bias
    if mask is not None:
        mask = group_heads(mask)
        # The mask comes after the bias, so that no bias can make a masked key visible again.
        scores = jnp.where(mask, scores, _MASKED)
    # The maximum must be finite, also in a row whose bias is -inf at every key.
    row_max = jnp.maximum(scores.max(axis=-1, keepdims=True), _MASKED)
    row_max = jax.lax.stop_gradient(row_max)
    weights = jnp.exp(scores - row_max)
    if mask is not None:
        # In a row that sees no key, all scores are equal, so that the weights are 1.
        weights = jnp.where(mask, weights, 0.0)
    row_sum = weights.sum(axis=-1)
    if dropout_rate > 0.0 and dropout_key is not None:
        keep = jax.random.bernoulli(dropout_key, 1.0 - dropout_rate, weights.shape)
        weights = jnp.where(keep, weights / (1.0 - dropout_rate), 0.0)
    out = jnp.einsum(
        "bkgts,bskh->btkgh", weights.astype(value.dtype), value, preferred_element_type=dtype
    )
    # A row that sees no key has an output of 0 and a sum of 0. Its output is divided by 1. With a
    # tiny divisor the gradient would be NaN: it is the output, 0, times 1/divisor², which would
    # overflow to infinity.
    sees_keys = row_sum > 0.0
    row_sum = jnp.where(sees_keys, row_sum, 1.0)
    log_sum_exp = jnp.where(sees_keys, row_max[..., 0] + jnp.log(row_sum), -jnp.inf)
    # The division comes after the product with the values: V divisions per row instead of S.
    out /= row_sum.transpose(0, 3, 1, 2)[..., None]
    out = out.astype(query.dtype).reshape(batch, length, num_heads, value.shape[-1])
    return out, log_sum_exp.reshape(batch, num_heads, length).swapaxes(1, 2)
