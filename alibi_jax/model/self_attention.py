"""Causal self-attention of a layer: its projections, its position method, and how it is sharded.

Arrays carry their axes in the einsum strings: B batch, T queries, S keys, D width, N query heads,
K key heads, H head size.
"""

import functools

import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from alibi_jax import config as configs
from alibi_jax.attention import attention
from alibi_jax.attention.context_parallel import context_attention, near_heads
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
from alibi_jax.model.kv_cache import KeyValues
from alibi_jax.model.projection import Projection, fairseq_limits, xavier_limit
from alibi_jax.model.token_layout import TokenLayout, apply_positions
from alibi_jax.positions import METHODS, PositionMethod, make_position_method


class Attention(nnx.Module):
    """Causal self-attention with grouped key heads."""

    def __init__(self, config: configs.Model, position: str, *, train_length: int, rngs: nnx.Rngs):
        width, heads, size = config.width, config.num_heads, config.head_size
        kv_heads = config.num_kv_heads or heads
        make = functools.partial(
            Projection, dtype=config.dtype, use_bias=config.use_bias, rngs=rngs
        )
        q_shape, kv_shape = (width, heads, size), (width, kv_heads, size)
        kv_axes = ("embed", "kv_heads", None)
        root = 2**-0.5
        of_q = fairseq_limits(config, root * xavier_limit(width, heads * size), width**-0.5)
        of_kv = fairseq_limits(config, root * xavier_limit(width, kv_heads * size), width**-0.5)
        self.query = make(
            "btd,dnh->btnh", q_shape, ("embed", "heads", None), fan_in=width, limits=of_q
        )
        self.key = make("btd,dkh->btkh", kv_shape, kv_axes, fan_in=width, limits=of_kv)
        self.value = make("btd,dkh->btkh", kv_shape, kv_axes, fan_in=width, limits=of_kv)
        self.out = make(
            "btnh,nhd->btd",
            (heads, size, width),
            ("heads", None, "embed"),
            fan_in=width,
            gain=(2 * config.num_layers) ** -0.5,
            limits=fairseq_limits(config, xavier_limit(heads * size, width), 0.0),
        )
        # The layer's own method; None where one serves all layers.
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
        places: TokenLayout,
        cached: KeyValues | RollingCache | None,
        training_key: Key[Array, ""] | None,
    ) -> tuple[Float[Array, "B T D"], KeyValues | RollingCache | None]:
        """What the layer adds to its queries, in the compute dtype; and the cache, if there is one.

        A cache of all keys has its entries from `places.offset` on written before it is read.
        """
        query, keys = self._projected(x, position, places)
        if isinstance(cached, RollingCache) and isinstance(bias := position.bias(), LinearBias):
            out, cached = rolling_cache_attention(
                query,
                keys.key,
                keys.value,
                bias.slopes,
                cached,
                used=places.offset,
                positions=places.query_positions,
                segment_ids=places.query_segment_ids,
            )
            return self.out(out), cached
        if isinstance(cached, KeyValues):
            keys = cached = cached.write(keys, places.offset)
        sides = apply_positions(query, keys, position, places)
        bias = sides.bias
        if (bias is None or isinstance(bias, LinearBias)) and (
            training_key is None or self.dropout_rate == 0.0
        ):
            out = _linear_attention(sides.query, sides.key, keys.value, bias, places)
        else:
            out = attention(
                **sides._asdict(),
                value=keys.value,
                offset=places.offset,
                query_positions=places.query_positions,
                key_positions=places.key_positions,
                query_segment_ids=places.query_segment_ids,
                key_segment_ids=places.key_segment_ids,
                dropout_rate=self.dropout_rate,
                dropout_key=training_key,
            )
        return self.out(out), cached

    def statistics(
        self, x: Float[Array, "B T D"], position: PositionMethod, places: TokenLayout
    ) -> AttentionStatistics:
        """How the layer attends to whole rows, which stand at 0, 1, 2, ..."""
        sides = apply_positions(*self._projected(x, position, places), position, places)
        return attention_statistics(**sides._asdict())

    def _projected(
        self, x: Float[Array, "B S D"], position: PositionMethod, places: TokenLayout
    ) -> tuple[Float[Array, "B T N H"], KeyValues]:
        queries = x[:, -places.num_queries :]
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
    places: TokenLayout,
) -> Float[Array, "B T N V"]:
    """Attention without a bias or with a linear one, by each device on its own part."""
    slopes = None if bias is None else bias.slopes
    divides = divides_evenly(query, "batch", "sequence", "heads", None)
    if places.whole and num_shards("sequence") > 1 and divides:
        return _context_attention(query, key, value, slopes, places)
    # Distances are the same by index, which every engine takes.
    positions = (None, None) if places.counted else (places.query_positions, places.key_positions)
    offset = places.offset
    traced = None if isinstance(offset, int) else offset

    def attend(
        query: Array,
        key: Array,
        value: Array,
        slopes: Slopes | None,
        query_positions: Array | None,
        key_positions: Array | None,
        query_segment_ids: Array | None,
        key_segment_ids: Array | None,
        traced: Array | None,
    ) -> Array:
        return attention(
            query,
            key,
            value,
            bias=None if slopes is None else LinearBias(slopes),
            offset=offset if traced is None else traced,
            query_positions=query_positions,
            key_positions=key_positions,
            query_segment_ids=query_segment_ids,
            key_segment_ids=key_segment_ids,
        )

    ids = ("batch", None)
    of_rows = [ids if x is not None and x.ndim == 2 else (None,) for x in positions]
    axes = [
        ("batch", None, "heads", None),
        ("batch", None, "kv_heads", None),
        ("batch", None, "kv_heads", None),
        ("heads",),
        *of_rows,
        ids,
        ids,
        (),
    ]
    return map_over_shards(attend, axes, ("batch", None, "heads", None))(
        query,
        key,
        value,
        slopes,
        *positions,
        places.query_segment_ids,
        places.key_segment_ids,
        traced,
    )


def _context_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    slopes: Slopes | None,
    places: TokenLayout,
) -> Float[Array, "B T N V"]:
    """`_linear_attention` of sequences that are split over devices."""
    positions = None if places.counted else places.query_positions
    # Which heads are steep is not known of slopes that are learned, nor of those of other devices.
    if isinstance(slopes, np.ndarray) and positions is None and num_shards("heads") == 1:
        near = near_heads(slopes, key.shape[2], query.shape[1] // num_shards("sequence"))
    else:
        near = ()

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
            near=near,
            positions=positions,
            segment_ids=segment_ids,
        )

    rows = ("batch", "sequence")
    axes = [
        (*rows, "heads", None),
        (*rows, "kv_heads", None),
        (*rows, "kv_heads", None),
        ("heads",),
        rows if positions is not None and positions.ndim == 2 else ("sequence",),
        rows,
    ]
    arrays = query, key, value, slopes, positions, places.query_segment_ids
    return map_over_shards(attend, axes, axes[0])(*arrays)
