"""Attention block by block over many heads, all at once or one after the other, and its gradient.

One after the other, too, is one operation with one gradient, and no loop over such: of a loop,
JAX stacks what the gradient of each step needs, though it is all there already.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from alibi_jax.attention.blocks import slice_along
from alibi_jax.attention.flash_passes import (
    FlashSettings,
    Operands,
    backward_pass,
    forward_pass,
    vary_alike,
)
from alibi_jax.attention.visibility import TokenMetadata


def flash_attention(
    rule: FlashSettings, operands: Operands, *, head_by_head: bool = False
) -> tuple[Array, Array]:
    """Softmax(query · key / sqrt(H) + bias) · value over the blocks that the ranges name.

    `[B, N, T, V]` in the dtype of `query`; and the log-sum-exp of each row of scores, `[B, N, T]`,
    -inf where it sees nothing. Scores and softmax are float32. Differentiable once, in the
    queries, keys, values, the bias's operands and the features.

    `head_by_head`: bias and ranges have the axes of batch and heads in front, there are neither
    features nor dropout, and one head of one row is computed after the other.
    """
    # Inside `jax.shard_map` some may be the same on all devices and others not: made alike here,
    # so that what they get as gradients, which is not the same on all, is summed up outside.
    operands = jax.tree.map(functools.partial(vary_alike, operands), operands)
    return _online_attention(rule, head_by_head, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _online_attention(
    rule: FlashSettings, head_by_head: bool, operands: Operands
) -> tuple[Array, Array]:
    if head_by_head:
        out, log_sum = _each_head(lambda *parts: forward_pass(rule, *parts), operands)
    else:
        out, log_sum = forward_pass(rule, operands)
    return out.astype(operands.query.dtype), log_sum


def _with_residuals(
    rule: FlashSettings, head_by_head: bool, operands: Operands
) -> tuple[tuple[Array, Array], tuple]:
    leaves, tree = jax.tree.flatten(operands)
    operands = jax.tree.unflatten(tree, [leaf.value for leaf in leaves])
    perturbed = jax.tree.unflatten(tree, [leaf.perturbed for leaf in leaves])
    results = _online_attention(rule, head_by_head, operands)
    # Told to the gradient by the tree's structure: whether anyone asks for the bias's.
    asked = perturbed.bias, perturbed.rows.features, perturbed.columns.features
    return results, (operands, results, () if any(jax.tree.leaves(asked)) else None)


def _gradient(
    rule: FlashSettings, head_by_head: bool, residuals: tuple, bars: tuple
) -> tuple[Operands]:
    operands, results, asked = residuals
    bars = tuple(
        jnp.zeros(bar.shape, bar.dtype) if isinstance(bar, SymbolicZero) else bar for bar in bars
    )
    of = functools.partial(backward_pass, rule, biased=asked is not None)
    given = operands, *results, *bars
    sums = _each_head(of, *given) if head_by_head else of(*given)
    # In float32 until here, as in `forward`: XLA for CPUs makes float32 of 16-bit arrays, whole,
    # whenever a loop writes a part of them.
    query, key, value = (x.astype(y.dtype) for x, y in zip(sums[:3], operands[:3]))
    return (sums._replace(query=query, key=key, value=value),)


_online_attention.defvjp(_with_residuals, _gradient, symbolic_zeros=True)


def _each_head(function: Callable[..., Any], operands: Operands, *arrays: Array) -> Any:
    """`function` of one head of one row after the other, its results stacked `[B, N, ...]`."""
    batch, num_heads = operands.query.shape[:2]

    def one(number: Array) -> Any:
        row, head = number // num_heads, number % num_heads

        def of_head(tree: Any) -> Any:
            return jax.tree.map(lambda x: _pick(_pick(x, row), head), tree)

        def of_row(places: TokenMetadata) -> TokenMetadata:
            return jax.tree.map(lambda x: x if x.ndim == 1 else _pick(x, row), places)

        own = Operands(
            query=of_head(operands.query),
            key=of_head(operands.key),
            value=of_head(operands.value),
            bias=of_head(operands.bias),
            rows=of_row(operands.rows),
            columns=of_row(operands.columns),
            mask=of_head(operands.mask),
            ranges=of_head(operands.ranges),
            dropout_key=None,
        )
        return function(own, *of_head(arrays))

    stacked = jax.lax.map(one, jnp.arange(batch * num_heads, dtype=jnp.int32))
    return jax.tree.map(lambda x: x.reshape(batch, num_heads, *x.shape[1:]), stacked)


def _pick(x: Array, number: Array) -> Array:
    """`x[number]`, or the only one there is."""
    return x[0] if x.shape[0] == 1 else slice_along(x, number, 1, 0)[0]
