"""The plain form of attention: every score at once. The other forms are held against it."""

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
) -> Float[Array, "B T N V"]:
    """Softmax(query · key / sqrt(H) + bias) · value over the keys where `mask` is true.

    Scores, bias and softmax are float32; the result has the dtype of `query`. Query head n
    reads key head n // (N/K). Rows without any key are zero.
    """
    batch, length, num_heads, size = query.shape
    num_kv_heads, key_length = key.shape[2], key.shape[1]
    groups = num_heads // num_kv_heads
    query = query.reshape(batch, length, num_kv_heads, groups, size)
    scores = jnp.einsum("btkgh,bskh->bkgts", query, key, preferred_element_type=jnp.float32) * (
        size**-0.5
    )

    def in_groups(x: Array) -> Array:
        # [..., N, T, S] to [..., K, G, T, S]: the heads of a group are neighbours.
        heads = (1, 1) if x.shape[-3] == 1 else (num_kv_heads, groups)
        return x.reshape(*x.shape[:-3], *heads, length, key_length)

    if bias is not None:
        scores += in_groups(bias.astype(jnp.float32))
    if mask is not None:
        mask = in_groups(mask)
        # Masked after the bias is added, so that no bias can lift a key back into view.
        scores = jnp.where(mask, scores, _MASKED)
    # The floor is for a row to which the bias itself, -inf all along, leaves no key.
    top = jnp.maximum(scores.max(axis=-1, keepdims=True), _MASKED)
    weights = jnp.exp(scores - jax.lax.stop_gradient(top))
    if mask is not None:
        # Where a row sees no key at all, every score is the same.
        weights = jnp.where(mask, weights, 0.0)
    total = weights.sum(axis=-1)
    if dropout_rate > 0.0 and dropout_key is not None:
        keep = jax.random.bernoulli(dropout_key, 1.0 - dropout_rate, weights.shape)
        weights = jnp.where(keep, weights / (1.0 - dropout_rate), 0.0)
    out = jnp.einsum(
        "bkgts,bskh->btkgh", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    # Divided here rather than before the product: H numbers a row instead of S.
    # Of a row without any key the sum is 0: divided by less than 1, its gradients, 0 times the
    # quotient, would overflow to NaN.
    out /= jnp.where(total > 0.0, total, 1.0).transpose(0, 3, 1, 2)[..., None]
    return out.astype(query.dtype).reshape(batch, length, num_heads, value.shape[-1])
