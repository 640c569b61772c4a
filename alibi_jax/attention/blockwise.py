"""Attention block by block in plain XLA: memory linear in the length, no work on the future."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from alibi_jax.attention.blocks import take_token_block
from alibi_jax.attention.flash import flash_attention
from alibi_jax.attention.flash_passes import FlashSettings, Operands, Ranges
from alibi_jax.attention.reach import KeyBlocks, reach
from alibi_jax.attention.visibility import (
    TokenMetadata,
    Visibility,
    bias_between,
    token_metadata,
    visible_pairs,
)
from alibi_jax.biases import Bias, LinearBias


def blockwise(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    bias: Bias | None,
    sight: Visibility,
    query_features: Any = None,
    key_features: Any = None,
    mask: Bool[Array, "#B #N T S"] | None = None,
    tolerance: float,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    block: int,
    head_by_head: bool,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Arguments and result as `attention` has them, and the log-sum-exp of each row of scores.

    `head_by_head`: one head of one row after the other, each with a reach of its own, rather
    than all at once; for a processor with few cores, and biases that one head needs no other
    for.
    """
    length, num_heads = query.shape[1:3]
    key_length, num_kv_heads = key.shape[1:3]
    linear = bias if isinstance(bias, LinearBias) else None
    # Where a mask may hide a query's own key, its weight says nothing about the rest of the row.
    reaching = linear if mask is None else None
    blocks = reach(query, key, reaching, sight, block=block, tolerance=tolerance)
    if not head_by_head:
        # Rows that see nothing need no block, neither the first nor any other.
        first = jnp.where(blocks.first < blocks.stop, blocks.first, key_length)
        stop = blocks.stop.max((0, 1))
        blocks = KeyBlocks(jnp.minimum(first.min((0, 1)), stop), stop)
    padding, key_padding = -length % block, -key_length % block
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    key, value = (jnp.repeat(x, num_heads // num_kv_heads, axis=1) for x in (key, value))
    rows, columns = token_metadata(sight, length, key_length, query_features, key_features)
    masked = sight.query_segment_ids is not None or mask is not None
    operands = Operands(
        _fill(query, -2, padding),
        _fill(key, -2, key_padding),
        _fill(value, -2, key_padding),
        bias=None,
        rows=_fill_places(rows, padding),
        columns=_fill_places(columns, key_padding),
        mask=_fill(_fill(mask, -2, padding), -1, key_padding),
        ranges=_ranges(blocks, rows.indices, key_length, block, sight, masked),
        dropout_key=dropout_key,
    )
    rule = FlashSettings(
        bias=None,
        seen=functools.partial(
            visible_pairs,
            causal=sight.causal,
            window=sight.window,
            num_keys=key_length if key_padding else None,
        ),
        query_block=block,
        key_block=block,
        masked_before=sight.window is not None and not masked,
        masked_after=sight.causal or sight.window is not None or masked or key_padding > 0,
        dropout_rate=dropout_rate,
    )
    both = (
        _head_by_head(rule, operands, linear) if head_by_head else _all_heads(rule, operands, bias)
    )
    out, log_sum = (jnp.swapaxes(x[:, :, :length], 1, 2) for x in both)
    return out, log_sum


def _fill(x: Any, axis: int, padding: int) -> Any:
    """`x`, or a tree of such, with zeros at the end of an axis."""
    if padding == 0:
        return x

    def pad(x: Array) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, padding)
        return jnp.pad(x, widths)

    return jax.tree.map(pad, x)


def _fill_places(token_metadata: TokenMetadata, padding: int) -> TokenMetadata:
    """Indices go on past the last, so that nothing that is filled in is taken for the first."""
    indices = (
        jnp.arange(len(token_metadata.indices) + padding, dtype=jnp.int32)
        + token_metadata.indices[0]
    )
    features = _fill(token_metadata.features, 1, padding)
    filled = _fill(token_metadata._replace(features=None), -1, padding)
    return filled._replace(indices=indices, features=features)


def _ranges(
    blocks: KeyBlocks,
    own: Int[Array, "T"],
    key_length: int,
    block: int,
    sight: Visibility,
    masked: bool,
) -> Ranges:
    """`blocks`, and which of them no query of theirs need be kept from; none if `masked`."""
    first, stop = blocks
    if masked:
        return Ranges(first, first, first, stop)
    own_least = own[::block]
    own_most = own_least + block - 1
    full_first = jnp.zeros_like(own_least)
    full_stop = jnp.full_like(own_least, key_length // block)
    if sight.causal:
        full_stop = jnp.minimum(full_stop, (own_least + 1) // block)
    if sight.window is not None:
        full_first = jnp.maximum(full_first, -((sight.window - 1 - own_most) // block))
        full_stop = jnp.minimum(full_stop, (own_least + sight.window) // block)
    full_first = jnp.clip(full_first, first, stop)
    return Ranges(first, full_first, jnp.clip(full_stop, full_first, stop), stop)


def _all_heads(rule: FlashSettings, operands: Operands, bias: Bias | None) -> tuple[Array, Array]:
    """All heads of all rows at once, over the blocks that any of them needs."""
    of_block = functools.partial(bias_between, bias)
    examples = (
        take_token_block(operands.rows, 0, rule.query_block),
        take_token_block(operands.columns, 0, rule.key_block),
    )
    if jax.eval_shape(of_block, *examples) is None:
        return flash_attention(rule, operands)
    # Parameters that the function closes over become operands, so that they have gradients.
    converted, parameters = jax.closure_convert(of_block, *examples)

    def bias_of(parameters: list[Array], rows: TokenMetadata, columns: TokenMetadata) -> Array:
        return converted(rows, columns, *parameters)

    rule = dataclasses.replace(rule, bias=bias_of)
    return flash_attention(rule, operands._replace(bias=parameters))


def _head_by_head(
    rule: FlashSettings, operands: Operands, bias: LinearBias | None
) -> tuple[Array, Array]:
    """One head of one row after the other, each over its own blocks."""
    if bias is not None:
        rule = dataclasses.replace(rule, bias=_linear)
        batch, num_heads = operands.query.shape[:2]
        slopes = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (batch, num_heads))[..., None],
            (bias.slopes, bias.future_slopes),
        )
        operands = operands._replace(bias=slopes)
    return flash_attention(rule, operands, head_by_head=True)


def _linear(
    slopes: tuple[Array, Array | None], rows: TokenMetadata, columns: TokenMetadata
) -> Float[Array, "t s"]:
    """The linear bias of one head."""
    return LinearBias(*slopes)(rows.positions, columns.positions)[0]
