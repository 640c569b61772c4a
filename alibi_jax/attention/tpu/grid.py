"""The grid of a kernel: pairs of blocks to compute, each packed into one integer.

A row is one query head of one batch row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# Bits of a packed step, from the lowest: four flags, the inner block, the outer block, the row.
_BLOCK_BITS = 10
_INNER_SHIFT = 4
_OUTER_SHIFT = _INNER_SHIFT + _BLOCK_BITS
_ROW_SHIFT = _OUTER_SHIFT + _BLOCK_BITS
_ACTIVE, _FIRST_OF_OUTER, _LAST_OF_OUTER, _FIRST_OF_ROW = 1, 2, 4, 8
_MAX_BLOCKS = (1 << _BLOCK_BITS) - 1
_MAX_ROWS = 64
# The steps are in a core's scalar memory, 1 MiB on most TPUs. They take at most half of it.
_MAX_STEPS = 1 << 17


class Grid(NamedTuple):
    """The packed steps of each row group, in the order of execution.

    Group g executes its first `num_steps[g]` steps. The remaining steps only fill up the array,
    because one group may have more steps than the other. They repeat the last step's blocks and
    are inactive.
    """

    packed_steps: Int[Array, "groups steps"]
    num_steps: Int[Array, "groups"]


class GridStep(NamedTuple):
    """One step of a kernel's grid: a row, an outer and an inner block, and flags.

    `active` is false where an outer block has nothing to compute but still a result to write.
    `first_of_outer` and `last_of_outer` mark the first and last step of an outer block,
    `first_of_row` marks the first step of a row.
    """

    row: Int[Array, "*shape"]
    outer_block: Int[Array, "*shape"]
    inner_block: Int[Array, "*shape"]
    active: Bool[Array, "*shape"]
    first_of_outer: Bool[Array, "*shape"]
    last_of_outer: Bool[Array, "*shape"]
    first_of_row: Bool[Array, "*shape"]


def rows_per_launch(
    num_rows: int, outer_blocks: int, inner_blocks: int, multiple_of: int = 1
) -> int:
    """The greatest divisor of `num_rows` for which one grid can hold every pair of blocks.

    The result is a multiple of `multiple_of`. Raises ValueError where a grid cannot hold even
    `multiple_of` rows.
    """
    limit = min(num_rows, 2 * _MAX_ROWS, _MAX_STEPS // (outer_blocks * inner_blocks))
    # An odd number of rows forms one group, an even number forms two.
    candidates = (rows for rows in range(limit, 0, -1) if rows % 2 == 0 or rows <= _MAX_ROWS)
    best = next(
        (rows for rows in candidates if num_rows % rows == 0 and rows % multiple_of == 0), 0
    )
    if max(outer_blocks, inner_blocks) > _MAX_BLOCKS or not best:
        raise ValueError(
            f"{outer_blocks} by {inner_blocks} blocks of {multiple_of} heads do not fit a kernel's "
            f"grid, which holds at most {_MAX_BLOCKS} blocks of queries, {_MAX_BLOCKS} blocks of "
            f"keys and {_MAX_STEPS} steps: give larger blocks"
        )
    return best


def make_grid(active: Bool[Array, "rows outer_blocks inner_blocks"]) -> Grid:
    """The grid of the active pairs of blocks: row by row, outer block by outer block.

    An even number of rows is split into two groups, one for each core of a chip that has two.
    Neighbouring rows go to different groups, because neighbouring heads have about the same
    number of steps. Each group counts its rows from 0. An outer block without an active pair
    gets one inactive step.
    """
    rows, outer_blocks, inner_blocks = active.shape
    groups = 2 - rows % 2
    active = active.reshape(rows // groups, groups, outer_blocks, inner_blocks).swapaxes(0, 1)
    index = [jax.lax.broadcasted_iota(jnp.int32, active.shape, axis) for axis in (1, 2, 3)]
    present = active | (~active.any(-1, keepdims=True) & (index[2] == 0))
    steps = index[0] << _ROW_SHIFT | index[1] << _OUTER_SHIFT | index[2] << _INNER_SHIFT
    # Absent pairs are sorted to the end: the greatest integer's row is one that no group has.
    steps = jnp.where(present, steps | active * _ACTIVE, jnp.iinfo(jnp.int32).max)
    steps = jnp.sort(steps.reshape(groups, -1), axis=-1)
    ends = jnp.full((groups, 1), -1, jnp.int32)
    previous = jnp.concatenate([ends, steps[:, :-1]], axis=-1)
    following = jnp.concatenate([steps[:, 1:], ends], axis=-1)
    steps |= (steps >> _OUTER_SHIFT != previous >> _OUTER_SHIFT) * _FIRST_OF_OUTER
    steps |= (steps >> _OUTER_SHIFT != following >> _OUTER_SHIFT) * _LAST_OF_OUTER
    steps |= (steps >> _ROW_SHIFT != previous >> _ROW_SHIFT) * _FIRST_OF_ROW
    num_steps = present.sum((1, 2, 3), dtype=jnp.int32)
    last_step = jnp.take_along_axis(steps, num_steps[:, None] - 1, axis=1)
    filler = last_step >> _INNER_SHIFT << _INNER_SHIFT
    is_filler = jax.lax.broadcasted_iota(jnp.int32, steps.shape, 1) >= num_steps[:, None]
    return Grid(jnp.where(is_filler, filler, steps), num_steps)


def unpack(packed_step: Int[Array, "*shape"]) -> GridStep:
    """The step that an entry of `Grid.packed_steps` encodes."""
    return GridStep(
        row=packed_step >> _ROW_SHIFT,
        outer_block=packed_step >> _OUTER_SHIFT & _MAX_BLOCKS,
        inner_block=packed_step >> _INNER_SHIFT & _MAX_BLOCKS,
        active=packed_step & _ACTIVE != 0,
        first_of_outer=packed_step & _FIRST_OF_OUTER != 0,
        last_of_outer=packed_step & _LAST_OF_OUTER != 0,
        first_of_row=packed_step & _FIRST_OF_ROW != 0,
    )
