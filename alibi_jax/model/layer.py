"""A layer of the transformer: attention and a feed-forward network, each after a norm.

Axes: B batch, T queries, S keys, D width, F width of the feed-forward network.
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

NORMS: dict[str, Any] = {"layernorm": nnx.LayerNorm, "rmsnorm": nnx.RMSNorm}


class FeedForward(nnx.Module):
    """A feed-forward network: two projections with an activation between them.

    A gated network has a third projection, the gate, and applies the activation to it. The result
    multiplies the output of the first projection.
    """

    def __init__(self, config: configs.Model, *, rngs: nnx.Rngs):
        width, ff = config.width, config.ff_width or 4 * config.width
        choice = configs.ACTIVATIONS[config.activation]
        self.activation, gated = choice.function, choice.gated
        make = functools.partial(
            Projection, dtype=config.dtype, use_bias=config.use_bias, rngs=rngs
        )
        make_input_projection = functools.partial(
            make, fan_in=width, limits=fairseq_limits(config, width**-0.5, width**-0.5)
        )
        self.up = make_input_projection("btd,df->btf", (width, ff), ("embed", "ff"))
        self.gate = (
            make_input_projection("btd,df->btf", (width, ff), ("embed", "ff")) if gated else None
        )
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
        """The update of the residual stream, in the compute dtype."""
        hidden = constrain(self.up(x), "batch", "sequence", "ff")
        if self.gate is None:
            hidden = self.activation(hidden)
        else:
            hidden = self.activation(self.gate(x)) * hidden
        return self.down(dropout(hidden, self.dropout_rate, training_key, salt=0))


class Layer(nnx.Module):
    """A pre-norm layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

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
        layout: TokenLayout,
        cache: KeyValues | RollingCache | None,
        training_key: Key[Array, ""] | None,
    ) -> tuple[Float[Array, "B T D"], KeyValues | RollingCache | None]:
        """The residual stream of the queries after the layer, and the updated cache, if any."""
        keys = [None, None] if training_key is None else list(jax.random.split(training_key))
        with jax.named_scope("attention"):
            out, cache = self.attention(self.attention_norm(x), position, layout, cache, keys[0])
            x = x[:, -layout.num_queries :]
            x = self._add_update(x, out, keys[0])
        with jax.named_scope("feed_forward"):
            out = self.ff(self.ff_norm(x), keys[1])
            x = self._add_update(x, out, keys[1])
        return x, cache

    def _add_update(self, x: Array, out: Array, training_key: Key[Array, ""] | None) -> Array:
        out = dropout(out, self.dropout_rate, training_key, salt=1)
        return constrain(x + out, "batch", "sequence", None)


def make_norm(config: configs.Model, rngs: nnx.Rngs) -> Any:
    """LayerNorm or RMSNorm over the width, in float32.

    Therefore the gradient of its scale, a sum over all tokens and devices, is summed in float32.
    """
    return NORMS[config.norm](
        config.width, epsilon=config.norm_epsilon, dtype=jnp.float32, rngs=rngs
    )
