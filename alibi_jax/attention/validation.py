"""Checks of the arguments of attention; each error names the argument, its value and the remedy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from alibi_jax.attention.engines import ENGINES
from alibi_jax.attention.visibility import Visibility
from alibi_jax.biases import Bias, LinearBias
from alibi_jax.biases.alibi import Slopes
from alibi_jax.position_arrays import as_integer, as_positions, check_offset


def check_arrays(query: Array, key: Array, value: Array) -> None:
    """Raises ValueError for dtypes, shapes and numbers of heads that do not fit together."""
    arrays = query, key, value
    if any(not jnp.issubdtype(x.dtype, jnp.floating) for x in arrays):
        dtypes = ", ".join(str(x.dtype) for x in arrays)
        raise ValueError(f"query, key and value have dtypes {dtypes}: give floating-point arrays")
    fits = all(x.ndim == 4 for x in arrays) and key.shape[:3] == value.shape[:3]
    if not fits or key.shape != (query.shape[0], *key.shape[1:3], query.shape[3]):
        raise ValueError(
            f"query {query.shape}, key {key.shape} and value {value.shape} do not fit together: "
            "give shapes [B, T, N, H], [B, S, K, H] and [B, S, K, V]"
        )
    num_heads, num_kv_heads = query.shape[2], key.shape[2]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"key has {num_kv_heads} heads and query has {num_heads}: give a number of key heads "
            "that divides the number of query heads"
        )


def resolve_offset(
    offset: int | Int[Array, ""] | None, length: Any, key_length: Any, causal: bool
) -> int | Int[Array, ""]:
    """The index of the first query among the keys: `offset`, or by default S - T.

    The result is an int, or an int32 JAX array if `offset` is a JAX array. An array is not checked,
    and neither are symbolic sizes.
    Raises ValueError where any other offset leaves a causal query without a key of its own, and
    for an offset that is not an integer.
    """
    first = key_length - length if offset is None else check_offset(offset, length)
    if isinstance(first, jax.Array):
        return first
    room = key_length - length
    # Under `jax.export` a size may be symbolic; what cannot be compared is not checked.
    if causal and isinstance(room, int) and room < 0:
        raise ValueError(
            f"causal attention of {length} queries over {key_length} keys: give each query a key "
            "of its own, or causal=False"
        )
    is_known = isinstance(first, int) and isinstance(room, int)
    if causal and is_known and not 0 <= first <= room:
        raise ValueError(
            f"offset={first} puts {length} causal queries at indices {first} to "
            f"{first + length - 1} of {key_length} keys: give an offset from 0 to {room}"
        )
    return first


def resolve_visibility(visibility: Visibility, query: Array, key: Array) -> Visibility:
    """`visibility` in its simplest form; raises ValueError for invalid fields.

    Each batch row has segment ids, positions are int32 or floating-point numbers, and a window that
    hides no key is None.
    """
    (batch, length, num_heads), key_length = query.shape[:3], key.shape[1]
    for name, x, tokens in (
        ("query_positions", visibility.query_positions, length),
        ("key_positions", visibility.key_positions, key_length),
        ("query_segment_ids", visibility.query_segment_ids, length),
        ("key_segment_ids", visibility.key_segment_ids, key_length),
    ):
        if x is not None and x.shape not in ((tokens,), (1, tokens), (batch, tokens)):
            raise ValueError(
                f"{name} has shape {x.shape}: give ({tokens},), (1, {tokens}) or "
                f"({batch}, {tokens})"
            )
    query_ids, key_ids = visibility.query_segment_ids, visibility.key_segment_ids
    _check_pair("segment_ids", query_ids, key_ids)
    _check_mask(visibility.mask, (batch, num_heads, length, key_length))
    positions = visibility.query_positions, visibility.key_positions
    query_positions, key_positions = (
        None if x is None else jax.lax.stop_gradient(as_positions(x)) for x in positions
    )
    return visibility._replace(
        window=_resolve_window(visibility, length, key_length),
        query_positions=query_positions,
        key_positions=key_positions,
        query_segment_ids=None
        if query_ids is None
        else jnp.broadcast_to(query_ids, (batch, length)),
        key_segment_ids=None if key_ids is None else jnp.broadcast_to(key_ids, (batch, key_length)),
    )


def _resolve_window(visibility: Visibility, length: Any, key_length: Any) -> int | None:
    """The window as a Python integer below 2^31, or None if it is known to hide no key."""
    if visibility.window is None:
        return None
    window = as_integer(visibility.window)
    if window is None:
        raise ValueError(f"window={visibility.window} must be an integer: a number of keys")
    if window < 1:
        raise ValueError(f"window={window} must be at least 1: a query sees its own key")
    offset = visibility.offset
    # Indices are int32, so that no two of them differ by 2^31 or more.
    farthest = 2**31 - 1
    if isinstance(offset, int) and isinstance(length, int) and isinstance(key_length, int):
        past, future = offset + length - 1, key_length - 1 - offset
        farthest = past if visibility.causal else max(past, future)
    return None if window > farthest else window


def _check_pair(name: str, of_queries: Any, of_keys: Any) -> None:
    if (of_queries is None) != (of_keys is None):
        missing = f"query_{name}" if of_queries is None else f"key_{name}"
        raise ValueError(f"{missing} is None: give both query_{name} and key_{name}, or neither")


def _check_mask(mask: Array | None, shape: tuple[Any, ...]) -> None:
    # The sizes in `shape` may be symbolic, not only integers, under `jax.export`.
    if mask is None:
        return
    if mask.dtype != bool:
        raise ValueError(f"mask is {mask.dtype}: give booleans, true where a query may see a key")
    fits = mask.ndim == 4 and mask.shape[2:] == shape[2:]
    if not fits or any(x not in (1, y) for x, y in zip(mask.shape[:2], shape[:2])):
        raise ValueError(
            f"mask has shape {mask.shape}: give {shape}, or 1 for any of the first two sizes"
        )


def resolve_bias(bias: Bias | None, num_heads: int) -> Bias | None:
    """Returns `bias`; the slopes of a `LinearBias` become float32.

    Raises ValueError unless a `LinearBias` has one slope for each head.
    """
    if not isinstance(bias, LinearBias):
        return bias
    for name, slopes in (("slopes", bias.slopes), ("future_slopes", bias.future_slopes)):
        if slopes is not None and np.shape(slopes) != (num_heads,):
            raise ValueError(
                f"{name} has shape {np.shape(slopes)}: give one slope for each of the "
                f"{num_heads} query heads"
            )
    future = bias.future_slopes
    return LinearBias(_float32(bias.slopes), None if future is None else _float32(future))


def _float32(slopes: Slopes) -> Array | np.ndarray:
    """Float32 slopes; a numpy array, whose values stay known while tracing, or a JAX array."""
    if isinstance(slopes, jax.Array):
        return slopes.astype(jnp.float32)
    return np.asarray(slopes, np.float32)


def check_distances(
    bias: Bias | None, visibility: Visibility, query: Array, key: Array, *, offset_given: bool
) -> None:
    """Raises ValueError for a bias in cross-attention whose distances are not given."""
    length, key_length = query.shape[1], key.shape[1]
    positions = visibility.query_positions, visibility.key_positions
    given = offset_given or all(x is not None for x in positions)
    if bias is not None and not visibility.causal and length != key_length and not given:
        raise ValueError(
            f"bias between {length} queries and {key_length} other keys with causal=False: give "
            "query_positions and key_positions, as cross-attention has no default distances"
        )


def check_options(
    query_features: Any,
    key_features: Any,
    tolerance: float,
    implementation: str | None,
    dropout_rate: float,
) -> None:
    """Raises ValueError for an unknown engine, a rate out of range or unpaired features."""
    _check_pair("features", query_features, key_features)
    for name, rate in (("tolerance", tolerance), ("dropout_rate", dropout_rate)):
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"{name}={rate} must be at least 0 and below 1")
    if implementation not in (None, *ENGINES):
        raise ValueError(f"implementation={implementation!r} is unknown: give {_choices()}")


def _choices() -> str:
    return ", ".join(repr(engine) for engine in ENGINES) + " or None"
