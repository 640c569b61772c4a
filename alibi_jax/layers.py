"""The parts of the transformer: projections, attention, feed-forward, and a layer of both.

Arrays carry their axes in the einsum strings: B batch, T queries, S keys, D width, N query heads,
K key heads, H head size, F feed-forward.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from alibi_jax import config as configs
from alibi_jax.attention import attention
from alibi_jax.attention.context import context_attention, near_heads
from alibi_jax.attention.ring import Rings, ring_attention
from alibi_jax.attention.statistics import AttentionStatistics, attention_statistics
from alibi_jax.biases import LinearBias
from alibi_jax.biases.alibi import Slopes
from alibi_jax.cache import KeyValues
from alibi_jax.placed import Places, placed
from alibi_jax.positions import METHODS, PositionMethod, make_position_method
from alibi_jax.projection import Projection
from alibi_jax.sharding import constrain, parts_axes, shards, split, splits

# Of the function itself, and whether it multiplies a second projection (a gated unit).
_ACTIVATIONS = {
    "relu": (jax.nn.relu, False),
    "gelu": (jax.nn.gelu, False),
    "silu": (jax.nn.silu, False),
    "swiglu": (jax.nn.silu, True),
    "geglu": (jax.nn.gelu, True),
}


def dropout(
    x: Float[Array, "..."], rate: float, key: Key[Array, ""] | None, salt: int
) -> Float[Array, "..."]:
    """Zeroes a share of `x` and scales up the rest; `x` itself without a key.

    `salt` tells the uses of one key apart.
    """
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(jax.random.fold_in(key, salt), 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


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
        of_q = _limits(config, root * _xavier(width, heads * size), width**-0.5)
        of_kv = _limits(config, root * _xavier(width, kv_heads * size), width**-0.5)
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
            limits=_limits(config, _xavier(heads * size, width), 0.0),
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
        places: Places,
        cached: KeyValues | Rings | None,
        training_key: Key[Array, ""] | None,
    ) -> tuple[Float[Array, "B T D"], KeyValues | Rings | None]:
        """What the layer adds to its queries, in the compute dtype; and the cache, if there is one.

        A cache of all keys has its entries from `places.offset` on written before it is read.
        """
        query, keys = self._projected(x, position, places)
        if isinstance(cached, Rings) and isinstance(bias := position.bias(), LinearBias):
            out, cached = ring_attention(
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
        sides = placed(query, keys, position, places)
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
        self, x: Float[Array, "B T D"], position: PositionMethod, places: Places
    ) -> AttentionStatistics:
        """How the layer attends to whole rows, which stand at 0, 1, 2, ..."""
        sides = placed(*self._projected(x, position, places), position, places)
        return attention_statistics(**sides._asdict())

    def _projected(
        self, x: Float[Array, "B S D"], position: PositionMethod, places: Places
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
    places: Places,
) -> Float[Array, "B T N V"]:
    """Attention without a bias or with a linear one, by each device on its own part."""
    slopes = None if bias is None else bias.slopes
    divides = splits(query, "batch", "sequence", "heads", None)
    if places.whole and shards("sequence") > 1 and divides:
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
    return split(attend, axes, ("batch", None, "heads", None))(
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
    places: Places,
) -> Float[Array, "B T N V"]:
    """`_linear_attention` of sequences that are split over devices."""
    positions = None if places.counted else places.query_positions
    # Which heads are steep is not known of slopes that are learned, nor of those of other devices.
    if isinstance(slopes, np.ndarray) and positions is None and shards("heads") == 1:
        near = near_heads(slopes, key.shape[2], query.shape[1] // shards("sequence"))
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
            axes=parts_axes("sequence"),
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
    return split(attend, axes, axes[0])(*arrays)


class FeedForward(nnx.Module):
    """Two projections with an activation between them, gated or not."""

    def __init__(self, config: configs.Model, *, rngs: nnx.Rngs):
        width, ff = config.width, config.ff_width or 4 * config.width
        self.activation, gated = _ACTIVATIONS[config.activation]
        make = functools.partial(
            Projection, dtype=config.dtype, use_bias=config.use_bias, rngs=rngs
        )
        inward = functools.partial(
            make, fan_in=width, limits=_limits(config, width**-0.5, width**-0.5)
        )
        self.up = inward("btd,df->btf", (width, ff), ("embed", "ff"))
        self.gate = inward("btd,df->btf", (width, ff), ("embed", "ff")) if gated else None
        self.down = make(
            "btf,fd->btd",
            (ff, width),
            ("ff", "embed"),
            fan_in=ff,
            gain=(2 * config.num_layers) ** -0.5,
            limits=_limits(config, ff**-0.5, ff**-0.5),
        )
        self.dropout_rate = config.activation_dropout

    def __call__(
        self, x: Float[Array, "B T D"], training_key: Key[Array, ""] | None
    ) -> Float[Array, "B T D"]:
        """What the layer adds to its input, in the compute dtype."""
        hidden = constrain(self.up(x), "batch", "sequence", "ff")
        if self.gate is None:
            hidden = self.activation(hidden)
        else:
            hidden = self.activation(self.gate(x)) * hidden
        return self.down(dropout(hidden, self.dropout_rate, training_key, salt=0))


class Layer(nnx.Module):
    """Pre-norm: x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: configs.Model, position: str, *, train_length: int, rngs: nnx.Rngs):
        self.attention_norm = make_norm(config, rngs)
        self.attention = Attention(config, position, train_length=train_length, rngs=rngs)
        self.ff_norm = make_norm(config, rngs)
        self.ff = FeedForward(config, rngs=rngs)
        self.dropout_rate = config.dropout

    def __call__(
        self,
        x: Float[Array, "B S D"],
        position: PositionMethod,
        places: Places,
        cached: KeyValues | Rings | None,
        training_key: Key[Array, ""] | None,
    ) -> tuple[Float[Array, "B T D"], KeyValues | Rings | None]:
        """The queries' residual stream after the layer; and the cache, if there is one."""
        keys = [None, None] if training_key is None else list(jax.random.split(training_key))
        with jax.named_scope("attention"):
            out, cached = self.attention(self.attention_norm(x), position, places, cached, keys[0])
            x = x[:, -places.num_queries :]
            x = self._added(x, out, keys[0])
        with jax.named_scope("feed_forward"):
            out = self.ff(self.ff_norm(x), keys[1])
            x = self._added(x, out, keys[1])
        return x, cached

    def _added(self, x: Array, out: Array, training_key: Key[Array, ""] | None) -> Array:
        out = dropout(out, self.dropout_rate, training_key, salt=1)
        return constrain(x + out, "batch", "sequence", None)


def _xavier(fan_in: int, fan_out: int) -> float:
    """The limit of Glorot & Bengio 2010, equation 16."""
    return math.sqrt(6 / (fan_in + fan_out))


def _limits(config: configs.Model, kernel: float, bias: float) -> tuple[float, float] | None:
    """Of a projection's kernel and bias, which fairseq draws evenly from within them."""
    return (kernel, bias) if config.initialization == "fairseq" else None


def make_norm(config: configs.Model, rngs: nnx.Rngs) -> Any:
    """LayerNorm or RMSNorm over the width, float32, for the gradient of its scale is too.

    That is a sum over all tokens, and over all devices.
    """
    kind = nnx.LayerNorm if config.norm == "layernorm" else nnx.RMSNorm
    return kind(config.width, epsilon=config.norm_epsilon, dtype=jnp.float32, rngs=rngs)
