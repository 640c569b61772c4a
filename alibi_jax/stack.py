"""Layers alike with their parameters stacked, so that a loop over them is compiled once.

With a pattern of position methods, as "rotary,none", layers repeat with a period, and each place
in it has a stack of its own: layer number n is number n // period of stack n % period.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

AnyModule = TypeVar("AnyModule", bound=nnx.Module)

# The name of the axis along which parameters are stacked, and of what holds a model's stacks.
AXIS = "layers"


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
