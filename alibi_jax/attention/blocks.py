"""Blocks of arrays: take a block, add to a block, join the blocks."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from alibi_jax.attention.visibility import TokenMetadata


def take_block(x: Any, index: Array | int, size: int, axis: int = -2) -> Any:
    """Block `index` of an array, or of each array of a tree; a block has `size` entries."""
    return jax.tree.map(lambda x: slice_along(x, index * size, size, axis), x)


def padding_to_blocks(length: Any, size: int) -> Any:
    """The number of entries that are missing in the last of the blocks of `size` entries."""
    # In this form the sum with a symbolic length is a multiple of `size` for JAX too.
    return (length + size - 1) // size * size - length


def slice_along(x: Array, start: Array | int, size: int, axis: int) -> Array:
    """The `size` entries of `x` from `start` on along an axis.

    16-bit floats are sliced as integers. XLA for CPUs slices 16-bit floats in float32, and where
    a loop contains such a slice, it converts the whole array to float32. It leaves integers alone.
    """
    bits = x
    if x.dtype.itemsize == 2 and jnp.issubdtype(x.dtype, jnp.floating):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint16)
    part = jax.lax.dynamic_slice_in_dim(bits, start, size, axis % x.ndim)
    return part if bits is x else jax.lax.bitcast_convert_type(part, x.dtype)


def take_token_block(tokens: TokenMetadata, index: Array | int, size: int) -> TokenMetadata:
    """Block `index` of the tokens; a block has `size` tokens."""
    features = take_block(tokens.features, index, size, 1)
    return take_block(tokens._replace(features=None), index, size, -1)._replace(features=features)


def add_to_block(x: Array, part: Array, index: Array, size: int, axis: int = -2) -> Array:
    """`x` with `part` added to its block `index`."""
    block = take_block(x, index, size, axis) + part
    return jax.lax.dynamic_update_slice_in_dim(x, block, index * size, axis % x.ndim)


def join_blocks(blocks: Array, axis: int) -> Array:
    """Concatenates blocks, which are stacked on axis 0, along `axis` of a block."""
    axis %= blocks.ndim - 1
    joined = jnp.moveaxis(blocks, 0, axis)
    size = joined.shape[axis] * joined.shape[axis + 1]
    return joined.reshape(*joined.shape[:axis], size, *joined.shape[axis + 2 :])
