"""The plain form of attention: every score at once. The other engines are held against it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

# Finite, so that a row without any key has gradients of zero rather than NaN.
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
    """Softmax(query · key / sqrt(H) + bias) · value over the keys where `mask` is true.

    And the log-sum-exp of each row of scores, -inf where it sees nothing.
    Scores, bias and softmax are float32, or float64 for queries of that; the result has the
    dtype of `query`. Query head n reads key head n // (N/K). Rows without any key are zero.
    """
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    batch, length, num_heads, size = query.shape
    num_kv_heads, key_length = key.shape[2], key.shape[1]
    groups = num_heads // num_kv_heads
    query = query.reshape(batch, length, num_kv_heads, groups, size)
    scores = jnp.einsum("btkgh,bskh->bkgts", query, key, preferred_element_type=dtype)
    scores *= size**-0.5

    def in_groups(x: Array) -> Array:
        # [..., N, T, S] to [..., K, G, T, S]: the heads of a group are neighbours.
        heads = (1, 1) if x.shape[-3] == 1 else (num_kv_heads, groups)
        return x.reshape(*x.shape[:-3], *heads, length, key_length)

    if bias is not None:
        scores += in_groups(bias.astype(dtype))
    if mask is not None:
        mask = in_groups(mask)
        # Masked after the bias is added, so that no bias can lift a key back into view.
        scores = jnp.where(mask, scores, _MASKED)
    # The floor is for a row to which the bias itself, -inf all along, leaves no key.
    top = jnp.maximum(scores.max(axis=-1, keepdims=True), _MASKED)
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(scores - top)
    if mask is not None:
        # Where a row sees no key at all, every score is the same.
        weights = jnp.where(mask, weights, 0.0)
    total = weights.sum(axis=-1)
    if dropout_rate > 0.0 and dropout_key is not None:
        keep = jax.random.bernoulli(dropout_key, 1.0 - dropout_rate, weights.shape)
        weights = jnp.where(keep, weights / (1.0 - dropout_rate), 0.0)
    out = jnp.einsum(
        "bkgts,bskh->btkgh", weights.astype(value.dtype), value, preferred_element_type=dtype
    )
    # Of a row without any key the sum is 0: divided by less than 1, its gradients, 0 times the
    # quotient, would overflow to NaN.
    some = total > 0.0
    total = jnp.where(some, total, 1.0)
    log_sum = jnp.where(some, top[..., 0] + jnp.log(total), -jnp.inf)
    # Divided here rather than before the product: H numbers a row instead of S.
    out /= total.transpose(0, 3, 1, 2)[..., None]
    out = out.astype(query.dtype).reshape(batch, length, num_heads, value.shape[-1])
    return out, log_sum.reshape(batch, num_heads, length).swapaxes(1, 2)
