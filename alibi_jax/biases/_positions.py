"""Where queries and keys stand, and how far apart."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

# From query positions [..., T] and key positions [..., S], and where attention is given the
# features of both, [B, T, ...] and [B, S, ...], from them too, to a bias [..., N, T, S].
Bias = Callable[..., Array | None]


def positions_by_length(
    query_length: int, key_length: int | None, offset: int | Int[Array, ""] | None
) -> tuple[Int[Array, "T"], Int[Array, "S"]]:
    """Positions of T queries and S keys, int32; lengths and `offset` as `alibi_bias` has them."""
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
    """Key minus query, int32; the leading axes broadcast."""
    # Integers: float32 and still more bfloat16 would merge far positions before the difference.
    queries = jnp.asarray(query_positions, jnp.int32)
    keys = jnp.asarray(key_positions, jnp.int32)
    return keys[..., None, :] - queries[..., :, None]


def distances(
    query_positions: Int[Array, "... T"], key_positions: Int[Array, "... S"]
) -> Float[Array, "... T S"]:
    """|i−j| in float32; the leading axes broadcast."""
    return jnp.abs(relative_positions(query_positions, key_positions)).astype(jnp.float32)
