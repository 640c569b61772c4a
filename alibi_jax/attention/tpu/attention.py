"""Attention with linear biases on TPUs: one forward and one backward kernel.

In the arrays of the kernels, a row is one query head of one batch row.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from alibi_jax.attention.reach import KeyBlocks
from alibi_jax.attention.tpu.grid import make_grid, rows_per_launch
from alibi_jax.attention.tpu.kernels import (
    LANES,
    ONES_COLUMNS,
    KernelConfig,
    StepIndices,
    backward_kernel,
    forward_kernel,
)
from alibi_jax.attention.tpu.launch import Operand, launch

_MAX_BLOCK = 512
# The gradient of the queries stays in VMEM while the kernel passes over the keys. Queries whose
# gradient is larger are processed in several spans.
_SPAN_BYTES = 1 << 22
# The two arrays of a `KeyBlocks`, each [rows, query_blocks].
_KeyRanges = tuple[Array, ...]


def pallas_tpu(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    slopes: Float[Array, "N"],
    key_blocks: KeyBlocks,
    *,
    causal: bool,
    offset: int | Int[Array, ""],
    window: int | None,
    query_segment_ids: Int[Array, "B T"] | None,
    key_segment_ids: Int[Array, "B S"] | None,
    block_size: int,
    interpret: Any = False,
) -> Float[Array, "B T N V"]:
    """Softmax(query · key / sqrt(H) − m·|i−j|) · value over the key blocks in `key_blocks`.

    Inputs are bfloat16 or float32. The output has the dtype of `query`. Biases, scores and softmax
    are float32, and so are products of float32 inputs. Query t has the index i = `offset` + t among
    the keys; the offset may be traced. A query sees the keys that meet all these conditions: j ≤ i
    if `causal`, |i−j| < `window`, the same segment id (0 is no segment), and a block in
    `key_blocks`. A block holds `block_size` queries or keys. The output of a query that sees
    nothing is zero, and so are its gradients. K divides N. Lengths need not be multiples of the
    block size. Query, key, value and slopes have gradients. Memory is linear in the lengths.
    `interpret` is the argument of `pallas_call`.

    Raises ValueError for a block size other than 128, 256, 384 and 512, and for lengths whose
    blocks do not fit a kernel's grid.

    Press et al. 2021, "Train Short, Test Long", section 3; Dao et al. 2022 (FlashAttention),
    algorithms 1 and 4.
    """
    if block_size not in range(LANES, _MAX_BLOCK + 1, LANES):
        raise ValueError(
            f"block_size={block_size}: give 128, 256, 384 or 512, a multiple of a TPU's lanes"
        )
    (batch, length, num_heads, size), (key_length, num_kv_heads) = query.shape, key.shape[1:3]
    num_spans, blocks_per_span = _spans(length, size, block_size)
    config = KernelConfig(
        causal=causal,
        window=window,
        block_size=block_size,
        blocks_per_span=blocks_per_span,
        key_length=key_length,
        num_heads=num_heads,
        heads_per_key=num_heads // num_kv_heads,
        interpret=interpret,
    )
    query_blocks = blocks_per_span * num_spans

    def as_rows(x: Array, multiple: int) -> Array:
        x = _pad(x, 1, multiple).swapaxes(1, 2)
        return x.reshape(-1, *x.shape[2:])

    ids = None
    if query_segment_ids is not None and key_segment_ids is not None:
        ids = (
            _pad(query_segment_ids, 1, query_blocks * block_size)[:, None],
            _pad(key_segment_ids, 1, block_size)[:, None],
        )
    out = _attend(
        config,
        as_rows(query, query_blocks * block_size),
        as_rows(key, block_size),
        as_rows(value, block_size),
        slopes.astype(jnp.float32),
        tuple(_pad(x, 2, query_blocks).reshape(batch * num_heads, -1) for x in key_blocks),
        jnp.asarray(offset, jnp.int32),
        ids,
    )
    out = out.reshape(batch, num_heads, -1, query_blocks * block_size)[..., :length]
    return out.transpose(0, 3, 1, 2)


def pallas_refusal(query: Array, key: Array, value: Array, block_size: int) -> str:
    """The reason why `pallas_tpu` does not take these arrays; empty if it does."""
    if (
        query.dtype not in (jnp.float32, jnp.bfloat16)
        or not query.dtype == key.dtype == value.dtype
    ):
        return f"takes float32 or bfloat16, not {query.dtype}, {key.dtype} and {value.dtype}"
    (batch, length, num_heads, size), (key_length, num_kv_heads) = query.shape, key.shape[1:3]
    num_rows, key_blocks = batch * num_heads, -(-key_length // block_size)
    num_spans, blocks_per_span = _spans(length, size, block_size)
    try:
        rows_per_launch(num_rows, num_spans * blocks_per_span, key_blocks)
        rows_per_launch(
            num_rows, key_blocks, blocks_per_span, multiple_of=num_heads // num_kv_heads
        )
    except ValueError as error:
        return f"does not take arrays of these lengths: {error}"
    return ""


def _spans(length: int, size: int, block_size: int) -> tuple[int, int]:
    """The number of spans, and of query blocks per span, so that a span's gradient fits VMEM."""
    query_blocks = -(-length // block_size)
    num_spans = -(-query_blocks * block_size * size * 4 // _SPAN_BYTES)
    return num_spans, -(-query_blocks // num_spans)


def _pad(x: Array, axis: int, multiple: int) -> Array:
    return jnp.pad(x, [(0, -x.shape[i] % multiple * (i == axis)) for i in range(x.ndim)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(config: KernelConfig, *arrays: Any) -> Array:
    """The output, [rows, V, T], of query [rows, T, H] and key and value [B·K, S, H or V].

    There are B·N rows, one for each query head of each batch row.
    """
    return _forward(config, *arrays)[0]


def _attend_forward(config: KernelConfig, *primals: Any) -> tuple[Array, tuple[Any, ...]]:
    arrays = jax.tree.map(lambda primal: primal.value, primals)
    out, logsumexp = _forward(config, *arrays)
    # Residuals may hold only arrays. A boolean is therefore encoded in the tree's structure.
    slopes_perturbed = () if primals[3].perturbed else None
    return out, (*arrays, out, logsumexp, slopes_perturbed)


def _attend_backward(
    config: KernelConfig, residuals: tuple[Any, ...], d_out: Array
) -> tuple[Any, ...]:
    *arrays, out, logsumexp, slopes_perturbed = residuals
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(1, keepdims=True)
    statistics = jnp.concatenate([logsumexp, delta], axis=1)
    gradients = _backward(
        config, tuple(arrays), d_out.swapaxes(1, 2), statistics, slopes_perturbed is not None
    )
    return *gradients, None, None, None


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def _forward(
    config: KernelConfig,
    query: Array,
    key: Array,
    value: Array,
    slopes: Array,
    key_ranges: _KeyRanges,
    offset: Array,
    ids: Any,
) -> tuple[Array, Array]:
    num_rows, length, size = query.shape
    key_blocks, value_size = key.shape[1] // config.block_size, value.shape[2]
    chunk_size = rows_per_launch(num_rows, length // config.block_size, key_blocks)
    value = jnp.pad(value, [(0, 0), (0, 0), (0, ONES_COLUMNS)], constant_values=1)

    def launch_rows(first_row: Array, key_ranges: _KeyRanges) -> Any:
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


def _backward(
    config: KernelConfig,
    arrays: tuple[Any, ...],
    d_out: Array,
    statistics: Array,
    with_slopes: bool,
) -> tuple[Array, Array, Array, Array | None]:
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
        first_row: Array, d_key_value: list[Array], span: tuple[Array, _KeyRanges]
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

    def launch_rows(first_row: Array, key_ranges: _KeyRanges) -> Any:
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
    function: Callable[[Array, _KeyRanges], Any], chunk_size: int, key_ranges: _KeyRanges
) -> Any:
    """Results of `function` over chunks of rows, joined.

    `function` takes the index of a chunk's first row, and the chunk's key ranges.
    """
    chunks = jax.tree.map(lambda x: x.reshape(-1, chunk_size, x.shape[-1]), key_ranges)
    first_rows = jnp.arange(0, len(key_ranges[0]), chunk_size, dtype=jnp.int32)
    results = jax.lax.map(lambda chunk: function(*chunk), (first_rows, chunks))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)


def _active_pairs(
    key_ranges: _KeyRanges, key_blocks: int
) -> Bool[Array, "rows query_blocks key_blocks"]:
    start, stop = key_ranges
    index = jnp.arange(key_blocks, dtype=jnp.int32)
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
