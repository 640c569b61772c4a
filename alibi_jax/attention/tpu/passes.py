"""The forward and the backward pass over all rows: which kernel runs on which blocks.

In the arrays of the kernels, a row is one query head of one batch row.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from alibi_jax.attention.tpu.grid import make_grid, rows_per_launch
from alibi_jax.attention.tpu.kernels import (
    ONES_COLUMNS,
    KernelConfig,
    StepIndices,
    backward_kernel,
    forward_kernel,
)
from alibi_jax.attention.tpu.launch import Operand, launch

# The two arrays of a `KeyBlocks`, each [rows, query_blocks].
KeyRanges = tuple[Array, ...]


def forward_pass(
    config: KernelConfig,
    query: Array,
    key: Array,
    value: Array,
    slopes: Array,
    key_ranges: KeyRanges,
    offset: Array,
    ids: Any,
) -> tuple[Array, Array]:
    """The output [rows, V, T], and the base-2 log-sum-exp of each query's scores [rows, 1, T]."""
    num_rows, length, size = query.shape
    key_blocks, value_size = key.shape[1] // config.block_size, value.shape[2]
    chunk_size = rows_per_launch(num_rows, length // config.block_size, key_blocks)
    value = jnp.pad(value, [(0, 0), (0, 0), (0, ONES_COLUMNS)], constant_values=1)

    def launch_rows(first_row: Array, key_ranges: KeyRanges) -> Any:
        outputs = [
            Operand(
                jax.ShapeDtypeStruct((chunk_size, features, length), dtype),
                (None, features, config.block_size),
                lambda indices: (indices.launch_row, 0, indices.query_block),
            )
            for features, dtype in ((value_size, query.dtype), (1, jnp.float32))
        ]
        return launch(
            config,
            forward_kernel,
            make_grid(_active_pairs(key_ranges, key_blocks)),
            jnp.stack([first_row, jnp.int32(0), offset]),
            slopes,
            [*_qkv_operands(config, query, key, value), *_id_operands(config, ids)],
            outputs,
            scratch=[(1, config.block_size), (value_size + ONES_COLUMNS, config.block_size)],
            features=size + value_size,
        )

    out, logsumexp = _map_row_chunks(launch_rows, chunk_size, key_ranges)
    return out, logsumexp


def backward_pass(
    config: KernelConfig,
    arrays: tuple[Any, ...],
    d_out: Array,
    statistics: Array,
    with_slopes: bool,
) -> tuple[Array, Array, Array, Array | None]:
    """The gradients of queries, keys and values, and of the slopes if `with_slopes` is true."""
    query, key, value, slopes, key_ranges, offset, ids = arrays
    (num_rows, length, size), (_, key_length, value_size) = query.shape, value.shape
    block_size, blocks_per_span = config.block_size, config.blocks_per_span
    key_blocks = key_length // block_size
    chunk_size = rows_per_launch(
        num_rows, key_blocks, blocks_per_span, multiple_of=config.heads_per_key
    )
    inputs = [
        *_qkv_operands(config, query, key, value),
        _query_operand(config, d_out),
        Operand(
            statistics, (None, 2, block_size), lambda indices: (indices.row, 0, indices.query_block)
        ),
    ]

    def launch_span(
        first_row: Array, d_key_value: list[Array], span: tuple[Array, KeyRanges]
    ) -> Any:
        first_block, key_ranges = span
        d_key_value_operands = [
            Operand(
                x,
                (None, block_size, x.shape[2]),
                lambda indices: (indices.launch_row, indices.key_block, 0),
            )
            for x in d_key_value
        ]
        outputs = [
            _row_output(chunk_size, blocks_per_span, size, block_size),
            *d_key_value_operands,
        ]
        outputs += [_row_output(chunk_size, 1, block_size)] * with_slopes
        d_query, d_key, d_value, *d_slopes = launch(
            config,
            backward_kernel,
            make_grid(_active_pairs(key_ranges, key_blocks).swapaxes(1, 2)),
            jnp.stack([first_row, first_block, offset]),
            slopes,
            [*inputs, *d_key_value_operands, *_id_operands(config, ids)],
            outputs,
            aliases={len(inputs): 1, len(inputs) + 1: 2},
            features=3 * size + 2 * value_size,
        )
        return [d_key, d_value], (d_query, [x.sum((1, 2)) for x in d_slopes])

    def launch_rows(first_row: Array, key_ranges: KeyRanges) -> Any:
        d_key_value = [
            jnp.zeros((chunk_size, key_length, features), jnp.float32)
            for features in (size, value_size)
        ]
        first_blocks = jnp.arange(0, length // block_size, blocks_per_span, dtype=jnp.int32)
        span_ranges = tuple(
            x.reshape(chunk_size, -1, blocks_per_span).swapaxes(0, 1) for x in key_ranges
        )
        (d_key, d_value), (d_query, d_slopes) = jax.lax.scan(
            functools.partial(launch_span, first_row), d_key_value, (first_blocks, span_ranges)
        )
        # The scan gives [spans, rows, blocks per span, H, block size].
        d_query = jnp.moveaxis(d_query, (1, 3), (0, 4)).reshape(chunk_size, length, size)
        d_key, d_value = (
            x.reshape(-1, config.heads_per_key, *x.shape[1:]).sum(1) for x in (d_key, d_value)
        )
        # Each chunk is cast by itself, so that float32 arrays of all rows never exist.
        return (
            (d_query * size**-0.5).astype(query.dtype),
            (d_key * size**-0.5).astype(key.dtype),
            d_value.astype(value.dtype),
            [x.sum(0) for x in d_slopes],
        )

    *gradients, d_slopes = _map_row_chunks(launch_rows, chunk_size, key_ranges)
    return *gradients, d_slopes[0].reshape(-1, config.num_heads).sum(0) if with_slopes else None


def _map_row_chunks(
    function: Callable[[Array, KeyRanges], Any], chunk_size: int, key_ranges: KeyRanges
) -> Any:
    """Results of `function` over chunks of rows, joined.

    `function` takes the index of a chunk's first row, and the chunk's key ranges.
    """
    chunks = jax.tree.map(lambda x: x.reshape(-1, chunk_size, x.shape[-1]), key_ranges)
    first_rows = jnp.arange(0, len(key_ranges[0]), chunk_size, dtype=jnp.int32)
    results = jax.lax.map(lambda chunk: function(*chunk), (first_rows, chunks))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)


def _active_pairs(
    key_ranges: KeyRanges, key_blocks: int
) -> Bool[Array, "rows query_blocks key_blocks"]:
    start, stop = key_ranges
    index = jnp.arange(key_blocks, dtype=jnp.int32)[None, None]
    return (start[..., None] <= index) & (index < stop[..., None])


def _qkv_operands(config: KernelConfig, query: Array, key: Array, value: Array) -> list[Operand]:
    def key_index(indices: StepIndices) -> tuple[Any, ...]:
        row = jax.lax.div(indices.row, np.int32(config.heads_per_key))
        return row, indices.key_block, 0

    key_operands = [
        Operand(x, (None, config.block_size, x.shape[2]), key_index) for x in (key, value)
    ]
    return [_query_operand(config, query), *key_operands]


def _query_operand(config: KernelConfig, x: Array) -> Operand:
    return Operand(
        x,
        (None, config.block_size, x.shape[2]),
        lambda indices: (indices.row, indices.query_block, 0),
    )


def _id_operands(config: KernelConfig, ids: Any) -> list[Operand]:
    if ids is None:
        return []
    shape = (None, 1, config.block_size)
    batch_row = functools.partial(jax.lax.div, y=np.int32(config.num_heads))
    return [
        Operand(ids[0], shape, lambda indices: (batch_row(indices.row), 0, indices.query_block)),
        Operand(ids[1], shape, lambda indices: (batch_row(indices.row), 0, indices.key_block)),
    ]


def _row_output(*shape: int) -> Operand:
    """An output [rows, ...] whose block stays in VMEM for all steps of a row."""
    return Operand(
        jax.ShapeDtypeStruct(shape, jnp.float32),
        (None, *shape[1:]),
        lambda indices: (indices.launch_row, *(0 for _ in shape[1:])),
    )
