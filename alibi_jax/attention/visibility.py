"""Which keys each query sees, and the metadata of the tokens of queries and keys."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Real

from alibi_jax.biases import Bias
from alibi_jax.biases.distances import same_rank


class Visibility(NamedTuple):
    """Which keys each query sees, and how far away they are.

    The fields are the arguments of `attention` of the same names, after its checks.
    """

    causal: bool = True
    window: int | None = None
    # Index of the first query among the keys.
    offset: int | Int[Array, ""] = 0
    # None: the indices among the keys.
    query_positions: Real[Array, "*#B T"] | None = None
    key_positions: Real[Array, "*#B S"] | None = None
    # None: all tokens belong to one segment.
    query_segment_ids: Int[Array, "B T"] | None = None
    key_segment_ids: Int[Array, "B S"] | None = None
    # None: no mask.
    mask: Bool[Array, "#B #N T S"] | None = None


class TokenMetadata(NamedTuple):
    """Metadata of the tokens of queries, or of keys; `indices` are the indices among the keys.

    The sequence is axis 1 of the features, and the last axis of the other fields.
    """

    indices: Int[Array, "T"]
    positions: Real[Array, "*B T"]
    segment_ids: Int[Array, "*B T"] | None
    features: Any


def token_metadata(
    visibility: Visibility, length: Any, key_length: Any, query_features: Any, key_features: Any
) -> tuple[TokenMetadata, TokenMetadata]:
    """Metadata of `length` queries and of `key_length` keys."""
    query_indices = jnp.arange(length, dtype=jnp.int32) + visibility.offset
    key_indices = jnp.arange(key_length, dtype=jnp.int32)
    query_positions, key_positions = visibility.query_positions, visibility.key_positions
    return (
        TokenMetadata(
            query_indices,
            query_indices if query_positions is None else query_positions,
            visibility.query_segment_ids,
            query_features,
        ),
        TokenMetadata(
            key_indices,
            key_indices if key_positions is None else key_positions,
            visibility.key_segment_ids,
            key_features,
        ),
    )


def bias_between(bias: Bias | None, queries: TokenMetadata, keys: TokenMetadata) -> Array | None:
    """The bias that is added to the scores between queries and keys; None without a bias.

    `bias` receives the positions of queries and keys, and then their features, if there are any.
    """
    if bias is None:
        return None
    inputs: tuple[Any, ...] = (queries.positions, keys.positions)
    if queries.features is not None:
        inputs += (queries.features, keys.features)
    return bias(*inputs)


def visible_pairs(
    queries: TokenMetadata,
    keys: TokenMetadata,
    *,
    causal: bool,
    window: int | None,
    num_keys: Any = None,
) -> Bool[Array, "*B T S"] | None:
    """True where a query sees a key, `[T, S]` or `[B, 1, T, S]`; None where each query sees all.

    Keys with an index of `num_keys` or more are padding. A `Visibility.mask` is not applied here.
    """
    conditions = []
    relative = keys.indices[None, :] - queries.indices[:, None]
    if causal:
        conditions.append(relative <= 0)
    if window is not None:
        conditions.append(jnp.abs(relative) < window)
    if num_keys is not None:
        conditions.append(jnp.broadcast_to((keys.indices < num_keys)[None, :], relative.shape))
    if queries.segment_ids is not None and keys.segment_ids is not None:
        query_ids = queries.segment_ids[..., :, None]
        same = (query_ids == keys.segment_ids[..., None, :]) & (query_ids != 0)
        conditions.append(same[:, None] if same.ndim == 3 else same)
    return functools.reduce(jnp.logical_and, same_rank(*conditions)) if conditions else None
