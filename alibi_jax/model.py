"""The Flax NNX transformer: pre-norm, causal, any position method.

Arrays carry their axes in the einsum strings: B batch, T length, D width, N query heads,
K key heads, H head size, F feed-forward, V vocabulary.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from alibi_jax import config as configs
from alibi_jax.attention import attention
from alibi_jax.positions import PositionMethod, make_position_method
from alibi_jax.sharding import constrain, named_sharding

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


class Projection(nnx.Module):
    """A matrix product over named axes: float32 parameters, accumulated in float32."""

    def __init__(
        self,
        equation: str,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        fan_in: int,
        dtype: str,
        rngs: nnx.Rngs,
        gain: float = 1.0,
    ):
        kernel = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, shape, jnp.float32)
        self.kernel = nnx.Param(kernel * (gain * fan_in**-0.5), axes=axes)
        self.equation = equation
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Array) -> Array:
        """The product, in the compute dtype."""
        # Asking for float32 and casting after: as fast on TPU, several times faster on CPU.
        out = jnp.einsum(
            self.equation,
            x,
            self.kernel[...].astype(self.dtype),
            preferred_element_type=jnp.float32,
        )
        return out.astype(self.dtype)


class Attention(nnx.Module):
    """Causal self-attention with grouped key heads."""

    def __init__(self, config: configs.Model, *, rngs: nnx.Rngs):
        width, heads = config.width, config.num_heads
        kv_heads, size = config.num_kv_heads or heads, width // heads
        make = functools.partial(Projection, dtype=config.dtype, rngs=rngs)
        q_shape, kv_shape = (width, heads, size), (width, kv_heads, size)
        kv_axes = ("embed", "kv_heads", None)
        self.query = make("btd,dnh->btnh", q_shape, ("embed", "heads", None), fan_in=width)
        self.key = make("btd,dkh->btkh", kv_shape, kv_axes, fan_in=width)
        self.value = make("btd,dkh->btkh", kv_shape, kv_axes, fan_in=width)
        self.out = make(
            "btnh,nhd->btd",
            (heads, size, width),
            ("heads", None, "embed"),
            fan_in=width,
            gain=(2 * config.num_layers) ** -0.5,
        )
        self.dropout_rate = config.attention_dropout

    def __call__(
        self,
        x: Float[Array, "B T D"],
        position: PositionMethod,
        positions: Int[Array, "*#B T"],
        segment_ids: Int[Array, "B T"] | None,
        dropout_key: Key[Array, ""] | None,
    ) -> Float[Array, "B T D"]:
        """What the layer adds to its input, in the compute dtype."""
        query = constrain(self.query(x), "batch", None, "heads", None)
        key = constrain(self.key(x), "batch", None, "kv_heads", None)
        value = constrain(self.value(x), "batch", None, "kv_heads", None)
        out = attention(
            position.rotate(query, positions),
            position.rotate(key, positions),
            value,
            bias=position.bias,
            query_positions=positions,
            key_positions=positions,
            query_segment_ids=segment_ids,
            key_segment_ids=segment_ids,
            dropout_rate=self.dropout_rate,
            dropout_key=dropout_key,
        )
        return self.out(out)


class FeedForward(nnx.Module):
    """Two projections with an activation between them, gated or not."""

    def __init__(self, config: configs.Model, *, rngs: nnx.Rngs):
        width, ff = config.width, config.ff_width or 4 * config.width
        self.activation, gated = _ACTIVATIONS[config.activation]
        make = functools.partial(Projection, dtype=config.dtype, rngs=rngs)
        self.up = make("btd,df->btf", (width, ff), ("embed", "ff"), fan_in=width)
        self.gate = (
            make("btd,df->btf", (width, ff), ("embed", "ff"), fan_in=width) if gated else None
        )
        self.down = make(
            "btf,fd->btd",
            (ff, width),
            ("ff", "embed"),
            fan_in=ff,
            gain=(2 * config.num_layers) ** -0.5,
        )
        self.dropout_rate = config.activation_dropout

    def __call__(
        self, x: Float[Array, "B T D"], dropout_key: Key[Array, ""] | None
    ) -> Float[Array, "B T D"]:
        """What the layer adds to its input, in the compute dtype."""
        hidden = constrain(self.up(x), "batch", None, "ff")
        if self.gate is None:
            hidden = self.activation(hidden)
        else:
            hidden = self.activation(self.gate(x)) * hidden
        return self.down(dropout(hidden, self.dropout_rate, dropout_key, salt=0))


class Layer(nnx.Module):
    """Pre-norm: x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: configs.Model, *, rngs: nnx.Rngs):
        self.attention_norm = make_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.ff_norm = make_norm(config, rngs)
        self.ff = FeedForward(config, rngs=rngs)
        self.dropout_rate = config.dropout

    def __call__(
        self,
        x: Float[Array, "B T D"],
        position: PositionMethod,
        positions: Int[Array, "*#B T"],
        segment_ids: Int[Array, "B T"] | None,
        dropout_key: Key[Array, ""] | None,
    ) -> Float[Array, "B T D"]:
        """The residual stream after the layer."""
        keys = [None, None] if dropout_key is None else list(jax.random.split(dropout_key))
        with jax.named_scope("attention"):
            out = self.attention(self.attention_norm(x), position, positions, segment_ids, keys[0])
            x = constrain(x + dropout(out, self.dropout_rate, keys[0], salt=1), "batch", None, None)
        with jax.named_scope("feed_forward"):
            out = self.ff(self.ff_norm(x), keys[1])
            x = constrain(x + dropout(out, self.dropout_rate, keys[1], salt=1), "batch", None, None)
        return x


class Transformer(nnx.Module):
    """A causal language model. Hidden states and logits are separate calls.

    `max_length` is how far a learned position table reaches; nothing else depends on it.
    """

    def __init__(self, config: configs.Model, *, vocab_size: int, max_length: int, rngs: nnx.Rngs):
        width = config.width
        # Standard deviation 1/sqrt(D), scaled up by sqrt(D) on the way in (Vaswani et al.
        # 2017, section 3.4): unit-variance inputs, and tied logits of unit scale.
        make_table = functools.partial(jax.random.normal, shape=(vocab_size, width))
        self.embedding = nnx.Param(make_table(rngs.params()) * width**-0.5, axes=("vocab", "embed"))
        self.output = (
            None
            if config.tied_embeddings
            else nnx.Param(make_table(rngs.params()) * width**-0.5, axes=("vocab", "embed"))
        )
        self.position = make_position_method(
            config.position,
            num_heads=config.num_heads,
            width=width,
            max_length=max_length,
            rngs=rngs,
        )
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = make_norm(config, rngs)
        self.dtype = jnp.dtype(config.dtype)
        self.dropout_rate = config.dropout
        self.remat = config.remat

    @property
    def unembedding(self) -> Float[Array, "V D"]:
        """What hidden states are multiplied with to give logits, float32."""
        return (self.embedding if self.output is None else self.output)[...]

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "*#B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T D"]:
        """The last layer's normalised output, in the compute dtype.

        `positions` default to 0, 1, 2, ...; with `segment_ids` (packing, padding: 0 is
        padding) they count from each segment's start. Attention is causal by index. Dropout
        happens with a key only.
        """
        if positions is None:
            positions = (
                jnp.arange(tokens.shape[1], dtype=jnp.int32)
                if segment_ids is None
                else segment_positions(segment_ids)
            )
        # Gathered whole: looked up in a table split both ways, rows would be assembled one by one.
        # In float32: the gradient adds up a row for each time that a token occurs.
        table = constrain(self.embedding[...], None, None)
        x = table[tokens] * math.sqrt(table.shape[1])
        x = self.position.embed(x.astype(self.dtype), positions)
        x = constrain(x, "batch", None, None)
        x = dropout(x, self.dropout_rate, dropout_key, salt=0)
        for number, layer in enumerate(self.layers, start=1):
            run = functools.partial(
                layer,
                position=self.position,
                positions=positions,
                segment_ids=segment_ids,
                dropout_key=None
                if dropout_key is None
                else jax.random.fold_in(dropout_key, number),
            )
            x = jax.checkpoint(run)(x) if self.remat else run(x)
        return self.norm(x)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in float32. Losses project chunk by chunk instead (`losses.token_nll`)."""
        return jnp.einsum(
            "btd,vd->btv",
            hidden,
            self.unembedding.astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )


def make_norm(config: configs.Model, rngs: nnx.Rngs) -> Any:
    """LayerNorm or RMSNorm over the width: statistics float32, result in the compute dtype."""
    kind = nnx.LayerNorm if config.norm == "layernorm" else nnx.RMSNorm
    return kind(config.width, dtype=jnp.dtype(config.dtype), rngs=rngs)


def segment_positions(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Positions that count from 0 within each run of equal segment ids, int32."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def make_model(config: configs.Config, vocab_size: int, rngs: nnx.Rngs) -> Transformer:
    """The model of a whole configuration; learned positions reach to the training length."""
    return Transformer(
        config.model, vocab_size=vocab_size, max_length=config.train.length, rngs=rngs
    )


def abstract_model(
    config: configs.Config, vocab_size: int, mesh: jax.sharding.Mesh
) -> tuple[Any, dict[str, Any]]:
    """(graphdef, parameters as ShapeDtypeStructs placed on `mesh`), without memory.

    Parameters are plain nested dicts; `nnx.merge(graphdef, params)` is the model.
    """
    model = nnx.eval_shape(lambda: make_model(config, vocab_size, nnx.Rngs(0)))
    graphdef, state = nnx.split(model, nnx.Param)

    def place(param: nnx.Variable) -> jax.ShapeDtypeStruct:
        axes = param.get_metadata().get("axes", ())
        value = param.get_value()
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=named_sharding(mesh, *axes))

    placed = jax.tree.map(place, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return graphdef, nnx.to_pure_dict(placed)


def initial_params(config: configs.Config, vocab_size: int, key: Key[Array, ""]) -> dict[str, Any]:
    """Fresh parameters, as `abstract_model` lays them out; to be called under `jax.jit`."""
    model = make_model(config, vocab_size, nnx.Rngs(params=key))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))
