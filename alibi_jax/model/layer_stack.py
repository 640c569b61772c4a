"""The layers one after the other: alike, and so compiled once, where there are more than a few."""

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

# The name of the axis along which parameters are stacked, and of what holds a model's stacks.
AXIS = "layers"

# So few periods are not worth a loop, which writes and reads what is kept of each layer once more:
# a third more of a step's time with two layers on a CPU, a tenth more with eight.
_UNROLLED = 4
# Layers, each with its position method: its own, or one that serves all layers.
Layers = list[tuple[Layer, PositionMethod]]


class LayerStack(nnx.Module):
    """All layers, in a stack for each place in the pattern of position methods.

    Layer number n is number n // period of stack n % period. Methods that serve all layers are the
    model's, and given by name.
    """

    def __init__(self, config: configs.Model, *, train_length: int, rngs: nnx.Rngs):
        self.num_layers, self.pattern = config.num_layers, config.positions
        self.remat = config.remat

        def stack(place: int, position: str) -> Layer:
            def make(rngs: nnx.Rngs) -> Layer:
                return Layer(config, position, train_length=train_length, rngs=rngs)

            return make_stack(make, -(-(config.num_layers - place) // len(self.pattern)), rngs)

        self.stacks = nnx.List([stack(*each) for each in enumerate(self.pattern)])

    def stacked(self, methods: Mapping[str, PositionMethod]) -> Layers:
        """Of each layer the stack that it is in, with its or their position method."""
        period = len(self.pattern)
        numbers = range(self.num_layers)
        return [self._placed(self.stacks[n % period], n, methods) for n in numbers]

    def unstacked(self, methods: Mapping[str, PositionMethod]) -> Layers:
        """Each layer with its position method."""
        period, stacks = len(self.pattern), [unstack(stack) for stack in self.stacks]
        numbers = range(self.num_layers)
        return [self._placed(stacks[n % period][n // period], n, methods) for n in numbers]

    def _placed(
        self, layer: Layer, number: int, methods: Mapping[str, PositionMethod]
    ) -> tuple[Layer, PositionMethod]:
        own = layer.attention.position
        return layer, own or methods[self.pattern[number % len(self.pattern)]]

    def __call__(
        self,
        x: Float[Array, "B T D"],
        methods: Mapping[str, PositionMethod],
        places: TokenLayout,
        training_key: Key[Array, ""] | None,
        last: int | None = None,
    ) -> Float[Array, "B _ D"]:
        """The residual stream of the `last` tokens, or all, after all layers."""
        # Of the layers that are alike: the last one is not, where it has fewer queries.
        periods = (self.num_layers - (last is not None)) // len(self.pattern)
        first = periods * len(self.pattern) if periods > _UNROLLED else 0
        if first:
            x = self._looped(x, periods, methods, places, training_key, last is not None)
        if first == self.num_layers:
            return x
        for number, (layer, position) in enumerate(self.unstacked(methods)[first:], start=first):
            if last is not None and number + 1 == self.num_layers:
                places = places.ending(last)
            x = self._one(x, layer, position, places, training_key, number)
        return x

    def _looped(
        self,
        x: Float[Array, "B T D"],
        periods: int,
        methods: Mapping[str, PositionMethod],
        places: TokenLayout,
        training_key: Key[Array, ""] | None,
        in_place: bool,
    ) -> Float[Array, "B T D"]:
        """After the first so many periods of the pattern.

        `in_place`, nothing is copied of stacks of which not all are wanted; but for gradients a
        copy is better, which would otherwise be added up in each step of the loop.
        """
        graphdef, stacks = nnx.split(self.stacks)
        given = None if in_place else jax.tree.map(lambda stack: stack[:periods], stacks)

        def period(x: Array, each: tuple[Any, Array]) -> tuple[Array, None]:
            given, index = each
            if given is None:
                given = jax.tree.map(lambda stack: stack[index], stacks)
            layers, first = nnx.merge(graphdef, given), index * len(self.pattern)
            for place, layer in enumerate(layers):
                placed = self._placed(layer, place, methods)
                x = self._one(x, *placed, places, training_key, first + place)
            return x, None

        return jax.lax.scan(period, x, (given, jnp.arange(periods, dtype=jnp.int32)))[0]

    def _one(
        self,
        x: Float[Array, "B S D"],
        layer: Layer,
        position: PositionMethod,
        places: TokenLayout,
        training_key: Key[Array, ""] | None,
        number: int | Int[Array, ""],
    ) -> Float[Array, "B T D"]:
        """One layer, which may be computed again in the backward pass."""
        key = None if training_key is None else jax.random.fold_in(training_key, number + 1)
        run: Callable[[Array], Any] = functools.partial(
            layer, position=position, places=places, cached=None, training_key=key
        )
        keeps = configs.REMATS[self.remat].keeps
        if keeps is not None:
            policy = jax.checkpoint_policies.save_only_these_names(*keeps)
            # Within a loop nothing that is computed again could be taken for what was before.
            looped = not isinstance(number, int)
            run = jax.checkpoint(run, policy=policy, prevent_cse=not looped)
        return run(x)[0]


def layers_with_cache(
    layers: Layers,
    x: Float[Array, "B T D"],
    places: TokenLayout,
    cached: Sequence[KeyValues | RollingCache],
) -> tuple[Float[Array, "B T D"], tuple[Any, ...]]:
    """The residual stream after those layers, and their caches with what they were given."""
    kept = []
    for (layer, position), keys in zip(layers, cached, strict=True):
        x, more = layer(x, position, places, keys, None)
        kept.append(more)
    return x, tuple(kept)


def make_stack(make: Callable[[nnx.Rngs], AnyModule], count: int, rngs: nnx.Rngs) -> AnyModule:
    """So many modules that `make` makes, as one whose parameters have a first axis more."""

    def parameters(key: Array) -> Any:
        return nnx.split(make(nnx.Rngs(params=key)))[1]

    # The module's structure is the same for all keys, and no array.
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    stack = nnx.merge(graphdef, jax.vmap(parameters)(jax.random.split(rngs.params(), count)))
    for _, param in nnx.iter_graph(stack):
        if isinstance(param, nnx.Param):
            param.set_metadata(axes=(AXIS, *param.get_metadata().get("axes", ())))
    return stack


def unstack(stack: AnyModule) -> list[AnyModule]:
    """The modules of a stack."""
    graphdef, state = nnx.split(stack)
    leaves, structure = jax.tree.flatten(state)
    # Split at once: the gradient is then put together once, and not once a module.
    each = zip(*(jnp.unstack(leaf) for leaf in leaves))
    return [nnx.merge(graphdef, jax.tree.unflatten(structure, some)) for some in each]


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Whether a parameter, by its path in a model's parameters, is a stack's."""
    return bool(path) and getattr(path[0], "key", None) == AXIS
