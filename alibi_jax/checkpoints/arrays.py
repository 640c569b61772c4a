"""Facts about arrays that do not depend on devices: shapes, checksums, whether all is finite."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

from alibi_jax.checkpoints.migrations import dotted_name

# The sums of the first and of the second half of a checksum differ by these seeds.
_SEEDS = (0x9E3779B9, 0x7F4A7C15)


def described(tree: Any) -> dict[str, dict[str, Any]]:
    """{"shape": list of sizes, "checksum": 16 hexadecimal digits} of each array, by dotted name.

    A checksum depends on the bits of all elements and on their indices in the array, but not on
    devices, processes and shardings. A change of one element of at most 32 bits always changes it.
    Any other change leaves it as it is with a probability of about 2^-64. All processes must make
    the same calls.
    """
    sums = jax.device_get(_checksums(tree))
    return {
        name: {"shape": list(shape), "checksum": "".join(f"{half:08x}" for half in halves)}
        for (name, shape), halves in zip(shapes_of(tree).items(), jax.tree.leaves(sums))
    }


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Whether all floating-point numbers in a tree of arrays are finite."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return functools.reduce(
        jnp.logical_and, (jnp.isfinite(x).all() for x in floats), jnp.bool(True)
    )


def shapes_of(tree: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays of a tree by their dotted names."""
    leaves, _ = jax.tree.flatten_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "shape"))
    return {dotted_name(path): tuple(leaf.shape) for path, leaf in leaves}


@jax.jit
def _checksums(tree: Any) -> Any:
    """The checksum of each array.

    It is one program, because the devices of a CPU can wait for each other for ever if some 40
    programs with collectives are running.
    """
    return jax.tree.map(_checksum, tree)


def _checksum(array: Array) -> UInt32[Array, "2"]:
    """Two sums modulo 2^32, over all elements, of a hash of the element and its index.

    Sums of integers are exact in any order. So devices and processes can share the work.
    """
    if array.dtype == bool:
        array = array.astype(jnp.uint8)
    # An element of 64 bits becomes two words, along a new last axis.
    word = f"uint{8 * min(array.dtype.itemsize, 4)}"
    words = jax.lax.bitcast_convert_type(array, word).astype(jnp.uint32)
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride)
    hashes = [_mix(words ^ _mix(index ^ jnp.uint32(seed))) for seed in _SEEDS]
    # One reduction of both: XLA fuses it with what comes before, so that no hash is in memory.
    return jnp.stack(
        jax.lax.reduce(
            hashes,
            [jnp.uint32(0)] * len(hashes),
            lambda left, right: [x + y for x, y in zip(left, right)],
            tuple(range(words.ndim)),
        )
    )


def _mix(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """A one-to-one map of 32 bits to 32 bits: the last step of MurmurHash3 (Appleby 2011)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
