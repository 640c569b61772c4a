"""Positions and offsets as arrays: the numbers and dtypes that they may have."""

import operator
from collections.abc import Sequence

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, Real

_INT32 = np.iinfo(np.int32)


def check_offset(offset: int | Int[Array, ""], query_length: object) -> int | Int[Array, ""]:
    """The index of the first of some queries: an int, or an int32 JAX array if it is one.

    Raises ValueError unless it is one integer, and the queries' indices are known to fit int32 or
    are not known while tracing.
    """
    if isinstance(offset, jax.Array):
        if offset.ndim or not jnp.issubdtype(offset.dtype, jnp.integer):
            raise ValueError(
                f"offset has shape {offset.shape} and dtype {offset.dtype}: "
                "give one integer, the first query's index"
            )
        return offset.astype(jnp.int32)
    if jax.export.is_symbolic_dim(offset):
        return offset  # type: ignore[return-value]
    first = as_integer(offset)
    if first is None:
        raise ValueError(f"offset={offset!r} must be an integer: the first query's index")
    known_length = max(query_length, 1) if isinstance(query_length, int) else 1
    limit = _INT32.max - known_length + 1
    if not _INT32.min <= first <= limit:
        raise ValueError(
            f"offset={first} of {query_length} queries is out of range: give an offset from "
            f"{_INT32.min} to {limit}, so that each index fits 32 bits"
        )
    return first


def as_integer(x: object) -> int | None:
    """`x` as a Python integer; None for a boolean, and for anything that is not an integer."""
    if isinstance(x, bool):
        return None
    try:
        return operator.index(x)  # type: ignore[arg-type]
    except TypeError:
        return None


def as_positions(
    positions: Real[Array, "..."] | Real[np.ndarray, "..."] | Sequence[float],
) -> Real[Array, "..."]:
    """Positions as int32, or as float32 (float64 stays) if they are floating-point numbers.

    Raises ValueError for any other dtype, and for known integers that int32 cannot represent.
    """
    if not isinstance(positions, jax.Array):
        positions = np.asarray(positions)
        if positions.dtype.kind in "iu" and positions.size:
            low, high = positions.min(), positions.max()
            if low < _INT32.min or high > _INT32.max:
                raise ValueError(
                    f"positions from {low} to {high} do not fit 32 bits: give positions from "
                    f"{_INT32.min} to {_INT32.max}"
                )
    if jnp.issubdtype(positions.dtype, jnp.integer):
        return jnp.asarray(positions, jnp.int32)
    if jnp.issubdtype(positions.dtype, jnp.floating):
        dtype = jnp.promote_types(positions.dtype, jnp.float32)
        return jnp.asarray(positions, jax.dtypes.canonicalize_dtype(dtype))
    raise ValueError(f"positions are {positions.dtype}: give integers or floating-point numbers")
