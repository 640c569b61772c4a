"""Converts checkpoints of earlier versions to the current layout of parameters.

Up to format 2 each layer had its own parameters, under the layer's number. The token tables were
beside the layers, not under "vocabulary", and had exactly one row per token (docs/formats.md).
"""

from typing import Any

import jax
import jax.numpy as jnp

from alibi_jax.model.layer_stack import LAYER_AXIS

# Increased when older code can no longer read a new checkpoint.
FORMAT = 4


def upgraded_config(values: dict[str, Any], version: int) -> dict[str, Any]:
    """The configuration from a checkpoint's metadata, with the current keys."""
    if version >= 3:
        return values
    remat = "full" if values["model"].get("remat") else "none"
    return values | {"model": values["model"] | {"remat": remat}}


def format_2_tree(wanted: Any, shapes: dict[str, tuple[int, ...]], num_layers: int) -> Any:
    """Converts `wanted` from the current layout to the layout of format 2.

    `wanted` and the result are trees of ShapeDtypeStructs, of parameters or of optimizer state.
    The axes that both have are sharded alike, except that the result does not shard the rows of
    token tables. `shapes` gives the saved shapes by dotted names.
    """

    def to_format_2(prefix: Any, params: Any) -> Any:
        rest = dict(params)
        stacks, tables = rest.pop(LAYER_AXIS)["stacks"], rest.pop("vocabulary")
        period = len(stacks)
        layers = {number: stacks[number % period] for number in range(num_layers)}

        def saved_struct(path: Any, leaf: Any) -> Any:
            name = dotted_name((*prefix, *path))
            shape, spec = shapes.get(name, ()), leaf.sharding.spec
            stacked = len(path) > 1 and path[0].key == LAYER_AXIS
            stack_size = -(-(num_layers - path[1].key % period) // period) if stacked else 0
            if stacked and shape == leaf.shape[1:] and stack_size == leaf.shape[0]:
                spec = spec[1:]
            elif path[0].key in tables and shape[1:] == leaf.shape[1:]:
                # Without padding rows, the table may not divide evenly over the devices.
                spec = (None, *spec[1:])
            else:
                # The saved shape is that of `leaf`, or it does not fit: `Checkpoints` refuses it.
                shape = leaf.shape
            sharding = jax.NamedSharding(leaf.sharding.mesh, jax.P(*spec))
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        return jax.tree.map_with_path(saved_struct, rest | tables | {LAYER_AXIS: layers})

    return jax.tree.map_with_path(
        lambda path, node: to_format_2(path, node) if _is_params(node) else node,
        wanted,
        is_leaf=_is_params,
    )


def from_format_2(saved: Any, wanted: Any) -> Any:
    """Converts arrays in the layout of `format_2_tree` to the layout of `wanted`."""

    def stack_layers(params: Any, current: Any) -> Any:
        rest = dict(params)
        layers, period = rest.pop(LAYER_AXIS), len(current[LAYER_AXIS]["stacks"])
        stacks = {
            index: jax.tree.map(
                # An optimizer's placeholder for a parameter has the same shape in both formats.
                lambda leaf, *xs: jnp.stack(xs) if xs[0].shape != leaf.shape else xs[0],
                current[LAYER_AXIS]["stacks"][index],
                *(layers[number] for number in range(index, len(layers), period)),
            )
            for index in range(period)
        }
        padded = jax.tree.map(
            lambda leaf, x: jnp.pad(x, [(0, m - n) for m, n in zip(leaf.shape, x.shape)]),
            current["vocabulary"],
            {name: rest.pop(name) for name in current["vocabulary"]},
        )
        return rest | {LAYER_AXIS: {"stacks": stacks}, "vocabulary": padded}

    def convert_node(current: Any, saved: Any) -> Any:
        return stack_layers(saved, current) if _is_params(current) else saved

    shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    convert = jax.jit(
        lambda saved: jax.tree.map(convert_node, wanted, saved, is_leaf=_is_params),
        out_shardings=shardings,
    )
    return convert(saved)


def dotted_name(path: Any) -> str:
    """The name of a leaf: the keys of its path, joined by dots."""
    # Orbax's metadata has other key types than the trees of parameters; only the names matter.
    return ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)


def _is_params(node: Any) -> bool:
    return isinstance(node, dict) and LAYER_AXIS in node and "vocabulary" in node
