"""A layer of the transformer: attention and feed-forward, each after a norm.

Arrays carry their axes in the einsum strings: B batch, T tokens, D width, F feed-forward.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from alibi_jax import config as configs
from alibi_jax.attention.rolling_cache import RollingCache
from alibi_jax.distributed.sharding import constrain
from alibi_jax.model.dropout import dropout
from alibi_jax.model.kv_cache import KeyValues
from alibi_jax.model.projection import Projection, fairseq_limits
from alibi_jax.model.self_attention import Attention
from alibi_jax.model.token_layout import TokenLayout
from alibi_jax.positions import PositionMethod


class FeedForward(nnx.Module):
    """Two projections with an activation between them, gated or not."""

    def __init__(self, config: configs.Model, *, rngs: nnx.Rngs):
        width, ff = config.width, config.ff_width or 4 * config.width
        choice = configs.ACTIVATIONS[config.activation]
        self.activation, gated = choice.function, choice.gated
        make = functools.partial(
            Projection, dtype=config.dtype, use_bias=config.use_bias, rngs=rngs
        )
        inward = functools.partial(
            make, fan_in=width, limits=fairseq_limits(config, width**-0.5, width**-0.5)
        )
        self.up = inward("btd,df->btf", (width, ff), ("embed", "ff"))
        self.gate = inward("btd,df->btf", (width, ff), ("embed", "ff")) if gated else None
        self.down = make(
            "btf,fd->btd",
            (ff, width),
            ("ff", "embed"),
            fan_in=ff,
            gain=(2 * config.num_layers) ** -0.5,
            limits=fairseq_limits(config, ff**-0.5, ff**-0.5),
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
        places: TokenLayout,
        cached: KeyValues | RollingCache | None,
        training_key: Key[Array, ""] | None,
    ) -> tuple[Float[Array, "B T D"], KeyValues | RollingCache | None]:
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


def make_norm(config: configs.Model, rngs: nnx.Rngs) -> Any:
    """LayerNorm or RMSNorm over the width, float32, for the gradient of its scale is too.

    That is a sum over all tokens, and over all devices.
    """
    kind = nnx.LayerNorm if config.norm == "layernorm" else nnx.RMSNorm
    return kind(config.width, epsilon=config.norm_epsilon, dtype=jnp.float32, rngs=rngs)
