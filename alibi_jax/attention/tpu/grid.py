"""The steps of a kernel: pairs of blocks, one after another, each packed into one integer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# Bits, from the lowest: four flags, the inner block, the outer block, the row.
_BLOCK_BITS = 10
_INNER = 4
_OUTER = _INNER + _BLOCK_BITS
_ROW = _OUTER + _BLOCK_BITS
_WORK, _FIRST, _LAST, _FRESH = 1, 2, 4, 8
_MAX_BLOCKS = (1 << _BLOCK_BITS) - 1
_MAX_ROWS = 64
# Steps are read from a core's scalar memory, 1 MiB on most TPUs: at most half of it.
_MAX_WORDS = 1 << 17


class Grid(NamedTuple):
    """What each group of rows has to do: its first `counts` words, in this order.

    The words after stay at the last step's blocks and do nothing, for the group that is done
    before the other.
    """

    words: Int[Array, "groups words"]
    counts: Int[Array, "groups"]


class GridStep(NamedTuple):
    """One step: a row, an outer and an inner block, and what marks it.

    `work` is false where an outer block has nothing to compute, yet a result to write; `first`
    and `last` are of an outer block, `fresh` is the first of a row.
    """

    row: Int[Array, "*shape"]
    outer: Int[Array, "*shape"]
    inner: Int[Array, "*shape"]
    work: Bool[Array, "*shape"]
    first: Bool[Array, "*shape"]
    last: Bool[Array, "*shape"]
    fresh: Bool[Array, "*shape"]


def rows_per_call(rows: int, outer: int, inner: int, together: int = 1) -> int:
    """The greatest divisor of `rows` of which one schedule can hold every pair of blocks.

    A multiple of `together`. Raises ValueError where not even so many rows can be held.
    """
    most = min(rows, 2 * _MAX_ROWS, _MAX_WORDS // (outer * inner))
    # An odd number of rows is one group.
    fit = (count for count in range(most, 0, -1) if count % 2 == 0 or count <= _MAX_ROWS)
    best = next((count for count in fit if rows % count == 0 and count % together == 0), 0)
    if max(outer, inner) > _MAX_BLOCKS or not best:
        raise ValueError(
            f"{outer} by {inner} blocks of {together} heads are more than the {_MAX_BLOCKS} a "
            f"side and {_MAX_WORDS} in all that a kernel's schedule holds: give larger blocks"
        )
    return best


def make_grid(active: Bool[Array, "rows outer inner"]) -> Grid:
    """The active pairs of blocks, row by row, outer block by outer block.

    Rows go to two groups in turn where they are even in number, one a core of a chip that has
    two; neighbours, because heads that are neighbours have about as much to do. In a group rows
    are counted from 0. An outer block without any pair has a step of its own, without work.
    """
    rows, outer, inner = active.shape
    groups = 2 - rows % 2
    active = active.reshape(rows // groups, groups, outer, inner).swapaxes(0, 1)
    index = [jax.lax.broadcasted_iota(jnp.int32, active.shape, axis) for axis in (1, 2, 3)]
    present = active | (~active.any(-1, keepdims=True) & (index[2] == 0))
    word = index[0] << _ROW | index[1] << _OUTER | index[2] << _INNER
    word = jnp.where(present, word | active * _WORK, jnp.iinfo(jnp.int32).max)
    # The absent come last: their row is one that no group has.
    words = jnp.sort(word.reshape(groups, -1), axis=-1)
    ends = jnp.full((groups, 1), -1, jnp.int32)
    before = jnp.concatenate([ends, words[:, :-1]], axis=-1)
    after = jnp.concatenate([words[:, 1:], ends], axis=-1)
    words |= (words >> _OUTER != before >> _OUTER) * _FIRST
    words |= (words >> _OUTER != after >> _OUTER) * _LAST
    words |= (words >> _ROW != before >> _ROW) * _FRESH
    counts = present.sum((1, 2, 3), dtype=jnp.int32)
    final = jnp.take_along_axis(words, counts[:, None] - 1, axis=1) >> _INNER << _INNER
    done = jax.lax.broadcasted_iota(jnp.int32, words.shape, 1) >= counts[:, None]
    return Grid(jnp.where(done, final, words), counts)


def unpack(word: Int[Array, "*shape"]) -> GridStep:
    """The step of a word of `Steps`."""
    return GridStep(
        row=word >> _ROW,
        outer=word >> _OUTER & _MAX_BLOCKS,
        inner=word >> _INNER & _MAX_BLOCKS,
        work=word & _WORK != 0,
        first=word & _FIRST != 0,
        last=word & _LAST != 0,
        fresh=word & _FRESH != 0,
    )
