"""What a TPU does with one block of queries and one of keys, forward and backward."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from alibi_jax.attention.tpu.grid import GridStep

# Scores are [keys, queries], so that a row's maximum and sum are taken down the registers and
# kept as [1, queries]. They are in units of log 2: the chip's exponential is a power of two.
_LOG2E = math.log2(math.e)
# Far below the maximum that a row starts with, so that a row that sees nothing has weights of 0.
_MASKED, _LOWEST = -3e38, -1e30
# Keys that the forward kernel takes at a time, a TPU's lanes: more would spill from registers.
LANES = 128
# Columns of 1 after the values: a TPU's sublanes.
ONES = 8
# What is summed over in products of matrices [a, b] and [c, d].
_B_D, _B_C, _A_C = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ())), (((0,), (0,)), ((), ()))


class Call(NamedTuple):
    """What is known before anything runs; `span` is in blocks of queries."""

    causal: bool
    window: int | None
    block: int
    span: int
    key_length: int
    num_heads: int
    heads_per_key: int
    interpret: Any


class Place(NamedTuple):
    """Where a step works, in scalars: its row among all and in the launch, and its blocks."""

    row: Any
    local: Any
    query_block: Any
    key_block: Any
    # The index of the first query, less that of the first key.
    ahead: Any


def forward_kernel(
    call: Call, step: GridStep, place: Place, slope: Any, inputs: Any, outputs: Any, scratch: Any
) -> None:
    """Adds a block of keys to its queries' running softmax.

    The last of them writes the output, [V, queries], and the logarithm, to base 2, of each row's
    sum of weights, [1, queries]. Values end in `ONES` columns of 1, by which the matrix unit
    sums the weights, as they are rounded for the output: the vector unit has most to do.
    """
    query, key, value, *ids = inputs
    out, logsumexp = outputs
    top, acc = scratch

    @pl.when(step.first)
    def _() -> None:
        top[...] = jnp.full_like(top, _LOWEST)
        acc[...] = jnp.zeros_like(acc)

    def add(masked: bool) -> None:
        starts = range(0, call.block, LANES)
        # All products before the first softmax, so that the two units work side by side.
        products = [_product(key[pl.ds(start, LANES)], query[...]) for start in starts]
        now = top[...]
        for start, product in zip(starts, products):
            scores, _ = _scores(call, place, slope, product, ids, start, masked)
            before, now = now, jnp.maximum(now, scores.max(0, keepdims=True))
            weights = jnp.exp2(scores - now)
            shrink = jnp.exp2(before - now)
            update = _dot(value[pl.ds(start, LANES)], weights.astype(value.dtype), _A_C)
            acc[...] = acc[...] * shrink + update
        top[...] = now

    _work(call, step, place, ids, add)

    @pl.when(step.last)
    def _() -> None:
        size = out.shape[0]
        total = acc[pl.ds(size, 1)]
        divisor = jnp.where(total > 0.0, total, 1.0)
        out[...] = (acc[pl.ds(0, size)] / divisor).astype(out.dtype)
        logsumexp[...] = top[...] + jnp.log2(divisor)


def backward_kernel(
    call: Call, step: GridStep, place: Place, slope: Any, inputs: Any, outputs: Any, scratch: Any
) -> None:
    """Adds what a block of queries and one of keys give to each other's gradients, float32.

    Those of the queries, [blocks, H, queries], start from zero; those of keys and values from
    what earlier spans of queries gave. Of queries and keys they lack the factor 1/sqrt(H). The
    slope's, a part of it a query, [1, queries], is computed where there is an output for it.
    `statistics` are of each query the forward kernel's logarithm and the sum of its output times
    that one's gradient.
    """
    query, key, value, d_out, statistics, d_key_before, d_value_before, *ids = inputs
    d_query, d_key, d_value, *d_slope = outputs

    @pl.when(step.fresh)
    def _() -> None:
        for start in (d_query, *d_slope):
            start[...] = jnp.zeros_like(start)

    @pl.when(step.first)
    def _() -> None:
        d_key[...] = d_key_before[...]
        d_value[...] = d_value_before[...]

    def add(masked: bool) -> None:
        scores, distance = _scores(
            call, place, slope, _product(key[...], query[...]), ids, 0, masked
        )
        weights = jnp.exp2(scores - statistics[:1])
        d_value[...] += _dot(weights.astype(d_out.dtype), d_out[...], _B_C)
        d_weights = _dot(value[...], d_out[...], _B_D)
        d_scores = weights * (d_weights - statistics[1:])
        for total in d_slope:
            total[...] -= (d_scores * distance).sum(0, keepdims=True)
        d_scores = d_scores.astype(query.dtype)
        d_key[...] += _dot(d_scores, query[...], _B_C)
        d_query[step.inner] += _dot(key[...], d_scores, _A_C)

    _work(call, step, place, ids, add)


def _product(
    key: Float[Array, "keys H"], query: Float[Array, "queries H"]
) -> Float[Array, "keys queries"]:
    return _dot(key, query, _B_D) * (query.shape[1] ** -0.5 * _LOG2E)


def _scores(
    call: Call,
    place: Place,
    slope: Any,
    product: Float[Array, "keys queries"],
    ids: Any,
    start: int,
    masked: bool,
) -> tuple[Float[Array, "keys queries"], Float[Array, "keys queries"]]:
    """Scores of the block's keys from `start` on, and the distances in them."""
    shape = product.shape
    keys, queries = (
        jax.lax.broadcasted_iota(jnp.int32, one, axis).astype(jnp.float32)
        for axis, one in enumerate([(shape[0], 1), (1, shape[1])])
    )
    # The distance is exact, so that the bias is rounded once however far the blocks lie apart.
    distance = (queries + (place.ahead - start).astype(jnp.float32)) - keys
    past = distance
    if not call.causal:
        distance = jnp.abs(distance)
    scores = product - (slope * _LOG2E) * distance
    if masked:
        left = call.key_length - place.key_block * call.block - start
        seen = jax.lax.broadcasted_iota(jnp.int32, shape, 0) < left
        if call.causal:
            seen &= past >= 0.0
        if call.window is not None:
            seen &= distance < call.window
        if ids:
            of_queries, of_keys = (
                jnp.broadcast_to(x, shape)
                for x in (ids[0][...], _column(ids[1][:, pl.ds(start, shape[0])]))
            )
            seen &= (of_queries == of_keys) & (of_keys != 0)
        scores = jnp.where(seen, scores, _MASKED)
    return scores, distance


def _work(
    call: Call, step: GridStep, place: Place, ids: Any, compute: Callable[[bool], None]
) -> None:
    """Computes with a mask where some key of the block may be unseen, and else without."""
    if ids:
        pl.when(step.work)(lambda: compute(True))
        return
    least, most = place.ahead - call.block + 1, place.ahead + call.block - 1
    mixed = (place.key_block + 1) * call.block > call.key_length
    if call.causal:
        mixed |= least < 0
    if call.window is not None:
        mixed |= (most >= call.window) | (least <= -call.window)
    pl.when(step.work & mixed)(lambda: compute(True))
    pl.when(step.work & ~mixed)(lambda: compute(False))


def _column(row: Array) -> Array:
    return jnp.broadcast_to(row, (8, row.shape[1])).T[:, :1]


def _dot(one: Array, other: Array, dimensions: Any) -> Array:
    exact = jax.lax.Precision.HIGHEST if one.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        one, other, dimensions, precision=exact, preferred_element_type=jnp.float32
    )
