"""Queries and keys in their places: what the scores of a layer are made of.

Axes as in `layers`: B batch, T queries, S keys, N query heads, K key heads, H head size.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from alibi_jax.biases import Bias, Decay, forget_bias_at, forget_decay
from alibi_jax.model.kv_cache import KeyValues
from alibi_jax.positions import PositionMethod


class TokenLayout(NamedTuple):
    """Where the queries and the keys of a forward pass stand, the same for all layers.

    Query t is key `offset` + t. `counted`: within a segment positions differ as indices do.
    """

    query_positions: Int[Array, "*#B T"]
    key_positions: Int[Array, "*#B S"]
    query_segment_ids: Int[Array, "B T"] | None
    key_segment_ids: Int[Array, "B S"] | None
    offset: int | Int[Array, ""]
    counted: bool

    @property
    def num_queries(self) -> int:
        """Queries of a row: the last so many of what a layer is given."""
        return self.query_positions.shape[-1]

    @property
    def whole(self) -> bool:
        """Whether the queries are the keys, as they are not in decoding."""
        known = isinstance(self.offset, int) and self.offset == 0
        return known and self.num_queries == self.key_positions.shape[-1]

    def ending(self, number: int) -> "TokenLayout":
        """Of the last `number` queries only."""
        before = self.num_queries - number
        ids = self.query_segment_ids
        return self._replace(
            query_positions=self.query_positions[..., before:],
            query_segment_ids=None if ids is None else ids[:, before:],
            offset=self.offset + before,
        )


class AttentionInputs(NamedTuple):
    """Queries and keys with their positions worked in, and what is added to their products.

    By the names that `attention` has for them.
    """

    query: Float[Array, "B T N R"]
    key: Float[Array, "B S K R"]
    bias: Bias | None
    query_features: Decay | None
    key_features: Decay | None


def apply_positions(
    query: Float[Array, "B T N H"], keys: KeyValues, position: PositionMethod, places: TokenLayout
) -> AttentionInputs:
    """Queries and keys as they were projected, in their places by the layer's position method."""
    length = query.shape[1]
    query, key = position.rotate(query, keys.key, places.query_positions, places.key_positions)
    if keys.gates is None:
        return AttentionInputs(query, key, position.bias(), None, None)
    key_decay = forget_decay(keys.gates, places.key_segment_ids)
    query_decay = jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, places.offset, length, axis=1), key_decay
    )
    return AttentionInputs(query, key, _decay_bias, query_decay, key_decay)


def _decay_bias(
    query_positions: Array, key_positions: Array, query_decay: Decay, key_decay: Decay
) -> Array:
    return forget_bias_at(query_decay, key_decay)
