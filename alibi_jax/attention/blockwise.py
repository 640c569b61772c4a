"""Attention a block of queries at a time: memory linear in the length, no work on the future."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from alibi_jax.attention.dense import dense

# Up to this length all queries are one block, that is, `dense`.
_DENSE_LENGTH = 256
# Queries a block: on a CPU the scores of a block should stay in its cache.
_BLOCK = {"cpu": 64}
_OTHER_BLOCK = 512
# A causal segment of blocks is given the keys up to its own end. Segments are unrolled, so
# there are few of them; the work on keys that no query sees is at most 1/(2·8) of the whole.
_SEGMENTS = 8
# The axis of queries of each thing that is cut into blocks.
_ROWS = (1, -1, 0, 1, 1, -2)


def blockwise(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    bias: Callable[..., Array | None] | None,
    causal: bool,
    offset: int | Int[Array, ""],
    query_positions: Int[Array, "*#B T"],
    key_positions: Int[Array, "*#B S"],
    query_segment_ids: Int[Array, "B T"] | None,
    key_segment_ids: Int[Array, "B S"] | None,
    query_features: Any,
    key_features: Any,
    mask: Bool[Array, "#B #N T S"] | None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
) -> Float[Array, "B T N V"]:
    """`dense`, block by block of queries; arguments and result as `attention` has them."""
    length, key_length = query.shape[1], key.shape[1]
    # Of queries: everything that is cut into blocks, along with the index of the key that
    # stands where the query does.
    own_keys = jnp.arange(length, dtype=jnp.int32) + offset
    rows = (query, query_positions, own_keys, query_segment_ids, query_features, mask)

    def block_of(rows: tuple[Any, ...], num_keys: int) -> Array:
        query, query_positions, own_keys, query_segment_ids, query_features, mask = rows
        sides: tuple[Any, ...] = (query_positions, key_positions[..., :num_keys])
        if query_features is not None:
            sides += (query_features, _part(key_features, 1, 0, num_keys))
        return dense(
            query,
            key[:, :num_keys],
            value[:, :num_keys],
            bias=bias(*sides) if bias else None,
            mask=_visible(
                own_keys if causal else None,
                num_keys,
                query_segment_ids,
                _part(key_segment_ids, 1, 0, num_keys),
                _part(mask, -1, 0, num_keys),
            ),
            dropout_rate=dropout_rate,
            dropout_key=None
            if dropout_key is None
            else jax.random.fold_in(dropout_key, own_keys[0]),
        )

    if length <= _DENSE_LENGTH:
        return block_of(rows, key_length)
    block = _BLOCK.get(jax.default_backend(), _OTHER_BLOCK)
    segment = block * -(-length // (block * _SEGMENTS))
    outputs = []
    for start in range(0, length, segment):
        stop = min(start + segment, length)
        # Where the queries stand is known: keys after the last of them are left out.
        num_keys = offset + stop if causal and isinstance(offset, int) else key_length
        # The backward pass computes each block's scores anew instead of keeping them all.
        compute = jax.checkpoint(functools.partial(block_of, num_keys=num_keys))
        whole = (stop - start) // block * block + start
        if whole > start:
            blocks = [_cut(x, axis, start, whole, block) for x, axis in zip(rows, _ROWS)]
            outputs.append(_join(jax.lax.map(compute, tuple(blocks))))
        if whole < stop:
            rest = [_part(x, axis, whole, stop) for x, axis in zip(rows, _ROWS)]
            outputs.append(compute(tuple(rest)))
    return jnp.concatenate(outputs, axis=1)


def _part(tree: Any, axis: int, start: int, stop: int) -> Any:
    return jax.tree.map(lambda x: jax.lax.slice_in_dim(x, start, stop, axis=axis), tree)


def _cut(tree: Any, axis: int, start: int, stop: int, block: int) -> Any:
    """Blocks of x[start:stop] along an axis, stacked in front."""

    def cut(x: Array) -> Array:
        along = axis % x.ndim
        shape = (*x.shape[:along], (stop - start) // block, block, *x.shape[along + 1 :])
        return jnp.moveaxis(x.reshape(shape), along, 0)

    return jax.tree.map(cut, _part(tree, axis, start, stop))


def _join(blocks: Float[Array, "blocks B t N V"]) -> Float[Array, "B T N V"]:
    number, batch, block, *rest = blocks.shape
    return jnp.moveaxis(blocks, 0, 1).reshape(batch, number * block, *rest)


def _visible(
    own_keys: Int[Array, "t"] | None,
    num_keys: int,
    query_segment_ids: Int[Array, "B t"] | None,
    key_segment_ids: Int[Array, "B S"] | None,
    mask: Bool[Array, "#B #N t S"] | None,
) -> Bool[Array, "*#B #N t S"] | None:
    """True where a query sees a key; None where all see all."""
    parts = [] if mask is None else [mask]
    if own_keys is not None:
        parts.append((jnp.arange(num_keys, dtype=jnp.int32) <= own_keys[:, None])[None])
    if query_segment_ids is not None and key_segment_ids is not None:
        ids = query_segment_ids[:, :, None]
        parts.append(((ids == key_segment_ids[:, None, :]) & (ids != 0))[:, None])
    return functools.reduce(jnp.logical_and, parts) if parts else None
