"""The Flax NNX transformer: pre-norm, causal, with any position method.

Axes: B batch, T tokens, D width, V vocabulary, L layers, N query heads.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from alibi_jax import config as configs
from alibi_jax.attention.statistics import AttentionStatistics
from alibi_jax.distributed.sharding import constrain
from alibi_jax.model.adaptive_softmax import AdaptiveVocabulary
from alibi_jax.model.dropout import dropout
from alibi_jax.model.kv_cache import (
    BoundedKVCache,
    KVCache,
    init_bounded_kv_cache,
    init_kv_cache,
    linear_bias_slopes,
)
from alibi_jax.model.layer import make_norm
from alibi_jax.model.layer_stack import Layers, LayerStack, apply_layers_with_cache
from alibi_jax.model.packing import segment_positions, segment_runs
from alibi_jax.model.token_layout import TokenLayout
from alibi_jax.model.vocabulary import Vocabulary
from alibi_jax.positions import METHODS, make_position_method


class Transformer(nnx.Module):
    """A causal language model; hidden states and logits are computed by separate calls.

    `train_length` sets three things: the length of a learned position table, the original length in
    the rescaling `yarn`, and the initial threshold of FIRE. Nothing else depends on it.
    """

    def __init__(
        self, config: configs.Model, *, vocab_size: int, train_length: int, rngs: nnx.Rngs
    ):
        vocabulary = AdaptiveVocabulary if config.cutoffs else Vocabulary
        self.vocabulary = vocabulary(config, vocab_size, rngs)
        # The methods that all layers share, by name; a layer holds its own method.
        self.positions = nnx.Dict(
            {
                name: make_position_method(name, config, train_length=train_length, rngs=rngs)
                for name in dict.fromkeys(config.positions)
                if not METHODS[name].per_layer
            }
        )
        self.layers = LayerStack(config, train_length=train_length, rngs=rngs)
        self.norm = make_norm(config, rngs) if config.final_norm else None
        self.kv_shape = config.num_kv_heads or config.num_heads, config.head_size
        self.dtype = jnp.dtype(config.dtype)
        self.dropout_rate = config.dropout

    @property
    def max_length(self) -> int | None:
        """The longest input that the position methods can handle; None: any length."""
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
        """The final layer's output after the norm, in the compute dtype.

        With `last`, only the last `last` tokens of each row are returned. `positions` default to
        0, 1, 2, ...; with `segment_ids` (for packed rows and padding, whose id is 0) they start at
        0 in each segment. Attention is causal by index. A `training_key` turns on dropout, and
        position methods that draw random positions draw them from it.
        """
        consecutive = positions is None
        if positions is None and segment_ids is not None:
            positions, segment_ids = segment_positions(segment_ids), segment_runs(segment_ids)
        elif positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        if training_key is not None:
            # The embedding's and the layers' dropout fold in the numbers up to `num_layers`.
            key = jax.random.fold_in(training_key, self.layers.num_layers + 1)
            for method in self.positions.values():
                new_positions = method.training_positions(positions, key, tokens.shape[0])
                consecutive = consecutive and new_positions is positions
                positions = new_positions
        layout = TokenLayout(positions, positions, segment_ids, segment_ids, 0, consecutive)
        x = self._embed(tokens, layout, training_key)
        return self._normalize(self.layers(x, self.positions, layout, training_key, last))

    def attention_statistics(self, tokens: Int[Array, "B T"]) -> AttentionStatistics:
        """Statistics of each layer's attention in `hidden_states`: `[L, B, N]`, `[L, B, N, T]`."""
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        layout = TokenLayout(positions, positions, None, None, 0, True)
        x, statistics = self._embed(tokens, layout, None), []
        for layer, position in self.unstacked_layers():
            statistics.append(layer.attention.statistics(layer.attention_norm(x), position, layout))
            x, _ = layer(x, position, layout, None, None)
        return jax.tree.map(lambda *arrays: jnp.stack(arrays), *statistics)

    def init_cache(
        self,
        batch_size: int,
        capacity: int,
        *,
        tolerance: float | None = None,
        gap: float | None = None,
    ) -> KVCache | BoundedKVCache:
        """An empty cache for `capacity` tokens per row; `hidden_states_with_cache` fills it.

        A `tolerance` is for models with linear biases only. Each head then keeps only its last
        keys. The head keeps enough of them that the omitted keys together have at most the share
        `tolerance` of a row's attention weight. This holds for queries q whose own key k satisfies
        |q|·K/sqrt(H) − q·k/sqrt(H) <= `gap`, where K is the greatest norm of a key and H is the
        head size. No head keeps more than `capacity` keys, and the number of tokens is not limited.
        The `omitted_share` of the cache is computed from the data and proves whether the gap was
        wide enough.

        Raises:
            ValueError: if only one of tolerance and gap is given, if either is out of range, or
                if the position method of a layer is not a linear bias alone.
        """
        if (tolerance is None) != (gap is None):
            raise ValueError(f"tolerance={tolerance} and gap={gap}: give both, or neither")
        methods = self.layers.position_methods(self.positions)
        options = batch_size, capacity, self.kv_shape, self.dtype
        if tolerance is None or gap is None:
            return init_kv_cache(methods, *options)
        pattern = self.layers.pattern
        slopes = [
            linear_bias_slopes(pattern[number % len(pattern)], method)
            for number, method in enumerate(methods)
        ]
        return init_bounded_kv_cache(slopes, *options, gap=gap, tolerance=tolerance)

    def hidden_states_with_cache(
        self,
        tokens: Int[Array, "B T"],
        cache: KVCache | BoundedKVCache,
        *,
        token_mask: Bool[Array, "B T"] | None = None,
        layers: Layers | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | BoundedKVCache]:
        """`hidden_states` of the next tokens of each row, and the cache with these tokens added.

        Chunks of any size give the same outputs as one pass over all tokens. `token_mask` is False
        for padding, which does not count in the positions of a row. Outputs past the end of the
        cache are NaN. A bounded cache has no end; its `omitted_share` bounds what it omits. A loop
        over single tokens should pass `layers=model.unstacked_layers()`; otherwise each step slices
        the layers out of their stacks again.

        Raises:
            ValueError: if the tokens do not fit into the cache and that is known while tracing.
        """
        if token_mask is None:
            token_mask = jnp.ones(tokens.shape, bool)
        layout, cache = cache.add_tokens(token_mask)
        x = self._embed(tokens, layout, None)
        x, layer_caches = apply_layers_with_cache(
            layers or self.unstacked_layers(), x, layout, cache.layers
        )
        hidden = self._normalize(x)
        if isinstance(cache, KVCache):
            # If a written slice would pass the last slot, XLA moves it back, over earlier slots.
            hidden = jnp.where(cache.num_tokens <= cache.capacity, hidden, jnp.nan)
        return hidden, cache._replace(layers=layer_caches)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in float32. Losses compute them in chunks instead (`token_nll`)."""
        return self.vocabulary.logits(hidden)

    def token_nll(
        self,
        hidden: Float[Array, "B T D"],
        targets: Int[Array, "B T"],
        *,
        training_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T"]:
        """Negative log-likelihood of each target in nats, float32.

        `training_key` is the key that `hidden_states` was called with.
        """
        if training_key is not None:
            training_key = jax.random.fold_in(training_key, self.layers.num_layers + 2)
        return self.vocabulary.token_nll(hidden, targets, training_key)

    def unstacked_layers(self) -> Layers:
        """Each layer, sliced out of its stack, with its position method."""
        return self.layers.unstacked_layers(self.positions)

    def _embed(
        self, tokens: Int[Array, "B T"], layout: TokenLayout, training_key: Key[Array, ""] | None
    ) -> Float[Array, "B T D"]:
        """Token embeddings with position embeddings added, after dropout."""
        x = self.vocabulary.embed(tokens).astype(self.dtype)
        for method in self.positions.values():
            x = method.embed(x, layout.query_positions)
        x = constrain(x, "batch", "sequence", None)
        return dropout(x, self.dropout_rate, training_key, salt=0)

    def _normalize(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applies the final norm, if the model has one."""
        return x if self.norm is None else self.norm(x).astype(self.dtype)
