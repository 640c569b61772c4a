"""Packed rows, which hold several texts: the segment and the position of each token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def segment_positions(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Positions that count from 0 within each run of equal segment ids, int32."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    return index - jax.lax.cummax(jnp.where(_starts(segment_ids), index, 0), axis=1)


def segment_runs(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Segment ids renumbered so that each run of equal ids has its own id, int32.

    The id 0, which is padding, stays 0.
    """
    runs = jnp.cumsum(_starts(segment_ids), axis=1, dtype=jnp.int32) + 1
    return jnp.where(segment_ids == 0, 0, runs)


def _starts(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """True where a token's id differs from the id of the previous token."""
    return jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
