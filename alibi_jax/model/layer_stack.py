"""The layers of a model in stacks, so that a loop runs many layers and they are compiled once.

The pattern is a list of position methods, which the layers have in turn. A stack holds the layers
that have the same index in the pattern.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from alibi_jax import config as configs
from alibi_jax.attention.rolling_cache import RollingCache
from alibi_jax.model.kv_cache import KeyValues
from alibi_jax.model.layer import Layer
from alibi_jax.model.token_layout import TokenLayout
from alibi_jax.positions import PositionMethod

AnyModule = TypeVar("AnyModule", bound=nnx.Module)

# The logical axis along which parameters are stacked, and the key of all stacks in the parameters.
LAYER_AXIS = "layers"

# The greatest number of repetitions of the pattern that run without a loop. A loop writes and reads
# the saved arrays of each layer once more. On a CPU this adds a third to the time of a step with
# two layers, and a tenth with eight.
_MAX_UNROLLED = 4
# Layers, each with its position method: the layer's own method, or one that all layers share.
Layers = list[tuple[Layer, PositionMethod]]


class LayerStack(nnx.Module):
    """All layers of a model, in one stack for each index in the pattern of position methods.

    With a pattern of P methods, layer n is layer n // P of stack n % P. The model holds the
    methods that all layers share; they are passed here by name, as `methods`.
    """

    def __init__(self, config: configs.Model, *, train_length: int, rngs: nnx.Rngs):
        self.num_layers, self.pattern = config.num_layers, config.positions
        self.remat = config.remat

        def layer_stack(index: int, position: str) -> Layer:
            def make_layer(rngs: nnx.Rngs) -> Layer:
                return Layer(config, position, train_length=train_length, rngs=rngs)

            stack_size = -(-(config.num_layers - index) // len(self.pattern))
            return make_stack(make_layer, stack_size, rngs)

        self.stacks = nnx.List(
            [layer_stack(index, position) for index, position in enumerate(self.pattern)]
        )

    def position_methods(self, methods: Mapping[str, PositionMethod]) -> list[PositionMethod]:
        """The position method of each layer; layers' own methods are still stacked."""
        stacks = [self.stacks[n % len(self.pattern)] for n in range(self.num_layers)]
        return [self._position_method(stack, n, methods) for n, stack in enumerate(stacks)]

    def unstacked_layers(self, methods: Mapping[str, PositionMethod]) -> Layers:
        """Each layer, sliced out of its stack, with its position method."""
        pattern_length, stacks = len(self.pattern), [unstack(stack) for stack in self.stacks]
        layers = [stacks[n % pattern_length][n // pattern_length] for n in range(self.num_layers)]
        return [(layer, self._position_method(layer, n, methods)) for n, layer in enumerate(layers)]

    def _position_method(
        self, layer: Layer, number: int, methods: Mapping[str, PositionMethod]
    ) -> PositionMethod:
        own_method = layer.attention.position
        return own_method or methods[self.pattern[number % len(self.pattern)]]

    def __call__(
        self,
        x: Float[Array, "B T D"],
        methods: Mapping[str, PositionMethod],
        layout: TokenLayout,
        training_key: Key[Array, ""] | None,
        last: int | None = None,
    ) -> Float[Array, "B _ D"]:
        """The residual stream after all layers, of all tokens or of the last `last` tokens."""
        # With `last` the final layer has fewer queries, so that it cannot be in the loop.
        repetitions = (self.num_layers - (last is not None)) // len(self.pattern)
        first = repetitions * len(self.pattern) if repetitions > _MAX_UNROLLED else 0
        if first:
            x = self._scan_repetitions(
                x, repetitions, methods, layout, training_key, slice_in_loop=last is not None
            )
        if first == self.num_layers:
            return x
        layers = self.unstacked_layers(methods)
        for number, (layer, position) in enumerate(layers[first:], start=first):
            if last is not None and number + 1 == self.num_layers:
                layout = layout.last_queries(last)
            x = self._apply_layer(x, layer, position, layout, training_key, number)
        return x

    def _scan_repetitions(
        self,
        x: Float[Array, "B T D"],
        repetitions: int,
        methods: Mapping[str, PositionMethod],
        layout: TokenLayout,
        training_key: Key[Array, ""] | None,
        *,
        slice_in_loop: bool,
    ) -> Float[Array, "B T D"]:
        """The residual stream after the first repetitions of the pattern, which a loop runs.

        With `slice_in_loop` the loop slices its layers out of the stacks, which copies nothing.
        Without it the slices are copied before the loop, which is better for gradients: JAX would
        otherwise add up the gradient of the whole stacks in each step of the loop.
        """
        graphdef, stacks = nnx.split(self.stacks)
        sliced = None if slice_in_loop else jax.tree.map(lambda stack: stack[:repetitions], stacks)

        def apply_pattern(x: Array, scanned: tuple[Any, Array]) -> tuple[Array, None]:
            params, repetition = scanned
            if params is None:
                params = jax.tree.map(lambda stack: stack[repetition], stacks)
            layers, first = nnx.merge(graphdef, params), repetition * len(self.pattern)
            for index, layer in enumerate(layers):
                position = self._position_method(layer, index, methods)
                x = self._apply_layer(x, layer, position, layout, training_key, first + index)
            return x, None

        scanned = sliced, jnp.arange(repetitions, dtype=jnp.int32)
        return jax.lax.scan(apply_pattern, x, scanned)[0]

    def _apply_layer(
        self,
        x: Float[Array, "B S D"],
        layer: Layer,
        position: PositionMethod,
        layout: TokenLayout,
        training_key: Key[Array, ""] | None,
        number: int | Int[Array, ""],
    ) -> Float[Array, "B T D"]:
        """Applies a layer; the backward pass recomputes what `remat` does not keep."""
        key = None if training_key is None else jax.random.fold_in(training_key, number + 1)
        run: Callable[[Array], Any] = functools.partial(
            layer, position=position, layout=layout, cache=None, training_key=key
        )
        keeps = configs.REMATS[self.remat].keeps
        if keeps is not None:
            policy = jax.checkpoint_policies.save_only_these_names(*keeps)
            # A loop recomputes in a loop of its own, which XLA cannot merge with the forward pass.
            in_loop = not isinstance(number, int)
            run = jax.checkpoint(run, policy=policy, prevent_cse=not in_loop)
        return run(x)[0]


def apply_layers_with_cache(
    layers: Layers,
    x: Float[Array, "B T D"],
    layout: TokenLayout,
    caches: Sequence[KeyValues | RollingCache],
) -> tuple[Float[Array, "B T D"], tuple[Any, ...]]:
    """The residual stream after the layers, and the cache of each layer with the new tokens."""
    new_caches = []
    for (layer, position), cache in zip(layers, caches, strict=True):
        x, new_cache = layer(x, position, layout, cache, None)
        new_caches.append(new_cache)
    return x, tuple(new_caches)


def make_stack(make: Callable[[nnx.Rngs], AnyModule], count: int, rngs: nnx.Rngs) -> AnyModule:
    """A stack of `count` modules from `make`: one module whose parameters have a new first axis.

    Each module is made from a random key of its own.
    """

    def parameters(key: Array) -> Any:
        return nnx.split(make(nnx.Rngs(params=key)))[1]

    # The module's structure is the same for all keys, and has no arrays.
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    stack = nnx.merge(graphdef, jax.vmap(parameters)(jax.random.split(rngs.params(), count)))
    for _, param in nnx.iter_graph(stack):
        if isinstance(param, nnx.Param):
            param.set_metadata(axes=(LAYER_AXIS, *param.get_metadata().get("axes", ())))
    return stack


def unstack(stack: AnyModule) -> list[AnyModule]:
    """The modules of a stack."""
    graphdef, state = nnx.split(stack)
    leaves, structure = jax.tree.flatten(state)
    # All slices are taken at once: the gradient is then assembled once, not once per module.
    leaves_by_module = zip(*(jnp.unstack(leaf) for leaf in leaves))
    return [
        nnx.merge(graphdef, jax.tree.unflatten(structure, module_leaves))
        for module_leaves in leaves_by_module
    ]


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Whether the parameter at this path in a model's parameters is stacked."""
    return bool(path) and getattr(path[0], "key", None) == LAYER_AXIS
