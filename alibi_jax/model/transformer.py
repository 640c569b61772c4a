"""The Flax NNX transformer: pre-norm, causal, any position method.

Arrays carry their axes in the einsum strings: B batch, T length, D width, V vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from alibi_jax import config as configs
from alibi_jax.attention.rolling_cache import init_rolling_cache
from alibi_jax.attention.statistics import AttentionStatistics
from alibi_jax.distributed.sharding import LOGICAL_AXIS_RULES, axis_size, constrain, named_sharding
from alibi_jax.model.adaptive_softmax import AdaptiveVocabulary, band_width
from alibi_jax.model.dropout import dropout
from alibi_jax.model.kv_cache import BoundedKVCache, KeyValues, KVCache, bounding_slopes
from alibi_jax.model.layer import Layer, make_norm
from alibi_jax.model.layer_stack import Layers, LayerStack, layers_with_cache
from alibi_jax.model.packing import segment_positions, segment_runs
from alibi_jax.model.token_layout import TokenLayout
from alibi_jax.model.vocabulary import ROWS, Vocabulary
from alibi_jax.positions import METHODS, PositionMethod, make_position_method


class Transformer(nnx.Module):
    """A causal language model. Hidden states and logits are separate calls.

    `train_length` is how far a learned position table reaches, what rescaled methods are scaled
    from, and where FIRE's threshold starts; nothing else depends on it.
    """

    def __init__(
        self, config: configs.Model, *, vocab_size: int, train_length: int, rngs: nnx.Rngs
    ):
        vocabulary = AdaptiveVocabulary if config.cutoffs else Vocabulary
        self.vocabulary = vocabulary(config, vocab_size, rngs)
        # The methods that serve all layers, by name; the others are in the layers.
        self.positions = nnx.Dict(
            {
                name: make_position_method(name, config, train_length=train_length, rngs=rngs)
                for name in dict.fromkeys(config.positions)
                if not METHODS[name].per_layer
            }
        )
        self.layers = LayerStack(config, train_length=train_length, rngs=rngs)
        self.norm = make_norm(config, rngs) if config.final_norm else None
        self.dtype = jnp.dtype(config.dtype)
        self.dropout_rate = config.dropout

    @property
    def max_length(self) -> int | None:
        """The greatest length that the position methods can serve; None: any."""
        limits = [method.max_length for method in self.positions.values()]
        return min((limit for limit in limits if limit is not None), default=None)

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "*#B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        training_key: Key[Array, ""] | None = None,
        last: int | None = None,
    ) -> Float[Array, "B _ D"]:
        """The last layer's output, normalised, in the compute dtype, of the `last` tokens or all.

        `positions` default to 0, 1, 2, ...; with `segment_ids` (packing, padding: 0 is
        padding) they count from each segment's start. Attention is causal by index. With a
        `training_key` there is dropout, and positions are drawn where the method draws them.
        """
        counted = positions is None
        if positions is None and segment_ids is not None:
            positions, segment_ids = segment_positions(segment_ids), segment_runs(segment_ids)
        elif positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        if training_key is not None:
            # Past the numbers of the embedding's and the layers' dropout.
            key = jax.random.fold_in(training_key, self.layers.num_layers + 1)
            for method in self.positions.values():
                drawn = method.training_positions(positions, key, tokens.shape[0])
                counted, positions = counted and drawn is positions, drawn
        places = TokenLayout(positions, positions, segment_ids, segment_ids, 0, counted)
        x = self._embedded(tokens, places, training_key)
        return self._normed(self.layers(x, self.positions, places, training_key, last))

    def attention_statistics(self, tokens: Int[Array, "B T"]) -> AttentionStatistics:
        """How each layer attends in `hidden_states` of whole rows: `[L, B, N]`, `[L, B, N, T]`."""
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        places = TokenLayout(positions, positions, None, None, 0, True)
        x, layers = self._embedded(tokens, places, None), []
        for layer, position in self.unstacked_layers():
            layers.append(layer.attention.statistics(layer.attention_norm(x), position, places))
            x, _ = layer(x, position, places, None, None)
        return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)

    def init_cache(
        self,
        batch_size: int,
        capacity: int,
        *,
        tolerance: float | None = None,
        gap: float | None = None,
    ) -> KVCache | BoundedKVCache:
        """An empty cache for so many tokens a row; `hidden_states_with_cache` fills it.

        With a `tolerance`, for models of linear biases alone, each head has but as many of the
        last keys as it takes for all others to have at most that share of a row's weight,
        wherever |q|·K/sqrt(H) − q·k/sqrt(H) is at most `gap` (K: the greatest norm of a key; k:
        the query's own key). Then `capacity` is only the most that any head has. Whether the
        gap was wide enough is in `left_out` of the cache, which is proved from the data.

        Raises:
            ValueError: for one of tolerance and gap without the other, either out of range, or
                with a layer whose position method is not a linear bias alone.
        """
        if (tolerance is None) != (gap is None):
            raise ValueError(f"tolerance={tolerance} and gap={gap}: give both, or neither")
        rows = functools.partial(jnp.zeros, dtype=jnp.int32)
        if tolerance is not None and gap is not None:
            layer_caches, pattern = [], self.layers.pattern
            for number, (stack, position) in enumerate(self.layers.stacked(self.positions)):
                *_, num_kv_heads, head_size = stack.attention.key.kernel.shape
                empty_layer = init_rolling_cache(
                    bounding_slopes(pattern[number % len(pattern)], position),
                    batch_size=batch_size,
                    capacity=capacity,
                    num_kv_heads=num_kv_heads,
                    head_size=head_size,
                    dtype=self.dtype,
                    gap=gap,
                    tolerance=tolerance,
                )
                layer_caches.append(empty_layer)
            return BoundedKVCache(tuple(layer_caches), rows(batch_size), jnp.int32(0))

        def empty(stack: Layer, position: PositionMethod) -> KeyValues:
            projections = stack.attention.key, stack.attention.value
            key, value = (
                jnp.zeros((batch_size, capacity, *p.kernel.shape[2:]), self.dtype)
                for p in projections
            )
            gates = position.num_gates
            return KeyValues(
                key, value, jnp.zeros((batch_size, capacity, gates)) if gates else None
            )

        layers = tuple(
            empty(stack, position) for stack, position in self.layers.stacked(self.positions)
        )
        shape = batch_size, capacity
        return KVCache(layers, rows(shape), rows(shape), jnp.int32(0))

    def hidden_states_with_cache(
        self,
        tokens: Int[Array, "B T"],
        cache: KVCache | BoundedKVCache,
        *,
        real: Bool[Array, "B T"] | None = None,
        layers: Layers | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | BoundedKVCache]:
        """`hidden_states` of the next tokens of each row, and the cache with them in it.

        In chunks of any sizes the outputs are those of the whole. `real` is false for padding,
        before which a row's positions do not count. Past the cache's end outputs are NaN; a
        bounded cache has none, and what was left out counts in its `left_out`. A loop of single
        tokens gives the `unstacked_layers`, or it would take them from their stacks for each.

        Raises:
            ValueError: where it is known while tracing that the tokens don't fit into the cache.
        """
        batch_size, length = tokens.shape
        if real is None:
            real = jnp.ones((batch_size, length), bool)
        ids = real.astype(jnp.int32)
        if isinstance(cache, BoundedKVCache):
            positions = jnp.maximum(cache.real[:, None] + jnp.cumsum(ids, axis=1) - 1, 0)
            places = TokenLayout(positions, positions, ids, ids, cache.used, False)
            x = self._embedded(tokens, places, None)
            x, layer_caches = layers_with_cache(
                layers or self.unstacked_layers(), x, places, cache.layers
            )
            return self._normed(x), BoundedKVCache(
                layer_caches, cache.real + ids.sum(axis=1), cache.used + length
            )
        capacity = cache.positions.shape[1]
        end = cache.used + length
        if length > capacity or (not isinstance(end, jax.core.Tracer) and end > capacity):
            raise ValueError(
                f"{length} more tokens don't fit into a cache of {capacity} slots, "
                f"{cache.used} of them taken: make it larger"
            )
        before = cache.segment_ids.sum(axis=1, keepdims=True)
        positions = jnp.maximum(before + jnp.cumsum(ids, axis=1) - 1, 0)
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
        key_positions = write(cache.positions, positions, cache.used)
        key_ids = write(cache.segment_ids, ids, cache.used)
        places = TokenLayout(positions, key_positions, ids, key_ids, cache.used, False)
        x = self._embedded(tokens, places, None)
        x, keys = layers_with_cache(layers or self.unstacked_layers(), x, places, cache.layers)
        # A slice written past the end would have been moved back over the last slots.
        hidden = jnp.where(end <= capacity, self._normed(x), jnp.nan)
        return hidden, KVCache(keys, key_positions, key_ids, end)

    def _normed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return x if self.norm is None else self.norm(x).astype(self.dtype)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in float32. Losses project chunk by chunk instead (`token_nll`)."""
        return self.vocabulary.logits(hidden)

    def token_nll(
        self,
        hidden: Float[Array, "B T D"],
        targets: Int[Array, "B T"],
        *,
        training_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T"]:
        """Negative log-likelihood in nats of each target, float32.

        A `training_key` is the one that `hidden_states` had.
        """
        if training_key is not None:
            training_key = jax.random.fold_in(training_key, self.layers.num_layers + 2)
        return self.vocabulary.token_nll(hidden, targets, training_key)

    def unstacked_layers(self) -> Layers:
        """Each layer with its position method."""
        return self.layers.unstacked(self.positions)

    def _embedded(
        self, tokens: Int[Array, "B T"], places: TokenLayout, training_key: Key[Array, ""] | None
    ) -> Float[Array, "B T D"]:
        x = self.vocabulary.embed(tokens).astype(self.dtype)
        for method in self.positions.values():
            x = method.embed(x, places.query_positions)
        x = constrain(x, "batch", "sequence", None)
        return dropout(x, self.dropout_rate, training_key, salt=0)


def check_model_fits(model: configs.Model, mesh: jax.sharding.Mesh) -> None:
    """Raises ConfigError where a size of the model does not split evenly over the mesh."""
    kv_heads = model.num_kv_heads or model.num_heads
    ff = model.ff_width or 4 * model.width
    check_divides(f"model.width={model.width}", model.width, "embed", mesh)
    check_divides(f"model.num_heads={model.num_heads}", model.num_heads, "heads", mesh)
    check_divides(f"model.num_kv_heads={model.num_kv_heads}", kv_heads, "kv_heads", mesh)
    check_divides(f"model.ff_width={model.ff_width}", ff, "ff", mesh)
    check_divides(f"the vocabulary in multiples of {ROWS}", ROWS, "vocab", mesh)
    for number in range(1, len(model.cutoffs) + 1):
        width = band_width(model, number)
        what = f"the width {width} of band {number} of model.adaptive_cutoffs"
        check_divides(what, width, "embed", mesh)


def check_divides(what: str, size: int, logical: str, mesh: jax.sharding.Mesh) -> None:
    """Raises ConfigError, naming `what`, where a size does not split evenly over the mesh."""
    devices = axis_size(mesh, logical)
    if size % devices:
        axes = " x ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in LOGICAL_AXIS_RULES[logical])
        raise configs.ConfigError(
            f"{what} does not divide by the {devices} devices of {axes}: "
            f"choose a multiple of {devices}, or another mesh"
        )


def make_model(config: configs.Config, vocab_size: int, rngs: nnx.Rngs) -> Transformer:
    """The model of a whole configuration; learned positions reach to the training length."""
    return Transformer(
        config.model, vocab_size=vocab_size, train_length=config.train.length, rngs=rngs
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
