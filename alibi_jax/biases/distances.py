"""The positions of queries and keys, and the distances between them."""

import operator
from collections.abc import Callable, Sequence

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Real

# A function that maps query positions [..., T] and key positions [..., S] to a bias
# [..., N, T, S]. Attention that is given features of queries, [B, T, ...], and of keys,
# [B, S, ...], passes both on as further arguments.
Bias = Callable[..., Array | None]

_INT32 = np.iinfo(np.int32)


def positions_by_length(
    query_length: int, key_length: int | None, offset: int | Int[Array, ""] | None
) -> tuple[Int[Array, "T"], Int[Array, "S"]]:
    """Positions of T queries and S keys, int32; the arguments are as in `alibi_bias`."""
    if key_length is None:
        key_length = query_length
    if offset is None:
        offset = key_length - query_length
        if offset < 0:
            raise ValueError(
                f"{query_length} queries can't be the last of {key_length} keys: "
                "give the offset of the first query"
            )
    queries = jnp.arange(query_length, dtype=jnp.int32) + check_offset(offset, query_length)
    return queries, jnp.arange(key_length, dtype=jnp.int32)


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


def relative_positions(
    query_positions: Real[Array, "... T"], key_positions: Real[Array, "... S"]
) -> Real[Array, "... T S"]:
    """Key position minus query position, int32 if both are integers; the leading axes broadcast."""
    # Subtract integers: float32, and bfloat16 even more, would round large positions first.
    queries, keys = as_positions(query_positions), as_positions(key_positions)
    keys, queries = same_rank(keys[..., None, :], queries[..., :, None])
    return keys - queries


def distances(
    query_positions: Real[Array, "... T"], key_positions: Real[Array, "... S"]
) -> Float[Array, "... T S"]:
    """The distance |i−j| in float32; the leading axes broadcast."""
    return jnp.abs(relative_positions(query_positions, key_positions)).astype(jnp.float32)


def same_rank(*arrays: Array) -> list[Array]:
    """Arrays with leading axes of size 1, so that all have as many axes as the one with most.

    Arrays then broadcast under `jax_numpy_rank_promotion="raise"` too.
    """
    ndim = max(x.ndim for x in arrays)
    return [jnp.expand_dims(x, tuple(range(ndim - x.ndim))) for x in arrays]


def per_head(parameter: Float[Array, "N"], ndim: int) -> Float[Array, "..."]:
    """One number for each head, float32, as an array of `ndim` axes `[..., N, T, S]`."""
    axes = (*range(ndim - 3), ndim - 2, ndim - 1)
    return jnp.expand_dims(jnp.asarray(parameter, jnp.float32), axes)
