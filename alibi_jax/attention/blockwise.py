"""Attention block by block in plain XLA, with memory linear in the length.

Blocks that no query sees, such as those of the future, are not computed.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Float, Int, Key

from alibi_jax.attention.blocks import padding_to_blocks, take_token_block
from alibi_jax.attention.flash import flash_attention
from alibi_jax.attention.flash_passes import FlashSettings, KeyLoopBounds, Operands
from alibi_jax.attention.reach import KeyBlocks, reach
from alibi_jax.attention.visibility import (
    TokenMetadata,
    Visibility,
    bias_between,
    token_metadata,
    visible_pairs,
)
from alibi_jax.biases import Bias, LinearBias
from alibi_jax.biases.distances import same_rank


def blockwise(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    bias: Bias | None,
    visibility: Visibility,
    query_features: Any = None,
    key_features: Any = None,
    tolerance: float,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    block_size: int,
    head_by_head: bool,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Computes attention, and the log-sum-exp of each row of scores.

    The arguments have the names and meanings of `attention`'s arguments. `head_by_head` computes
    one head of one batch row after another, each with its own reach, instead of all at once. It
    suits a processor with few cores. It serves a `LinearBias` or no bias, and has no dropout.
    """
    length, num_heads = query.shape[1:3]
    key_length, num_kv_heads = key.shape[1:3]
    linear = bias if isinstance(bias, LinearBias) else None
    blocks = reach(query, key, linear, visibility, block_size=block_size, tolerance=tolerance)
    if not head_by_head:
        # This is the union over batch rows and heads; those that need no block do not widen it.
        start = jnp.where(blocks.start < blocks.stop, blocks.start, key_length)
        stop = blocks.stop.max((0, 1))
        blocks = KeyBlocks(jnp.minimum(start.min((0, 1)), stop), stop)
    query_padding, key_padding = (padding_to_blocks(x, block_size) for x in (length, key_length))
    # A symbolic length may need padding.
    keys_padded = not isinstance(key_padding, int) or key_padding > 0
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    key, value = (jnp.repeat(x, num_heads // num_kv_heads, axis=1) for x in (key, value))
    queries, keys = token_metadata(visibility, length, key_length, query_features, key_features)
    # Segments and masks may hide keys in any block, so that no block is known to be full.
    any_block_masked = visibility.query_segment_ids is not None or visibility.mask is not None
    operands = Operands(
        _pad_end(query, -2, query_padding),
        _pad_end(key, -2, key_padding),
        _pad_end(value, -2, key_padding),
        bias_parameters=None,
        bias_constants=None,
        query_tokens=_pad_tokens(queries, query_padding),
        key_tokens=_pad_tokens(keys, key_padding),
        mask=_pad_end(_pad_end(visibility.mask, -2, query_padding), -1, key_padding),
        key_bounds=_key_loop_bounds(
            blocks, queries.indices, key_length, block_size, visibility, any_block_masked
        ),
        dropout_key=dropout_key,
    )
    windowed = visibility.window is not None
    settings = FlashSettings(
        bias=None,
        visible=functools.partial(
            visible_pairs,
            causal=visibility.causal,
            window=visibility.window,
            num_keys=key_length if keys_padded else None,
        ),
        query_block_size=block_size,
        key_block_size=block_size,
        masked_before=windowed and not any_block_masked,
        masked_after=visibility.causal or windowed or any_block_masked or keys_padded,
        dropout_rate=dropout_rate,
    )
    results = (
        _head_by_head(settings, operands, linear)
        if head_by_head
        else _all_heads(settings, operands, bias)
    )
    out, log_sum_exp = (jnp.swapaxes(x[:, :, :length], 1, 2) for x in results)
    return out, log_sum_exp


def _pad_end(x: Any, axis: int, padding: Any) -> Any:
    """An array, or each array of a tree, with `padding` zeros at the end of an axis."""
    if isinstance(padding, int) and padding == 0:
        return x

    def pad(x: Array) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, padding)
        return jnp.pad(x, widths)

    return jax.tree.map(pad, x)


def _pad_tokens(tokens: TokenMetadata, padding: Any) -> TokenMetadata:
    """Adds padding at the end of the tokens; the indices count on through the padding."""
    indices = jnp.arange(tokens.indices.shape[0] + padding, dtype=jnp.int32) + tokens.indices[0]
    features = _pad_end(tokens.features, 1, padding)
    padded = _pad_end(tokens._replace(features=None), -1, padding)
    return padded._replace(indices=indices, features=features)


def _key_loop_bounds(
    blocks: KeyBlocks,
    query_indices: Int[Array, "T"],
    key_length: Any,
    block_size: int,
    visibility: Visibility,
    any_block_masked: bool,
) -> KeyLoopBounds:
    """The bounds of `blocks`, and of the full blocks among them.

    With `any_block_masked` no block counts as full.
    """
    start, stop = blocks
    if any_block_masked:
        return KeyLoopBounds(start, start, start, stop)
    query_min = query_indices[::block_size]
    full_start = jnp.zeros_like(query_min)
    full_stop = jnp.full_like(query_min, key_length // block_size)
    if visibility.causal:
        full_stop = jnp.minimum(full_stop, (query_min + 1) // block_size)
    if visibility.window is not None:
        window = visibility.window
        # The last query of a block sees no key before `query_min` - `window` + `block_size`. The
        # limits of `query_min` keep the differences and the sum within int32 for any window.
        hidden_blocks = -((window - jnp.maximum(query_min, 0)) // block_size)
        full_start = jnp.maximum(full_start, hidden_blocks + 1)
        seen_stop = jnp.minimum(query_min, key_length - window) + window
        full_stop = jnp.minimum(full_stop, seen_stop // block_size)
    start, full_start, full_stop, stop = same_rank(start, full_start, full_stop, stop)
    full_start = jnp.clip(full_start, start, stop)
    return KeyLoopBounds(start, full_start, jnp.clip(full_stop, full_start, stop), stop)


def _all_heads(
    settings: FlashSettings, operands: Operands, bias: Bias | None
) -> tuple[Array, Array]:
    """Computes all heads of all batch rows at once, over the blocks that any of them needs."""
    block_bias = functools.partial(bias_between, bias)
    examples = (
        take_token_block(operands.query_tokens, 0, settings.query_block_size),
        take_token_block(operands.key_tokens, 0, settings.key_block_size),
    )
    closed = jax.make_jaxpr(block_bias)(*examples)
    if not closed.out_avals:
        return flash_attention(settings, operands)
    # Traced arrays that the function closes over become operands: the gradient is computed in
    # another trace, and parameters have gradients themselves.
    parameters: dict[int, Array] = {}
    constants: dict[int, Array] = {}
    known: dict[int, Any] = {}
    for index, x in enumerate(closed.consts):
        is_traced = isinstance(x, jax.core.Tracer)
        is_parameter = is_traced and jnp.issubdtype(x.dtype, jnp.inexact)
        (parameters if is_parameter else constants if is_traced else known)[index] = x

    def bias_with_constants(
        constants: dict[int, Array],
        parameters: dict[int, Array],
        queries: TokenMetadata,
        keys: TokenMetadata,
    ) -> Array:
        values = known | constants | parameters
        function = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, [values[i] for i in sorted(values)]))
        return function(*jax.tree.leaves((queries, keys)))[0]

    settings = dataclasses.replace(settings, bias=bias_with_constants)
    operands = operands._replace(bias_constants=constants, bias_parameters=parameters)
    return flash_attention(settings, operands)


def _head_by_head(
    settings: FlashSettings, operands: Operands, bias: LinearBias | None
) -> tuple[Array, Array]:
    """Computes one head of one batch row after another, each over its own blocks."""
    if bias is not None:
        settings = dataclasses.replace(settings, bias=_linear_bias_of_head)
        batch, num_heads = operands.query.shape[:2]
        slopes = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (batch, num_heads))[..., None],
            (bias.slopes, bias.future_slopes),
        )
        operands = operands._replace(bias_parameters=slopes)
    return flash_attention(settings, operands, head_by_head=True)


def _linear_bias_of_head(
    constants: None, slopes: tuple[Array, Array | None], queries: TokenMetadata, keys: TokenMetadata
) -> Float[Array, "t s"]:
    return LinearBias(*slopes)(queries.positions, keys.positions)[0]
