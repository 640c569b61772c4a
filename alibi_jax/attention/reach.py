"""Reach: which blocks of keys can matter to a block of queries, proved from the data.

A linear bias falls without end, while a score is at most |q|·|k|/sqrt(H). Hence, for any given
share of a row's attention weight, there is a distance such that all keys beyond it together have
less than that share. docs/attention.md has the proof.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real

from alibi_jax.attention.blocks import padding_to_blocks
from alibi_jax.attention.visibility import Visibility, token_metadata
from alibi_jax.biases import LinearBias

# Share of a row's weight that may be left out: it does not change a sum in float32.
NEGLIGIBLE = 2.0**-24


class KeyBlocks(NamedTuple):
    """The key blocks that each query block has to compute: `start` to `stop` - 1, int32.

    All other key blocks are invisible to the queries, or too light to matter.
    """

    start: Int[Array, "B N query_blocks"]
    stop: Int[Array, "B N query_blocks"]


class _RowMetadata(NamedTuple):
    """Positions and segment ids of queries and keys, for one batch row or for all batch rows."""

    query_positions: Real[Array, "*B T"]
    key_positions: Real[Array, "*B S"]
    query_segment_ids: Int[Array, "*B T"] | None
    key_segment_ids: Int[Array, "*B S"] | None


def reach(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    bias: LinearBias | None,
    visibility: Visibility,
    *,
    block_size: int,
    tolerance: float = NEGLIGIBLE,
) -> KeyBlocks:
    """The key blocks that `attention` has to compute, per batch row, query head and query block.

    A block has `block_size` queries or keys. In each row, the omitted keys have in total at most
    the share `tolerance` of the weight, whatever the data: large norms, or one heavy key far away,
    only widen the range. In three cases only invisible blocks are left out: with a tolerance of 0,
    without a linear bias, and with a mask, because a mask may hide a query's own key.
    """
    batch, length, num_heads, _ = query.shape
    key_length, num_kv_heads = key.shape[1:3]
    queries, keys = token_metadata(visibility, length, key_length, None, None)
    query_ids, key_ids = queries.segment_ids, keys.segment_ids
    if query_ids is None or key_ids is None:
        query_ids = key_ids = None
    metadata = _RowMetadata(queries.positions, keys.positions, query_ids, key_ids)
    metadata = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, x.shape[-1])), metadata)
    slopes = None
    if bias is not None and tolerance > 0.0 and visibility.mask is None:
        past = jnp.asarray(bias.slopes, jnp.float32)
        future = (
            past if bias.future_slopes is None else jnp.asarray(bias.future_slopes, jnp.float32)
        )
        slopes = past, future
    reach_of_head = functools.partial(
        _reach_of_head,
        query_indices=queries.indices,
        block_size=block_size,
        tolerance=tolerance,
        causal=visibility.causal,
        window=visibility.window,
    )
    query, key, slopes = jax.lax.stop_gradient((query, key, slopes))
    key = jnp.repeat(key, num_heads // num_kv_heads, axis=2)
    over_heads = jax.vmap(reach_of_head, in_axes=(1, 1, 0, None))
    return jax.vmap(over_heads, in_axes=(0, 0, None, 0))(query, key, slopes, metadata)


def _reach_of_head(
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    slopes: tuple[Float[Array, ""], Float[Array, ""]] | None,
    metadata: _RowMetadata,
    *,
    query_indices: Int[Array, "T"],
    block_size: int,
    tolerance: float,
    causal: bool,
    window: int | None,
) -> KeyBlocks:
    """`reach` of one head of one batch row."""
    query_min, query_max = (x[:, None] for x in _block_min_max(query_indices, block_size))
    key_indices = jnp.arange(key.shape[0], dtype=jnp.int32)
    key_min, key_max = (x[None, :] for x in _block_min_max(key_indices, block_size))
    visible = jnp.ones((query_min.shape[0], key_min.shape[1]), bool)
    if causal:
        visible &= key_min <= query_max
    if window is not None:
        # Differences of indices fit int32; an index plus a window may not.
        visible &= (query_min - key_max < window) & (key_min - query_max < window)
    if metadata.query_segment_ids is not None and metadata.key_segment_ids is not None:
        # The ranges of ids of two blocks must overlap; 0, which is padding, is in neither range.
        query_ids = _block_min_max(metadata.query_segment_ids, block_size, padding=0)
        key_ids = _block_min_max(metadata.key_segment_ids, block_size, padding=0)
        query_id_min, query_id_max = (x[:, None] for x in query_ids)
        key_id_min, key_id_max = (x[None, :] for x in key_ids)
        visible &= (query_id_min <= key_id_max) & (key_id_min <= query_id_max)
    if slopes is None:
        share = jnp.where(visible, jnp.inf, 0.0)
    else:
        log_weight = _log_weight_bound(query, key, slopes, metadata, query_indices, block_size)
        # The past and the future of a row each get half of the tolerance; a causal row has a past
        # only. 0.01 leaves room for rounding and underflow in the sums below.
        limit = math.log(tolerance) - (0.0 if causal else math.log(2.0)) - 0.01
        share = jnp.where(visible, jnp.exp(log_weight - limit), 0.0)
    start = _count_leading(jnp.cumsum(share, axis=1) <= 1.0)
    stop = share.shape[1] - _count_leading(jnp.cumsum(share[:, ::-1], axis=1) <= 1.0)
    return KeyBlocks(jnp.minimum(start, stop), stop)


def _log_weight_bound(
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    slopes: tuple[Float[Array, ""], Float[Array, ""]],
    metadata: _RowMetadata,
    query_indices: Int[Array, "T"],
    block_size: int,
) -> Float[Array, "query_blocks key_blocks"]:
    """Upper bound of the logarithm of a key block's weight, relative to a query's own key.

    The result is the greatest bound over the queries of a block. It is +inf where a query
    (other than padding) does not see its own key, and where a norm or a score is not finite.
    """
    past, future = slopes
    positions, key_positions = metadata.query_positions, metadata.key_positions
    query_ids, key_ids = metadata.query_segment_ids, metadata.key_segment_ids
    size = query.shape[-1]
    # Relative rounding error of the scores and of their bounds, which are sums of H products.
    rounding = 4 * (size + 4) * 2.0**-24
    scale = size**-0.5
    query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    norms, key_norms = norm_bound(query) * scale, norm_bound(key)
    # A norm that is not finite bounds nothing. The comparison that leaves blocks out would be
    # false for a NaN, but on a CPU a maximum before it may lose the NaN (openxla/xla#21461). Hence
    # this test.
    unbounded = _in_blocks(~jnp.isfinite(key_norms), block_size, False).any(axis=1)
    key_norms = jnp.where(jnp.isfinite(key_norms), key_norms, 0.0)
    # A query's own key has the query's index, or the nearest index if no key has that index. If
    # causality and the window let a query see any key, they let it see its own key. Segment ids may
    # still hide that key; they are compared below.
    own_key = jnp.clip(query_indices, 0, key.shape[0] - 1)
    own_bias = _linear_bias(past, future, key_positions[own_key] - positions)
    own_score = (query * key[own_key]).sum(axis=-1) * scale + own_bias
    own_score -= rounding * (norms * key_norms[own_key] + jnp.abs(own_bias))
    known = jnp.isfinite(norms + own_score) & ~unbounded[own_key // block_size]
    own_score = jnp.where(known, own_score, -jnp.inf)
    norms = jnp.where(jnp.isfinite(norms), norms, 0.0)
    if query_ids is not None and key_ids is not None:
        own_score = jnp.where(query_ids == key_ids[own_key], own_score, -jnp.inf)
        # A padding query sees nothing, so no key matters to it. No query sees a padding key.
        own_score = jnp.where(query_ids == 0, jnp.inf, own_score)
        key_norms = jnp.where(key_ids == 0, 0.0, key_norms)
    norms = _in_blocks(norms * (1.0 + rounding), block_size, 0.0)[:, :, None]
    own_score = _in_blocks(own_score, block_size, jnp.inf)[:, :, None]
    max_key_norm = _in_blocks(key_norms, block_size, 0.0).max(axis=1)
    score = (norms * max_key_norm[None, None, :] - own_score).max(axis=1)
    score = jnp.where(unbounded[None, :], jnp.inf, score)

    query_min, query_max = (x[:, None] for x in _block_min_max(positions, block_size))
    key_min, key_max = (x[None, :] for x in _block_min_max(key_positions, block_size))
    relative_min, relative_max = key_min - query_max, key_max - query_min
    # The greatest bias is at an end of the range of distances, or at distance 0 inside the range.
    bias = jnp.maximum(
        _linear_bias(past, future, relative_min), _linear_bias(past, future, relative_max)
    )
    bias = jnp.where((relative_min <= 0) & (relative_max >= 0), jnp.maximum(bias, 0.0), bias)
    bias += rounding * jnp.abs(bias)
    # The block's weight is at most that of `count` keys that all have the greatest bias. If the
    # block lies wholly before or wholly after the queries, the biases of its keys fall with the
    # distance, which lowers `count`.
    block_positions = _in_blocks(key_positions, block_size, None)
    weights_if_before = jnp.exp(
        -jnp.maximum(past, 0.0) * (key_max.T - block_positions).astype(jnp.float32)
    )
    weights_if_after = jnp.exp(
        -jnp.maximum(future, 0.0) * (block_positions - key_min.T).astype(jnp.float32)
    )
    count = jnp.where(relative_max <= 0, weights_if_before.sum(axis=1)[None, :], float(block_size))
    count = jnp.where(relative_min >= 0, weights_if_after.sum(axis=1)[None, :], count)
    return score + bias + jnp.log(count)


def norm_bound(x: Float[Array, "... H"]) -> Float[Array, "..."]:
    """Upper bounds of the Euclidean norms of rows, float32; infinite where squares overflow."""
    # A bound of what is lost where squares underflow: the norm of a row in which every square is
    # the least normal number.
    underflow = (x.shape[-1] * float(jnp.finfo(jnp.float32).tiny)) ** 0.5
    return jnp.linalg.norm(x.astype(jnp.float32), axis=-1) + underflow


def _linear_bias(
    past: Float[Array, ""], future: Float[Array, ""], relative: Real[Array, "..."]
) -> Float[Array, "..."]:
    """The linear bias of one head at `relative`, the key's position minus the query's."""
    return jnp.where(relative > 0, future, past) * (-jnp.abs(relative)).astype(jnp.float32)


def _in_blocks(x: Array, block_size: int, fill: float | bool | None) -> Array:
    """`x` as `[blocks, block_size]`, padded with `fill`, or its last entry if `fill` is None."""
    padding = (0, padding_to_blocks(x.shape[0], block_size))
    if fill is None:
        return jnp.pad(x, padding, mode="edge").reshape(-1, block_size)
    return jnp.pad(x, padding, constant_values=fill).reshape(-1, block_size)


def _block_min_max(
    x: Real[Array, "T"], block_size: int, padding: int | None = None
) -> tuple[Real[Array, "blocks"], Real[Array, "blocks"]]:
    """The least and the greatest number in each block, without the number that means padding."""
    blocks = _in_blocks(x, block_size, None)
    if padding is None:
        return blocks.min(axis=1), blocks.max(axis=1)
    limits, real = jnp.iinfo(jnp.int32), blocks != padding
    return (
        jnp.where(real, blocks, limits.max).min(axis=1),
        jnp.where(real, blocks, limits.min).max(axis=1),
    )


def _count_leading(x: Bool[Array, "query_blocks key_blocks"]) -> Int[Array, "query_blocks"]:
    """The number of true entries before the first false entry, per row."""
    return jnp.cumprod(x.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
