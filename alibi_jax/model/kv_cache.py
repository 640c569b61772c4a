"""The caches of keys and values: one holds all tokens, the other a head's recent tokens.

Axes: B batch, S slots, T tokens, K key heads, H head size, N query heads.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from alibi_jax.attention.rolling_cache import RollingCache, init_rolling_cache
from alibi_jax.biases import LinearBias
from alibi_jax.model.token_layout import TokenLayout
from alibi_jax.positions import PositionMethod


class KeyValues(NamedTuple):
    """The keys, values and gates of a layer's tokens. Keys are as projected, not yet rotated."""

    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K H"]
    gates: Float[Array, "B S N"] | None

    def write(self, new: "KeyValues", offset: int | Int[Array, ""]) -> "KeyValues":
        """The entries, with the entries of the next tokens written from slot `offset` on."""
        return jax.tree.map(
            lambda old, x: jax.lax.dynamic_update_slice_in_dim(
                old, x.astype(old.dtype), offset, axis=1
            ),
            self,
            new,
        )


class KVCache(NamedTuple):
    """The keys and values of all tokens so far, in S slots of which `num_tokens` are taken.

    Token t of every row is in slot t. Rows differ in their positions: a shorter row starts with
    padding, whose segment id is 0.
    """

    layers: tuple[KeyValues, ...]
    positions: Int[Array, "B S"]
    segment_ids: Int[Array, "B S"]
    num_tokens: Int[Array, ""]

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return self.positions.shape[1]

    def add_tokens(self, token_mask: Bool[Array, "B T"]) -> tuple[TokenLayout, "KVCache"]:
        """The layout of the next tokens, and the cache with their positions but not their keys.

        `token_mask` is False for padding. Raises ValueError if the tokens do not fit and
        `num_tokens` is not traced, and in any case if T is more than the number of slots.
        """
        length, capacity = token_mask.shape[1], self.capacity
        end = self.num_tokens + length
        if length > capacity or (not isinstance(end, jax.core.Tracer) and end > capacity):
            raise ValueError(
                f"{length} more tokens do not fit into a cache of {capacity} slots, "
                f"{self.num_tokens} of them taken: make the cache larger"
            )
        ids = token_mask.astype(jnp.int32)
        positions = _next_positions(self.segment_ids.sum(axis=1, dtype=jnp.int32), ids)
        key_positions, key_ids = (
            jax.lax.dynamic_update_slice_in_dim(old, new, self.num_tokens, axis=1)
            for old, new in ((self.positions, positions), (self.segment_ids, ids))
        )
        layout = TokenLayout(positions, key_positions, ids, key_ids, self.num_tokens, False)
        return layout, KVCache(self.layers, key_positions, key_ids, end)


class BoundedKVCache(NamedTuple):
    """A cache in which each head keeps the keys and values of recent tokens only.

    The slope of a head gives older tokens a negligible weight: the steeper the slope, the fewer
    tokens the head keeps. The cache takes any number of tokens. `num_tokens` is the number of
    tokens per row so far, padding included. `row_lengths` is the number of tokens of each row,
    padding not included.
    """

    layers: tuple[RollingCache, ...]
    row_lengths: Int[Array, "B"]
    num_tokens: Int[Array, ""]

    @property
    def omitted_share(self) -> Float[Array, "B"]:
        """For each row, an upper bound on the attention weight that omitted keys would have.

        It is the maximum over all tokens so far, all layers and all heads.
        """
        shares = [group.omitted_share for layer in self.layers for group in layer.groups]
        return jnp.stack(shares).max(axis=0)

    def add_tokens(self, token_mask: Bool[Array, "B T"]) -> tuple[TokenLayout, "BoundedKVCache"]:
        """The layout of the next tokens, and the cache that counts them but lacks their keys.

        `token_mask` is False for padding.
        """
        ids = token_mask.astype(jnp.int32)
        positions = _next_positions(self.row_lengths, ids)
        layout = TokenLayout(positions, positions, ids, ids, self.num_tokens, False)
        return layout, BoundedKVCache(
            self.layers,
            self.row_lengths + ids.sum(axis=1, dtype=jnp.int32),
            self.num_tokens + token_mask.shape[1],
        )


def init_kv_cache(
    methods: Iterable[PositionMethod],
    batch_size: int,
    capacity: int,
    kv_shape: tuple[int, int],
    dtype: DTypeLike,
) -> KVCache:
    """An empty cache with `capacity` slots, for layers with these position methods.

    `kv_shape` is (number of key heads, head size).
    """
    shape = batch_size, capacity

    def empty_layer(method: PositionMethod) -> KeyValues:
        gates = jnp.zeros((*shape, method.num_gates)) if method.num_gates else None
        return KeyValues(
            jnp.zeros((*shape, *kv_shape), dtype), jnp.zeros((*shape, *kv_shape), dtype), gates
        )

    layers = tuple(empty_layer(method) for method in methods)
    return KVCache(layers, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.int32), jnp.int32(0))


def init_bounded_kv_cache(
    slopes: Iterable[Float[Array, "N"]],
    batch_size: int,
    capacity: int,
    kv_shape: tuple[int, int],
    dtype: DTypeLike,
    *,
    gap: float,
    tolerance: float,
) -> BoundedKVCache:
    """An empty cache with at most `capacity` slots per head, for layers with these slopes.

    `kv_shape` is (number of key heads, head size). `gap` is the most by which the score of an old
    key, without its bias, is expected to exceed the score of the query's own key. `tolerance` is
    the largest attention weight that all omitted keys together may have. Both, and the slopes,
    set the number of slots (`rolling_cache.reach_length`).
    """
    num_kv_heads, head_size = kv_shape
    layers = tuple(
        init_rolling_cache(
            layer_slopes,
            batch_size=batch_size,
            capacity=capacity,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=dtype,
            gap=gap,
            tolerance=tolerance,
        )
        for layer_slopes in slopes
    )
    return BoundedKVCache(layers, jnp.zeros(batch_size, jnp.int32), jnp.int32(0))


def linear_bias_slopes(name: str, position: PositionMethod) -> Float[Array, "N"]:
    """The slopes of a position method, `name`, that is a linear bias and nothing else.

    The slopes are concrete even under a trace, unless they are learned. Raises ValueError for a
    method that is not a linear bias alone, because its keys may have weight at any distance.
    """
    with jax.ensure_compile_time_eval():
        bias = position.bias()
        rotates = type(position).rotate is not PositionMethod.rotate
        if not isinstance(bias, LinearBias) or rotates or position.num_gates:
            raise ValueError(
                f"position={name!r} is not a linear bias alone, so keys may matter at any "
                "distance: give no tolerance, for a cache of all keys"
            )
        return jnp.asarray(bias.slopes, jnp.float32)


def _next_positions(
    row_lengths: Int[Array, "B"], segment_ids: Int[Array, "B T"]
) -> Int[Array, "B T"]:
    """The positions of the next tokens of rows of these lengths; padding does not count."""
    # With `jax_enable_x64`, sums of int32 would be int64.
    counts = jnp.cumsum(segment_ids, axis=1, dtype=jnp.int32)
    return jnp.maximum(row_lengths[:, None] + counts - 1, 0)
