"""Attention with linear biases as kernels for TPUs, one forward and one backward."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from alibi_jax.attention.reach import KeyBlocks
from alibi_jax.attention.tpu.grid import make_grid, rows_per_call
from alibi_jax.attention.tpu.kernels import LANES, ONES, Call, backward_kernel, forward_kernel
from alibi_jax.attention.tpu.launch import Operand, launch

_MAX_BLOCK = 512
# The gradient of the queries stays in VMEM while the keys pass by; longer, it comes in spans.
_SPAN_BYTES = 1 << 22
# `KeyBlocks`, [rows, query_blocks] each.
_Blocks = tuple[Array, ...]


def pallas_tpu(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    slopes: Float[Array, "N"],
    blocks: KeyBlocks,
    *,
    causal: bool,
    offset: int | Int[Array, ""],
    window: int | None,
    query_segment_ids: Int[Array, "B T"] | None,
    key_segment_ids: Int[Array, "B S"] | None,
    block: int,
    interpret: Any = False,
) -> Float[Array, "B T N V"]:
    """Softmax(query · key / sqrt(H) − m·|i−j|) · value over the key blocks given.

    Bfloat16 or float32 in, the dtype of `query` out; biases, scores and softmax are float32, and
    so are products of float32. Query t stands at key i = `offset` + t, which may be traced.
    Visible are keys j ≤ i where causal, with |i−j| < `window`, of the same segment (0: of none);
    of these, those in `blocks`, of `block` queries and as many keys. Rows that see nothing are
    zeros, and so are their gradients. K divides N; lengths need not be multiples of the block.
    Gradients for query, key, value and slopes. Memory is linear in the lengths. `interpret` is
    as `pallas_call` has it.

    Raises ValueError for a block other than 128, 256, 384 and 512, and for lengths that make
    more blocks than a schedule holds.

    Press et al. 2021, "Train Short, Test Long", section 3; Dao et al. 2022 (FlashAttention),
    algorithms 1 and 4.
    """
    if block not in range(LANES, _MAX_BLOCK + 1, LANES):
        raise ValueError(f"block={block}: give 128, 256, 384 or 512, a multiple of a TPU's lanes")
    (batch, length, num_heads, size), (key_length, num_kv_heads) = query.shape, key.shape[1:3]
    spans, span = _spans(length, size, block)
    call = Call(
        causal=causal,
        window=window,
        block=block,
        span=span,
        key_length=key_length,
        num_heads=num_heads,
        heads_per_key=num_heads // num_kv_heads,
        interpret=interpret,
    )
    whole = call.span * spans

    def in_rows(x: Array, multiple: int) -> Array:
        x = _pad(x, 1, multiple).swapaxes(1, 2)
        return x.reshape(-1, *x.shape[2:])

    ids = None
    if query_segment_ids is not None and key_segment_ids is not None:
        sides = (query_segment_ids, whole * block), (key_segment_ids, block)
        ids = tuple(_pad(x, 1, multiple)[:, None] for x, multiple in sides)
    out = _attend(
        call,
        in_rows(query, whole * block),
        in_rows(key, block),
        in_rows(value, block),
        slopes.astype(jnp.float32),
        tuple(_pad(x, 2, whole).reshape(batch * num_heads, -1) for x in blocks),
        jnp.asarray(offset, jnp.int32),
        ids,
    )
    out = out.reshape(batch, num_heads, -1, whole * block)[..., :length]
    return out.transpose(0, 3, 1, 2)


def pallas_refusal(query: Array, key: Array, value: Array, block: int) -> str:
    """Why `pallas_tpu` does not take such arrays; nothing where it does."""
    if (
        query.dtype not in (jnp.float32, jnp.bfloat16)
        or not query.dtype == key.dtype == value.dtype
    ):
        return f"takes float32 or bfloat16, not {query.dtype}, {key.dtype} and {value.dtype}"
    (batch, length, num_heads, size), (key_length, num_kv_heads) = query.shape, key.shape[1:3]
    rows, key_blocks = batch * num_heads, -(-key_length // block)
    spans, span = _spans(length, size, block)
    try:
        rows_per_call(rows, spans * span, key_blocks)
        rows_per_call(rows, key_blocks, span, together=num_heads // num_kv_heads)
    except ValueError as error:
        return f"does not hold them: {error}"
    return ""


def _spans(length: int, size: int, block: int) -> tuple[int, int]:
    """How many spans of queries, and of how many blocks, so that a span's gradient fits VMEM."""
    query_blocks = -(-length // block)
    spans = -(-query_blocks * block * size * 4 // _SPAN_BYTES)
    return spans, -(-query_blocks // spans)


def _pad(x: Array, axis: int, multiple: int) -> Array:
    return jnp.pad(x, [(0, -x.shape[i] % multiple * (i == axis)) for i in range(x.ndim)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, *arrays: Any) -> Array:
    """From query [rows, T, H], rows B·N, key and value [B·K, S, H or V] to [rows, V, T]."""
    return _forward(call, *arrays)[0]


def _attend_forward(call: Call, *primals: Any) -> tuple[Array, tuple[Any, ...]]:
    arrays = jax.tree.map(lambda primal: primal.value, primals)
    out, logsumexp = _forward(call, *arrays)
    # No array, but two trees that differ: whether the slopes' gradient is asked for.
    asked = () if primals[3].perturbed else None
    return out, (*arrays, out, logsumexp, asked)


def _attend_backward(call: Call, residuals: tuple[Any, ...], d_out: Array) -> tuple[Any, ...]:
    *arrays, out, logsumexp, asked = residuals
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(1, keepdims=True)
    statistics = jnp.concatenate([logsumexp, delta], axis=1)
    gradients = _backward(call, tuple(arrays), d_out.swapaxes(1, 2), statistics, asked is not None)
    return *gradients, None, None, None


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def _forward(
    call: Call,
    query: Array,
    key: Array,
    value: Array,
    slopes: Array,
    blocks: _Blocks,
    offset: Array,
    ids: Any,
) -> tuple[Array, Array]:
    rows, length, size = query.shape
    key_blocks, value_size = key.shape[1] // call.block, value.shape[2]
    count = rows_per_call(rows, length // call.block, key_blocks)
    value = jnp.pad(value, [(0, 0), (0, 0), (0, ONES)], constant_values=1)

    def rows_from(part: tuple[Array, _Blocks]) -> Sequence[Array]:
        row, blocks = part
        results = [
            Operand(
                jax.ShapeDtypeStruct((count, features, length), dtype),
                (None, features, call.block),
                lambda at: (at.local, 0, at.query_block),
            )
            for features, dtype in ((value_size, query.dtype), (1, jnp.float32))
        ]
        return launch(
            call,
            forward_kernel,
            make_grid(_active(blocks, key_blocks)),
            jnp.stack([row, jnp.int32(0), offset]),
            slopes,
            [*_inputs(call, query, key, value), *_ids(call, ids)],
            results,
            scratch=[(1, call.block), (value_size + ONES, call.block)],
            features=size + value_size,
        )

    out, logsumexp = _in_parts(rows_from, count, blocks)
    return out, logsumexp


def _backward(
    call: Call,
    arrays: tuple[Any, ...],
    d_out: Array,
    statistics: Array,
    with_slopes: bool,
) -> tuple[Array, Array, Array, Array | None]:
    query, key, value, slopes, blocks, offset, ids = arrays
    (rows, length, size), (_, key_length, value_size) = query.shape, value.shape
    block, span, key_blocks = call.block, call.span, key_length // call.block
    count = rows_per_call(rows, key_blocks, span, together=call.heads_per_key)
    inputs = [
        *_inputs(call, query, key, value),
        _of_queries(call, d_out),
        Operand(statistics, (None, 2, block), lambda at: (at.row, 0, at.query_block)),
    ]

    def one_span(row: Array, sums: list[Array], part: tuple[Array, _Blocks]) -> Any:
        start, blocks = part
        shared = [
            Operand(x, (None, block, x.shape[2]), lambda at: (at.local, at.key_block, 0))
            for x in sums
        ]
        results = [_whole_row(count, span, size, block), *shared]
        results += [_whole_row(count, 1, block)] * with_slopes
        d_query, d_key, d_value, *d_slopes = launch(
            call,
            backward_kernel,
            make_grid(_active(blocks, key_blocks).swapaxes(1, 2)),
            jnp.stack([row, start, offset]),
            slopes,
            [*inputs, *shared, *_ids(call, ids)],
            results,
            aliases={len(inputs): 1, len(inputs) + 1: 2},
            features=3 * size + 2 * value_size,
        )
        return [d_key, d_value], (d_query, [x.sum((1, 2)) for x in d_slopes])

    def rows_from(part: tuple[Array, _Blocks]) -> Any:
        row, blocks = part
        sums = [
            jnp.zeros((count, key_length, features), jnp.float32) for features in (size, value_size)
        ]
        starts = jnp.arange(0, length // block, span, dtype=jnp.int32)
        spans = tuple(x.reshape(count, -1, span).swapaxes(0, 1) for x in blocks)
        (d_key, d_value), (d_query, d_slopes) = jax.lax.scan(
            functools.partial(one_span, row), sums, (starts, spans)
        )
        # From [spans, rows, span, H, block].
        d_query = jnp.moveaxis(d_query, (1, 3), (0, 4)).reshape(count, length, size)
        d_key, d_value = (
            x.reshape(-1, call.heads_per_key, *x.shape[1:]).sum(1) for x in (d_key, d_value)
        )
        # Cast in each part, so that of all rows there are no arrays of float32.
        return (
            (d_query * size**-0.5).astype(query.dtype),
            (d_key * size**-0.5).astype(key.dtype),
            d_value.astype(value.dtype),
            [x.sum(0) for x in d_slopes],
        )

    *gradients, d_slopes = _in_parts(rows_from, count, blocks)
    return *gradients, d_slopes[0].reshape(-1, call.num_heads).sum(0) if with_slopes else None


def _in_parts(launch: Callable[..., Any], count: int, blocks: _Blocks) -> Any:
    """Rows `count` at a time, from the number of the first and the blocks of all of them."""
    parts = jax.tree.map(lambda x: x.reshape(-1, count, x.shape[-1]), blocks)
    starts = jnp.arange(0, len(blocks[0]), count, dtype=jnp.int32)
    results = jax.lax.map(launch, (starts, parts))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)


def _active(blocks: _Blocks, key_blocks: int) -> Bool[Array, "rows query_blocks key_blocks"]:
    first, stop = blocks
    index = jnp.arange(key_blocks, dtype=jnp.int32)
    return (first[..., None] <= index) & (index < stop[..., None])


def _inputs(call: Call, query: Array, key: Array, value: Array) -> list[Operand]:
    of_keys = [
        Operand(
            x,
            (None, call.block, x.shape[2]),
            lambda at: (jax.lax.div(at.row, np.int32(call.heads_per_key)), at.key_block, 0),
        )
        for x in (key, value)
    ]
    return [_of_queries(call, query), *of_keys]


def _of_queries(call: Call, x: Array) -> Operand:
    return Operand(x, (None, call.block, x.shape[2]), lambda at: (at.row, at.query_block, 0))


def _ids(call: Call, ids: Any) -> list[Operand]:
    if ids is None:
        return []
    shape = (None, 1, call.block)
    of_batch = functools.partial(jax.lax.div, y=np.int32(call.num_heads))
    return [
        Operand(ids[0], shape, lambda at: (of_batch(at.row), 0, at.query_block)),
        Operand(ids[1], shape, lambda at: (of_batch(at.row), 0, at.key_block)),
    ]


def _whole_row(*shape: int) -> Operand:
    """A result that stays in place for all steps of a row, of shape [rows, ...]."""
    return Operand(
        jax.ShapeDtypeStruct(shape, jnp.float32),
        (None, *shape[1:]),
        lambda at: (at.local, *(0 for _ in shape[1:])),
    )
