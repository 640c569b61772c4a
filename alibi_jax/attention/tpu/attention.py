"""Attention with linear biases on TPUs: one forward and one backward kernel.

In the arrays of the kernels, a row is one query head of one batch row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from alibi_jax.attention.reach import KeyBlocks
from alibi_jax.attention.tpu.grid import rows_per_launch
from alibi_jax.attention.tpu.kernels import LANES, KernelConfig
from alibi_jax.attention.tpu.passes import backward_pass, forward_pass

_MAX_BLOCK = 512
# The gradient of the queries stays in VMEM while the kernel passes over the keys. Queries whose
# gradient is larger are processed in several spans.
_SPAN_BYTES = 1 << 22


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
        return (
            "takes arrays of one dtype, float32 or bfloat16, not "
            f"{query.dtype}, {key.dtype} and {value.dtype}: convert them, or use 'blockwise'"
        )
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
    return forward_pass(config, *arrays)[0]


def _attend_forward(config: KernelConfig, *primals: Any) -> tuple[Array, tuple[Any, ...]]:
    arrays = jax.tree.map(lambda primal: primal.value, primals)
    out, logsumexp = forward_pass(config, *arrays)
    # Residuals may hold only arrays. A boolean is therefore encoded in the tree's structure.
    slopes_perturbed = () if primals[3].perturbed else None
    return out, (*arrays, out, logsumexp, slopes_perturbed)


def _attend_backward(
    config: KernelConfig, residuals: tuple[Any, ...], d_out: Array
) -> tuple[Any, ...]:
    *arrays, out, logsumexp, slopes_perturbed = residuals
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(1, keepdims=True)
    statistics = jnp.concatenate([logsumexp, delta], axis=1)
    gradients = backward_pass(
        config, tuple(arrays), d_out.swapaxes(1, 2), statistics, slopes_perturbed is not None
    )
    return *gradients, None, None, None


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)
