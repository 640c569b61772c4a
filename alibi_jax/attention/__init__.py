"""Softmax attention with a bias given by positions: one entry, several ways behind it."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from alibi_jax.attention.blockwise import blockwise
from alibi_jax.biases import alibi_bias_at
from alibi_jax.biases.alibi import Slopes

# From query positions [..., T] and key positions [..., S], and where given the features of both,
# [B, T, ...] and [B, S, ...], to a bias [..., N, T, S].
Bias = Callable[..., Array | None]


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    bias: Bias | None = None,
    causal: bool = True,
    offset: int | Int[Array, ""] | None = None,
    query_positions: Int[Array, "*#B T"] | None = None,
    key_positions: Int[Array, "*#B S"] | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    query_features: Any = None,
    key_features: Any = None,
    mask: Bool[Array, "#B #N T S"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
) -> Float[Array, "B T N V"]:
    """Softmax(query · key / sqrt(H) + bias) · value, scores and softmax in float32.

    Shapes: as `jax.nn.dot_product_attention`; with K < N each key head serves N/K
    neighbouring query heads. `bias` is a function of query and key positions (default: 0, 1,
    2, ... for keys, and for queries their indices among them), so that no `[N, T, S]` array
    need exist; trees of features, `[B, T, ...]` and `[B, S, ...]`, are passed to it too where
    given. Causal masking goes by index: query t is key `offset` + t, by default S - T + t: the
    queries are the last of the keys. `offset` may be traced, as in a cache with room to spare.
    Positions and features feed the bias alone. Segment ids: a query sees the keys of its own
    segment; 0 is padding, which nothing sees and which sees nothing. `mask` is true where a
    query may see a key. A row that sees nothing is zero, and so are its gradients. Returns the
    dtype of `query`.

    Raises:
        ValueError: where K does not divide N, a causal query has no key of its own (T > S), or
            queries are not keys (not causal, T != S) and a bias is to guess where they stand.
    """
    length, num_heads = query.shape[1:3]
    key_length, num_kv_heads = key.shape[1:3]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_kv_heads} key heads do not divide {num_heads} query heads")
    known = key_length - length if offset is None else offset
    known = int(known) if isinstance(known, np.integer) else known
    if causal and isinstance(known, int) and not 0 <= known <= key_length - length:
        at = "" if offset is None else f" from key {offset} on"
        raise ValueError(
            f"causal attention of {length} queries{at} needs as many keys: {key_length}"
        )
    placed = offset is not None or (query_positions is not None and key_positions is not None)
    if bias is not None and not causal and length != key_length and not placed:
        raise ValueError(
            f"a bias between {length} queries and {key_length} other keys needs query_positions "
            "and key_positions: in cross attention there is no distance to assume"
        )
    if (query_segment_ids is None) != (key_segment_ids is None):
        raise ValueError("give segment ids of both queries and keys, or of neither")
    if (query_features is None) != (key_features is None):
        raise ValueError("give features of both queries and keys, or of neither")
    if mask is not None and mask.dtype != bool:
        raise ValueError(f"mask is {mask.dtype}: give booleans, true where a query may see a key")
    if key_positions is None:
        key_positions = jnp.arange(key_length, dtype=jnp.int32)
    if query_positions is None:
        query_positions = jnp.arange(length, dtype=jnp.int32) + known
    return blockwise(
        query,
        key,
        value,
        bias=bias,
        causal=causal,
        offset=known,
        query_positions=query_positions,
        key_positions=key_positions,
        query_segment_ids=query_segment_ids,
        key_segment_ids=key_segment_ids,
        query_features=query_features,
        key_features=key_features,
        mask=mask,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
    )


def alibi_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    slopes: Slopes,
    *,
    future_slopes: Slopes | None = None,
    causal: bool = True,
    offset: int | Int[Array, ""] | None = None,
    query_positions: Int[Array, "*#B T"] | None = None,
    key_positions: Int[Array, "*#B S"] | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    mask: Bool[Array, "#B #N T S"] | None = None,
) -> Float[Array, "B T N V"]:
    """Attention with linear biases (Press et al. 2021, section 3): `attention` with -m·|i-j|.

    `slopes` are of the query heads; keys after their query use `future_slopes` where given, as
    in `alibi_bias_at`. Everything else is as `attention` has it.
    """
    if len(slopes) != query.shape[2]:
        raise ValueError(f"{len(slopes)} slopes for {query.shape[2]} query heads")
    return attention(
        query,
        key,
        value,
        bias=functools.partial(alibi_bias_at, slopes, future_slopes=future_slopes),
        causal=causal,
        offset=offset,
        query_positions=query_positions,
        key_positions=key_positions,
        query_segment_ids=query_segment_ids,
        key_segment_ids=key_segment_ids,
        mask=mask,
    )


__all__ = ["Bias", "alibi_attention", "attention"]
