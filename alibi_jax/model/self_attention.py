"""The causal self-attention of a layer: projections, position method and sharding.

Axes: B batch, T queries, S keys, D width, N query heads, K key heads, H head size, V value size.
"""

import functools

import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from alibi_jax import config as configs
from alibi_jax.attention import attention
from alibi_jax.attention.context_parallel import context_attention, short_range_heads
from alibi_jax.attention.rolling_cache import RollingCache, rolling_cache_attention
from alibi_jax.attention.statistics import AttentionStatistics, attention_statistics
from alibi_jax.biases import LinearBias
from alibi_jax.biases.alibi import Slopes
from alibi_jax.distributed.sharding import (
    constrain,
    divides_evenly,
    manual_axes,
    map_over_shards,
    num_shards,
)
from alibi_jax.model.attention_inputs import apply_positions
from alibi_jax.model.kv_cache import KeyValues
from alibi_jax.model.projection import Projection, fairseq_limits, xavier_limit
from alibi_jax.model.token_layout import TokenLayout
from alibi_jax.positions import METHODS, PositionMethod, make_position_method


class Attention(nnx.Module):
    """Causal self-attention; each key head serves a group of query heads."""

    def __init__(self, config: configs.Model, position: str, *, train_length: int, rngs: nnx.Rngs):
        width, heads, size = config.width, config.num_heads, config.head_size
        kv_heads = config.num_kv_heads or heads
        make = functools.partial(
            Projection, dtype=config.dtype, use_bias=config.use_bias, rngs=rngs
        )
        q_shape, kv_shape = (width, heads, size), (width, kv_heads, size)
        kv_axes = ("embed", "kv_heads", None)
        gain = 2**-0.5
        q_limits = fairseq_limits(config, gain * xavier_limit(width, heads * size), width**-0.5)
        kv_limits = fairseq_limits(config, gain * xavier_limit(width, kv_heads * size), width**-0.5)
        self.query = make(
            "btd,dnh->btnh", q_shape, ("embed", "heads", None), fan_in=width, limits=q_limits
        )
        self.key = make("btd,dkh->btkh", kv_shape, kv_axes, fan_in=width, limits=kv_limits)
        self.value = make("btd,dkh->btkh", kv_shape, kv_axes, fan_in=width, limits=kv_limits)
        self.out = make(
            "btnh,nhd->btd",
            (heads, size, width),
            ("heads", None, "embed"),
            fan_in=width,
            gain=(2 * config.num_layers) ** -0.5,
            limits=fairseq_limits(config, xavier_limit(heads * size, width), 0.0),
        )
        # The layer's own method; None if all layers share one.
        self.position = (
            make_position_method(position, config, train_length=train_length, rngs=rngs)
            if METHODS[position].per_layer
            else None
        )
        self.dropout_rate = config.attention_dropout

    def __call__(
        self,
        x: Float[Array, "B S D"],
        position: PositionMethod,
        layout: TokenLayout,
        cache: KeyValues | RollingCache | None,
        training_key: Key[Array, ""] | None,
    ) -> tuple[Float[Array, "B T D"], KeyValues | RollingCache | None]:
        """The update of the queries' residual stream, in the compute dtype, and the updated cache.

        Without a cache the second result is None. A `KeyValues` cache holds all keys: first the new
        keys are written to it, from slot `layout.offset` on, then attention reads it.
        """
        query, keys = self._project(x, position, layout)
        if isinstance(cache, RollingCache) and isinstance(bias := position.bias(), LinearBias):
            out, cache = rolling_cache_attention(
                query,
                keys.key,
                keys.value,
                bias.slopes,
                cache,
                used=layout.offset,
                positions=layout.query_positions,
                segment_ids=layout.query_segment_ids,
            )
            return self.out(out), cache
        if isinstance(cache, KeyValues):
            keys = cache = cache.write(keys, layout.offset)
        inputs = apply_positions(query, keys, position, layout)
        bias = inputs.bias
        if (bias is None or isinstance(bias, LinearBias)) and (
            training_key is None or self.dropout_rate == 0.0
        ):
            out = _linear_attention(inputs.query, inputs.key, keys.value, bias, layout)
        else:
            out = attention(
                **inputs._asdict(),
                value=keys.value,
                offset=layout.offset,
                query_positions=layout.query_positions,
                key_positions=layout.key_positions,
                query_segment_ids=layout.query_segment_ids,
                key_segment_ids=layout.key_segment_ids,
                dropout_rate=self.dropout_rate,
                dropout_key=training_key,
            )
        return self.out(out), cache

    def statistics(
        self, x: Float[Array, "B T D"], position: PositionMethod, layout: TokenLayout
    ) -> AttentionStatistics:
        """Statistics of the layer's attention over rows whose positions are 0, 1, 2, ..."""
        inputs = apply_positions(*self._project(x, position, layout), position, layout)
        return attention_statistics(
            **inputs._asdict(), num_shards=num_shards("batch") * num_shards("heads")
        )

    def _project(
        self, x: Float[Array, "B S D"], position: PositionMethod, layout: TokenLayout
    ) -> tuple[Float[Array, "B T N H"], KeyValues]:
        queries = x[:, -layout.num_queries :]
        query = constrain(self.query(queries), "batch", "sequence", "heads", None)
        keys = KeyValues(
            constrain(self.key(x), "batch", "sequence", "kv_heads", None),
            constrain(self.value(x), "batch", "sequence", "kv_heads", None),
            position.gates(x),
        )
        return query, keys


def _linear_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    bias: LinearBias | None,
    layout: TokenLayout,
) -> Float[Array, "B T N V"]:
    """Attention without a bias or with a linear one; each device computes its own shard."""
    slopes = None if bias is None else bias.slopes
    divides = divides_evenly(query, "batch", "sequence", "heads", None)
    if layout.queries_are_keys and num_shards("sequence") > 1 and divides:
        return _context_attention(query, key, value, slopes, layout)
    # Indices give the same distances as consecutive positions, and every engine supports them.
    positions = (
        (None, None)
        if layout.consecutive_positions
        else (layout.query_positions, layout.key_positions)
    )
    offset = layout.offset
    traced_offset = None if isinstance(offset, int) else offset

    def attend(
        query: Array,
        key: Array,
        value: Array,
        slopes: Slopes | None,
        query_positions: Array | None,
        key_positions: Array | None,
        query_segment_ids: Array | None,
        key_segment_ids: Array | None,
        traced_offset: Array | None,
    ) -> Array:
        return attention(
            query,
            key,
            value,
            bias=None if slopes is None else LinearBias(slopes),
            offset=offset if traced_offset is None else traced_offset,
            query_positions=query_positions,
            key_positions=key_positions,
            query_segment_ids=query_segment_ids,
            key_segment_ids=key_segment_ids,
        )

    row_axes = ("batch", None)
    position_axes = [row_axes if x is not None and x.ndim == 2 else (None,) for x in positions]
    axes = [
        ("batch", None, "heads", None),
        ("batch", None, "kv_heads", None),
        ("batch", None, "kv_heads", None),
        ("heads",),
        *position_axes,
        row_axes,
        row_axes,
        (),
    ]
    return map_over_shards(attend, axes, ("batch", None, "heads", None))(
        query,
        key,
        value,
        slopes,
        *positions,
        layout.query_segment_ids,
        layout.key_segment_ids,
        traced_offset,
    )


def _context_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    slopes: Slopes | None,
    layout: TokenLayout,
) -> Float[Array, "B T N V"]:
    """`_linear_attention` for sequences that are sharded over devices."""
    positions = None if layout.consecutive_positions else layout.query_positions
    # The reach of a head is known only for concrete slopes, and only if this device has all heads.
    if isinstance(slopes, np.ndarray) and positions is None and num_shards("heads") == 1:
        shard_length = query.shape[1] // num_shards("sequence")
        short_range = short_range_heads(slopes, key.shape[2], shard_length)
    else:
        short_range = ()

    def attend(
        query: Array,
        key: Array,
        value: Array,
        slopes: Slopes | None,
        positions: Array | None,
        segment_ids: Array | None,
    ) -> Array:
        return context_attention(
            query,
            key,
            value,
            slopes,
            axes=manual_axes("sequence"),
            short_range=short_range,
            positions=positions,
            segment_ids=segment_ids,
        )

    row_axes = ("batch", "sequence")
    axes = [
        (*row_axes, "heads", None),
        (*row_axes, "kv_heads", None),
        (*row_axes, "kv_heads", None),
        ("heads",),
        row_axes if positions is not None and positions.ndim == 2 else ("sequence",),
        row_axes,
    ]
    arrays = query, key, value, slopes, positions, layout.query_segment_ids
    return map_over_shards(attend, axes, axes[0])(*arrays)
