"""The forward and the backward kernel: what a TPU does with one pair of blocks.

A pair is one block of queries and one block of keys.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from alibi_jax.attention.tpu.grid import GridStep

# Scores are [keys, queries]: the maximum over a query's keys is then taken down the registers and
# kept as [1, queries]. Scores are in units of log 2, because the chip's exponential is a power of
# two.
_LOG2E = math.log2(math.e)
# The masked score is far below the initial maximum, so that a query that sees nothing has weights
# of 0.
_MASKED, _INITIAL_MAX = -3e38, -1e30
# The forward kernel processes this number of keys at a time, the lanes of a TPU. More keys would
# not fit into the registers.
LANES = 128
# The number of columns of 1 after the values: the sublanes of a TPU.
ONES_COLUMNS = 8
# Dimension numbers of `dot_general` for a @ b, a @ b.T and a.T @ b.
_A_B = (((1,), (0,)), ((), ()))
_A_BT = (((1,), (1,)), ((), ()))
_AT_B = (((0,), (0,)), ((), ()))


class KernelConfig(NamedTuple):
    """Static parameters of a kernel.

    `block_size` is the number of queries, and of keys, in a block. `blocks_per_span` is the number
    of query blocks in a span, the part of a row that one backward launch takes.
    """

    causal: bool
    window: int | None
    block_size: int
    blocks_per_span: int
    key_length: int
    num_heads: int
    heads_per_key: int
    interpret: Any


class StepIndices(NamedTuple):
    """Indices of the data of one grid step, scalars.

    `row` counts all rows, `launch_row` the rows of this launch. `distance` is the index of the
    query block's first query minus the index of the key block's first key.
    """

    row: Any
    launch_row: Any
    query_block: Any
    key_block: Any
    distance: Any


def forward_kernel(
    config: KernelConfig,
    step: GridStep,
    indices: StepIndices,
    slope: Any,
    inputs: Any,
    outputs: Any,
    scratch: Any,
) -> None:
    """Adds a block of keys to the running softmax of a block of queries.

    The last step of a query block writes the output, [V, queries], and the base-2 log-sum-exp of
    each query's scores, [1, queries]. The values end in `ONES_COLUMNS` columns of 1. With them the
    matrix unit also sums the weights, because the vector unit is busier. The summed weights are
    rounded in the same way as the weights of the output.
    """
    query, key, value, *ids = inputs
    out, logsumexp = outputs
    running_max, accumulator = scratch

    @pl.when(step.first_of_outer)
    def _() -> None:
        running_max[...] = jnp.full_like(running_max, _INITIAL_MAX)
        accumulator[...] = jnp.zeros_like(accumulator)

    def add_block(masked: bool) -> None:
        starts = range(0, config.block_size, LANES)
        # All products come before the first softmax, so that the matrix unit and the vector unit
        # work at the same time.
        products = [_scaled_product(key[pl.ds(start, LANES)], query[...]) for start in starts]
        current_max = running_max[...]
        for start, product in zip(starts, products):
            scores, _ = _biased_scores(config, indices, slope, product, ids, start, masked)
            previous_max = current_max
            current_max = jnp.maximum(current_max, scores.max(0, keepdims=True))
            weights = jnp.exp2(scores - current_max)
            rescale = jnp.exp2(previous_max - current_max)
            update = _dot(value[pl.ds(start, LANES)], weights.astype(value.dtype), _AT_B)
            accumulator[...] = accumulator[...] * rescale + update
        running_max[...] = current_max

    _compute_active(config, step, indices, ids, add_block)

    @pl.when(step.last_of_outer)
    def _() -> None:
        value_size = out.shape[0]
        weight_sum = accumulator[pl.ds(value_size, 1)]
        divisor = jnp.where(weight_sum > 0.0, weight_sum, 1.0)
        out[...] = (accumulator[pl.ds(0, value_size)] / divisor).astype(out.dtype)
        logsumexp[...] = running_max[...] + jnp.log2(divisor)


def backward_kernel(
    config: KernelConfig,
    step: GridStep,
    indices: StepIndices,
    slope: Any,
    inputs: Any,
    outputs: Any,
    scratch: Any,
) -> None:
    """Adds the contribution of one pair of blocks to the gradients, float32.

    The gradient of the queries, [blocks, H, queries], starts from zero. The gradients of the keys
    and values start from the contributions of earlier spans of queries. The gradients of queries
    and keys lack the factor 1/sqrt(H). The gradient of the slope, one summand per query,
    [1, queries], is computed only where there is an output for it. `statistics` holds two numbers
    per query: the forward kernel's log-sum-exp, and the dot product of the output and its gradient.
    """
    query, key, value, d_out, statistics, d_key_before, d_value_before, *ids = inputs
    d_query, d_key, d_value, *d_slope = outputs

    @pl.when(step.first_of_row)
    def _() -> None:
        for gradient in (d_query, *d_slope):
            gradient[...] = jnp.zeros_like(gradient)

    @pl.when(step.first_of_outer)
    def _() -> None:
        d_key[...] = d_key_before[...]
        d_value[...] = d_value_before[...]

    def add_block(masked: bool) -> None:
        product = _scaled_product(key[...], query[...])
        scores, distance = _biased_scores(config, indices, slope, product, ids, 0, masked)
        weights = jnp.exp2(scores - statistics[:1])
        d_value[...] += _dot(weights.astype(d_out.dtype), d_out[...], _A_B)
        d_weights = _dot(value[...], d_out[...], _A_BT)
        d_scores = weights * (d_weights - statistics[1:])
        for gradient in d_slope:
            gradient[...] -= (d_scores * distance).sum(0, keepdims=True)
        d_scores = d_scores.astype(query.dtype)
        d_key[...] += _dot(d_scores, query[...], _A_B)
        d_query[step.inner_block] += _dot(key[...], d_scores, _AT_B)

    _compute_active(config, step, indices, ids, add_block)


def _scaled_product(
    key: Float[Array, "keys H"], query: Float[Array, "queries H"]
) -> Float[Array, "keys queries"]:
    return _dot(key, query, _A_BT) * (query.shape[1] ** -0.5 * _LOG2E)


def _biased_scores(
    config: KernelConfig,
    indices: StepIndices,
    slope: Any,
    product: Float[Array, "keys queries"],
    ids: Any,
    start: int,
    masked: bool,
) -> tuple[Float[Array, "keys queries"], Float[Array, "keys queries"]]:
    """The scores with bias, and the distances; `product` begins at key `start` of the block."""
    shape = product.shape
    keys, queries = (
        jax.lax.broadcasted_iota(jnp.int32, axis_shape, axis).astype(jnp.float32)
        for axis, axis_shape in enumerate([(shape[0], 1), (1, shape[1])])
    )
    # The distance is exact, so the relative error of the bias does not depend on the distance.
    signed_distance = (queries + (indices.distance - start).astype(jnp.float32)) - keys
    distance = signed_distance if config.causal else jnp.abs(signed_distance)
    # ALiBi's formula, restated from `alibi_bias_at` (biases/alibi.py).
    scores = product - (slope * _LOG2E) * distance
    if masked:
        keys_left = config.key_length - indices.key_block * config.block_size - start
        visible = jax.lax.broadcasted_iota(jnp.int32, shape, 0) < keys_left
        if config.causal:
            visible &= signed_distance >= 0.0
        if config.window is not None:
            visible &= distance < config.window
        if ids:
            query_ids, key_ids = (
                jnp.broadcast_to(x, shape)
                for x in (ids[0][...], _as_column(ids[1][:, pl.ds(start, shape[0])]))
            )
            visible &= (query_ids == key_ids) & (key_ids != 0)
        scores = jnp.where(visible, scores, _MASKED)
    return scores, distance


def _compute_active(
    config: KernelConfig,
    step: GridStep,
    indices: StepIndices,
    ids: Any,
    compute: Callable[[bool], None],
) -> None:
    """Calls `compute(masked)` if the step is active; `masked` is true if a key may be hidden."""
    if ids:
        pl.when(step.active)(lambda: compute(True))
        return
    least = indices.distance - config.block_size + 1
    greatest = indices.distance + config.block_size - 1
    masked = (indices.key_block + 1) * config.block_size > config.key_length
    if config.causal:
        masked |= least < 0
    if config.window is not None:
        masked |= (greatest >= config.window) | (least <= -config.window)
    pl.when(step.active & masked)(lambda: compute(True))
    pl.when(step.active & ~masked)(lambda: compute(False))


def _as_column(row: Array) -> Array:
    return jnp.broadcast_to(row, (8, row.shape[1])).T[:, :1]


def _dot(left: Array, right: Array, dimensions: Any) -> Array:
    float32 = left.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        left, right, dimensions, precision=precision, preferred_element_type=jnp.float32
    )
