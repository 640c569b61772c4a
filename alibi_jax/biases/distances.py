"""The positions of queries and keys, and the distances between them."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Real

from alibi_jax.position_arrays import as_positions, check_offset

# A function that maps query positions [..., T] and key positions [..., S] to a bias
# [..., N, T, S]. Attention that is given features of queries, [B, T, ...], and of keys,
# [B, S, ...], passes both on as further arguments.
Bias = Callable[..., Array | None]


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
