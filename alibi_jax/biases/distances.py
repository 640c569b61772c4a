"""The positions of queries and keys, and the distances between them."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

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
    queries = offset + jnp.arange(query_length, dtype=jnp.int32)
    return queries, jnp.arange(key_length, dtype=jnp.int32)


def relative_positions(
    query_positions: Int[Array, "... T"], key_positions: Int[Array, "... S"]
) -> Int[Array, "... T S"]:
    """Key position minus query position, int32; the leading axes broadcast."""
    # Subtract integers: float32, and bfloat16 even more, would round large positions first.
    queries = jnp.asarray(query_positions, jnp.int32)
    keys = jnp.asarray(key_positions, jnp.int32)
    return keys[..., None, :] - queries[..., :, None]


def distances(
    query_positions: Int[Array, "... T"], key_positions: Int[Array, "... S"]
) -> Float[Array, "... T S"]:
    """The distance |i−j| in float32; the leading axes broadcast."""
    return jnp.abs(relative_positions(query_positions, key_positions)).astype(jnp.float32)
