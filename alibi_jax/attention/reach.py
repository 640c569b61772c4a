"""Reach: which blocks of keys can matter to a block of queries, proved from the data.

A linear bias falls without end, while a score is at most |q|·|k|/sqrt(H): far enough back, all
keys together weigh less than any share of a row that one cares to name. The proof is in
docs/attention.md.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from alibi_jax.attention.visibility import Visibility, token_metadata
from alibi_jax.biases import LinearBias

# The share of a row's weight that may be left out: to float32, sums are the same without it.
NEGLIGIBLE = 2.0**-24


class KeyBlocks(NamedTuple):
    """Of each query block the key blocks to compute, from `first` to before `stop`, int32.

    All others are invisible, or too light to matter.
    """

    first: Int[Array, "B N query_blocks"]
    stop: Int[Array, "B N query_blocks"]


def reach(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    bias: LinearBias | None,
    sight: Visibility,
    *,
    block: int,
    tolerance: float = NEGLIGIBLE,
) -> KeyBlocks:
    """The blocks that `attention` has to compute, of each batch row, query head and query block.

    Blocks are of `block` queries and as many keys. What is left out has, of each row, at most
    `tolerance` of the weight, however far the data be from what one expects: large norms or a
    heavy key far away only widen the range. With a tolerance of 0, or without a linear bias,
    only what cannot be seen at all is left out.
    """
    batch, length, num_heads, _ = query.shape
    key_length, num_kv_heads = key.shape[1:3]
    queries, keys = token_metadata(sight, length, key_length, None, None)
    sides = {"query_positions": queries.positions, "key_positions": keys.positions}
    if queries.segment_ids is not None and keys.segment_ids is not None:
        sides |= {"query_segment_ids": queries.segment_ids, "key_segment_ids": keys.segment_ids}
    sides = {name: jnp.broadcast_to(x, (batch, x.shape[-1])) for name, x in sides.items()}
    slopes = None
    if bias is not None and tolerance > 0.0:
        past = jnp.asarray(bias.slopes, jnp.float32)
        future = (
            past if bias.future_slopes is None else jnp.asarray(bias.future_slopes, jnp.float32)
        )
        slopes = past, future
    one = functools.partial(
        _reach,
        own=queries.indices,
        block=block,
        tolerance=tolerance,
        causal=sight.causal,
        window=sight.window,
    )
    query, key, slopes = jax.lax.stop_gradient((query, key, slopes))
    key = jnp.repeat(key, num_heads // num_kv_heads, axis=2)
    over_heads = jax.vmap(one, in_axes=(1, 1, 0, None))
    return jax.vmap(over_heads, in_axes=(0, 0, None, 0))(query, key, slopes, sides)


def _reach(
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    slopes: tuple[Float[Array, ""], Float[Array, ""]] | None,
    sides: dict[str, Int[Array, "_"]],
    *,
    own: Int[Array, "T"],
    block: int,
    tolerance: float,
    causal: bool,
    window: int | None,
) -> KeyBlocks:
    """`reach` of one head of one row."""
    own_least, own_most = (x[:, None] for x in _range(own, block))
    key_least, key_most = _range(jnp.arange(key.shape[0], dtype=jnp.int32), block)
    visible = jnp.ones((own_least.shape[0], key_least.shape[0]), bool)
    if causal:
        visible &= key_least <= own_most
    if window is not None:
        visible &= (key_most > own_least - window) & (key_least < own_most + window)
    if "query_segment_ids" in sides:
        # Two ranges of ids that share nothing; 0, padding, is in neither.
        query_least, query_most = _range(sides["query_segment_ids"], block, padding=0)
        least, most = _range(sides["key_segment_ids"], block, padding=0)
        visible &= (query_least[:, None] <= most) & (least <= query_most[:, None])
    if slopes is None:
        share = jnp.where(visible, jnp.inf, 0.0)
    else:
        weight = _weight(query, key, slopes, sides, own, block)
        # Each side of a row has its share of the tolerance; a causal row has but one side. The
        # rest is room for the rounding of the sums below, and for what underflows in them.
        limit = math.log(tolerance) - (0.0 if causal else math.log(2.0)) - 0.01
        share = jnp.where(visible, jnp.exp(weight - limit), 0.0)
    first = _leading(jnp.cumsum(share, axis=1) <= 1.0)
    stop = share.shape[1] - _leading(jnp.cumsum(share[:, ::-1], axis=1) <= 1.0)
    return KeyBlocks(jnp.minimum(first, stop), stop)


def _weight(
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    slopes: tuple[Float[Array, ""], Float[Array, ""]],
    sides: dict[str, Int[Array, "_"]],
    own: Int[Array, "T"],
    block: int,
) -> Float[Array, "query_blocks key_blocks"]:
    """The logarithm of no less than the weight of a block of keys, a query's own key being 1.

    Of the query of its block for which that is most; +inf where a query has no key of its own
    to compare with.
    """
    past, future = slopes
    positions, key_positions = sides["query_positions"], sides["key_positions"]
    ids, key_ids = sides.get("query_segment_ids"), sides.get("key_segment_ids")
    size = query.shape[-1]
    # For rounding: the scores and these bounds of them are sums of H products.
    slack = 4 * (size + 4) * 2.0**-24
    scale = size**-0.5
    query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    norms, key_norms = norm(query) * scale, norm(key)
    # What is not finite bounds nothing. Told apart here, and not by comparisons that a NaN makes
    # false: a maximum may lose a NaN on a CPU (openxla/xla#21461).
    unbounded = _cut(~jnp.isfinite(key_norms), block, False).any(axis=1)
    key_norms = jnp.where(jnp.isfinite(key_norms), key_norms, 0.0)
    # Its own key, or the one that is nearest to it: what it sees if it sees any.
    at = jnp.clip(own, 0, key.shape[0] - 1)
    own_bias = _bias(past, future, key_positions[at] - positions)
    score = (query * key[at]).sum(axis=-1) * scale + own_bias
    score -= slack * (norms * key_norms[at] + jnp.abs(own_bias))
    known = jnp.isfinite(norms + score) & ~unbounded[at // block]
    score = jnp.where(known, score, -jnp.inf)
    norms = jnp.where(jnp.isfinite(norms), norms, 0.0)
    if ids is not None and key_ids is not None:
        score = jnp.where(ids == key_ids[at], score, -jnp.inf)
        # Padding: it sees nothing, so that nothing matters to it, and nothing sees it.
        score = jnp.where(ids == 0, jnp.inf, score)
        key_norms = jnp.where(key_ids == 0, 0.0, key_norms)
    norms = _cut(norms * (1.0 + slack), block, 0.0)[:, :, None]
    score = _cut(score, block, jnp.inf)[:, :, None]
    most = (norms * _cut(key_norms, block, 0.0).max(axis=1) - score).max(axis=1)
    most = jnp.where(unbounded, jnp.inf, most)

    query_least, query_most = (x[:, None] for x in _range(positions, block))
    key_least, key_most = _range(key_positions, block)
    least, greatest = key_least - query_most, key_most - query_least
    # The greatest bias is at an end of the range of distances, or within it at 0.
    bias = jnp.maximum(_bias(past, future, least), _bias(past, future, greatest))
    bias = jnp.where((least <= 0) & (greatest >= 0), jnp.maximum(bias, 0.0), bias)
    bias += slack * jnp.abs(bias)
    # How many keys with that bias the block is worth: where it lies wholly to one side, its
    # biases fall from there on.
    gaps = _cut(key_positions, block, None)
    behind = jnp.exp(-jnp.maximum(past, 0.0) * (key_most[:, None] - gaps).astype(jnp.float32))
    ahead = jnp.exp(-jnp.maximum(future, 0.0) * (gaps - key_least[:, None]).astype(jnp.float32))
    count = jnp.where(greatest <= 0, behind.sum(axis=1), float(block))
    count = jnp.where(least >= 0, ahead.sum(axis=1), count)
    return most + bias + jnp.log(count)


def norm(x: Float[Array, "... H"]) -> Float[Array, "..."]:
    """No less than the Euclidean norms of rows, float32, infinite where squares overflow."""
    # Numbers whose squares underflow are counted as the greatest of that kind.
    lost = (x.shape[-1] * float(jnp.finfo(jnp.float32).tiny)) ** 0.5
    return jnp.linalg.norm(x.astype(jnp.float32), axis=-1) + lost


def _bias(
    past: Float[Array, ""], future: Float[Array, ""], relative: Int[Array, "..."]
) -> Float[Array, "..."]:
    """The linear bias of one head at key minus query."""
    return jnp.where(relative > 0, future, past) * (-jnp.abs(relative)).astype(jnp.float32)


def _cut(x: Array, block: int, fill: float | bool | None) -> Array:
    """`[blocks, block]`, filled up with a number, or with the last one of `x`."""
    padding = (0, -x.shape[0] % block)
    if fill is None:
        return jnp.pad(x, padding, mode="edge").reshape(-1, block)
    return jnp.pad(x, padding, constant_values=fill).reshape(-1, block)


def _range(
    x: Int[Array, "T"], block: int, padding: int | None = None
) -> tuple[Int[Array, "blocks"], Int[Array, "blocks"]]:
    """The least and the greatest of each block, but for the number that stands for padding."""
    cut = _cut(x, block, None)
    if padding is None:
        return cut.min(axis=1), cut.max(axis=1)
    limits, real = jnp.iinfo(jnp.int32), cut != padding
    return (
        jnp.where(real, cut, limits.max).min(axis=1),
        jnp.where(real, cut, limits.min).max(axis=1),
    )


def _leading(x: Bool[Array, "query_blocks key_blocks"]) -> Int[Array, "query_blocks"]:
    """How many are true before the first that is not."""
    return jnp.cumprod(x.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
