"""Checkpoints of earlier versions, brought into the form that parameters have now.

Up to format 2 each layer had parameters of its own, numbered through the depth; the tables of
tokens stood beside the layers and had a row a token and no more.
"""

from typing import Any

import jax
import jax.numpy as jnp

from alibi_jax.model.layer_stack import AXIS

# Raised when older code could no longer read what is written.
FORMAT = 3


def upgraded_config(values: dict[str, Any], version: int) -> dict[str, Any]:
    """The configuration in a checkpoint's metadata, in today's terms."""
    if version >= 3:
        return values
    remat = "full" if values["model"].get("remat") else "none"
    return values | {"model": values["model"] | {"remat": remat}}


def format_2_tree(wanted: Any, shapes: dict[str, tuple[int, ...]], num_layers: int) -> Any:
    """What a checkpoint of format 2 has in place of `wanted`, parameters or optimizer state.

    Of ShapeDtypeStructs, placed as `wanted` is; `shapes` are those saved, by dotted names.
    """

    def before(prefix: Any, params: Any) -> Any:
        rest = dict(params)
        stacks, tables = rest.pop(AXIS)["stacks"], rest.pop("vocabulary")
        period = len(stacks)
        layers = {number: stacks[number % period] for number in range(num_layers)}

        def shaped(path: Any, leaf: Any) -> Any:
            name = dotted((*prefix, *path))
            shape, spec = shapes.get(name, ()), leaf.sharding.spec
            stacked = len(path) > 1 and path[0].key == AXIS
            depth = -(-(num_layers - path[1].key % period) // period) if stacked else 0
            if stacked and shape == leaf.shape[1:] and depth == leaf.shape[0]:
                spec = spec[1:]
            elif path[0].key in tables and shape[1:] == leaf.shape[1:]:
                # A table without the rows that no token has may divide by no number of devices.
                spec = (None, *spec[1:])
            else:
                # As it is; or it does not fit, and is refused for that.
                shape = leaf.shape
            placement = jax.NamedSharding(leaf.sharding.mesh, jax.P(*spec))
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=placement)

        return jax.tree.map_with_path(shaped, rest | tables | {AXIS: layers})

    return jax.tree.map_with_path(
        lambda path, node: before(path, node) if _is_params(node) else node,
        wanted,
        is_leaf=_is_params,
    )


def from_format_2(saved: Any, wanted: Any) -> Any:
    """The arrays of a tree of `format_2_tree`, as `wanted` has them."""

    def together(params: Any, now: Any) -> Any:
        rest = dict(params)
        layers, period = rest.pop(AXIS), len(now[AXIS]["stacks"])
        stacks = {
            place: jax.tree.map(
                # What belongs to the parameter as a whole is of no layer.
                lambda leaf, *each: jnp.stack(each) if each[0].shape != leaf.shape else each[0],
                now[AXIS]["stacks"][place],
                *(layers[number] for number in range(place, len(layers), period)),
            )
            for place in range(period)
        }
        padded = jax.tree.map(
            lambda leaf, x: jnp.pad(x, [(0, m - n) for m, n in zip(leaf.shape, x.shape)]),
            now["vocabulary"],
            {name: rest.pop(name) for name in now["vocabulary"]},
        )
        return rest | {AXIS: {"stacks": stacks}, "vocabulary": padded}

    def one(now: Any, then: Any) -> Any:
        return together(then, now) if _is_params(now) else then

    placement = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    convert = jax.jit(
        lambda saved: jax.tree.map(one, wanted, saved, is_leaf=_is_params), out_shardings=placement
    )
    return convert(saved)


def dotted(path: Any) -> str:
    """A leaf's name."""
    # Orbax's metadata calls every node's key a string or an index; only the names matter.
    return ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)


def _is_params(node: Any) -> bool:
    return isinstance(node, dict) and AXIS in node and "vocabulary" in node
