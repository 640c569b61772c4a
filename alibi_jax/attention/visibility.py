"""Where queries and keys stand, and which of them see each other."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from alibi_jax.biases import Bias


class Visibility(NamedTuple):
    """Which keys a query sees, and how far away they are; as `attention` has it."""

    causal: bool = True
    window: int | None = None
    offset: int | Int[Array, ""] = 0
    # None: their indices among the keys.
    query_positions: Int[Array, "*#B T"] | None = None
    key_positions: Int[Array, "*#B S"] | None = None
    # None: all are of one segment.
    query_segment_ids: Int[Array, "B T"] | None = None
    key_segment_ids: Int[Array, "B S"] | None = None


class TokenMetadata(NamedTuple):
    """Of queries or of keys: their indices among the keys, and what their biases ask for.

    The last axis of all but the features is the sequence; theirs is the one after the batch.
    """

    indices: Int[Array, "T"]
    positions: Int[Array, "*B T"]
    segment_ids: Int[Array, "*B T"] | None
    features: Any


def token_metadata(
    sight: Visibility, length: int, key_length: int, query_features: Any, key_features: Any
) -> tuple[TokenMetadata, TokenMetadata]:
    """Of so many queries and keys."""
    own = jnp.arange(length, dtype=jnp.int32) + sight.offset
    keys = jnp.arange(key_length, dtype=jnp.int32)
    return (
        TokenMetadata(
            own,
            own if sight.query_positions is None else sight.query_positions,
            sight.query_segment_ids,
            query_features,
        ),
        TokenMetadata(
            keys,
            keys if sight.key_positions is None else sight.key_positions,
            sight.key_segment_ids,
            key_features,
        ),
    )


def bias_between(bias: Bias | None, queries: TokenMetadata, keys: TokenMetadata) -> Array | None:
    """What a function of positions, and of features where there are any, adds to the scores."""
    if bias is None:
        return None
    sides: tuple[Any, ...] = (queries.positions, keys.positions)
    if queries.features is not None:
        sides += (queries.features, keys.features)
    return bias(*sides)


def visible_pairs(
    queries: TokenMetadata,
    keys: TokenMetadata,
    *,
    causal: bool,
    window: int | None,
    num_keys: int | None = None,
) -> Bool[Array, "*B T S"] | None:
    """True where a query sees a key, `[T, S]` or `[B, 1, T, S]`; None where all see all.

    Keys from `num_keys` on are but filled in.
    """
    parts = []
    relative = keys.indices - queries.indices[:, None]
    if causal:
        parts.append(relative <= 0)
    if window is not None:
        parts.append(jnp.abs(relative) < window)
    if num_keys is not None:
        parts.append(jnp.broadcast_to(keys.indices < num_keys, relative.shape))
    if queries.segment_ids is not None and keys.segment_ids is not None:
        ids = queries.segment_ids[..., :, None]
        same = (ids == keys.segment_ids[..., None, :]) & (ids != 0)
        parts.append(same[:, None] if same.ndim == 3 else same)
    return functools.reduce(jnp.logical_and, parts) if parts else None
