"""Queries and keys after the position method of their layer was applied.

Axes: B batch, T queries, S keys, N query heads, K key heads, H head size, R head size after the
position method.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from alibi_jax.biases import Bias, Decay, forget_bias_at, forget_decay
from alibi_jax.model.kv_cache import KeyValues
from alibi_jax.model.token_layout import TokenLayout
from alibi_jax.positions import PositionMethod


class AttentionInputs(NamedTuple):
    """Queries and keys that encode their positions, and the bias of their scores.

    The fields have the names of `attention`'s arguments.
    """

    query: Float[Array, "B T N R"]
    key: Float[Array, "B S K R"]
    bias: Bias | None
    query_features: Decay | None
    key_features: Decay | None


def apply_positions(
    query: Float[Array, "B T N H"], keys: KeyValues, position: PositionMethod, layout: TokenLayout
) -> AttentionInputs:
    """Applies a position method to the projected queries and keys."""
    length = query.shape[1]
    query, key = position.rotate(query, keys.key, layout.query_positions, layout.key_positions)
    if keys.gates is None:
        return AttentionInputs(query, key, position.bias(), None, None)
    key_decay = forget_decay(keys.gates, layout.key_segment_ids)
    query_decay = jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, layout.offset, length, axis=1), key_decay
    )
    return AttentionInputs(query, key, _decay_bias, query_decay, key_decay)


def _decay_bias(
    query_positions: Array, key_positions: Array, query_decay: Decay, key_decay: Decay
) -> Array:
    return forget_bias_at(query_decay, key_decay)
