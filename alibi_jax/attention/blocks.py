"""Blocks of arrays: cut out of them, added to them, joined again."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from alibi_jax.attention.visibility import TokenMetadata


def take_block(x: Any, number: Array | int, size: int, axis: int = -2) -> Any:
    """Block `number` of an array, or of each in a tree."""
    return jax.tree.map(lambda x: slice_along(x, number * size, size, axis), x)


def slice_along(x: Array, start: Array | int, size: int, axis: int) -> Array:
    """`size` of `x` along an axis from `start` on.

    In XLA for CPUs, a slice of 16-bit floats becomes one of float32, and a loop with such slices
    makes float32 of what they are of; of whole numbers it does not.
    """
    bits = x
    if x.dtype.itemsize == 2 and jnp.issubdtype(x.dtype, jnp.floating):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint16)
    part = jax.lax.dynamic_slice_in_dim(bits, start, size, axis % x.ndim)
    return part if bits is x else jax.lax.bitcast_convert_type(part, x.dtype)


def take_token_block(places: TokenMetadata, number: Array | int, size: int) -> TokenMetadata:
    """Block `number` of the places, of that size."""
    features = take_block(places.features, number, size, 1)
    return take_block(places._replace(features=None), number, size, -1)._replace(features=features)


def add_to_block(x: Array, part: Array, number: Array, size: int, axis: int = -2) -> Array:
    """`x` with `part` added to its block `number`."""
    whole = take_block(x, number, size, axis) + part
    return jax.lax.dynamic_update_slice_in_dim(x, whole, number * size, axis % x.ndim)


def join_blocks(blocks: Array, axis: int) -> Array:
    """Blocks, stacked in front, one after the other along an axis."""
    axis %= blocks.ndim - 1
    whole = jnp.moveaxis(blocks, 0, axis)
    return whole.reshape(*whole.shape[:axis], -1, *whole.shape[axis + 2 :])
