"""Flash attention, for all heads at once or for one head after another, and its gradient.

The loop over heads is inside one operation with one gradient. If each iteration had a gradient of
its own, JAX would stack copies of the inputs that these gradients need.
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
    match_varying_axes,
)
from alibi_jax.attention.visibility import TokenMetadata


def flash_attention(
    settings: FlashSettings, operands: Operands, *, head_by_head: bool = False
) -> tuple[Array, Array]:
    """Computes softmax(query · key / sqrt(H) + bias) · value over the given ranges of key blocks.

    Returns the result, `[B, N, T, V]` in the dtype of `query`, and the log-sum-exp of each row of
    scores, `[B, N, T]`, -inf where the row sees nothing. Scores and softmax are float32.
    Both can be differentiated once, in the queries, keys, values, bias parameters and features.

    `head_by_head` computes one head of one batch row after another. The bias's parameters and the
    key bounds then have leading axes of batch and heads, and there are no features and no dropout.
    """
    # Inside `jax.shard_map`, some operands may be equal on all devices and others not. Here all
    # operands are marked as varying, so that JAX sums the gradients of equal operands over devices.
    operands = jax.tree.map(functools.partial(match_varying_axes, operands), operands)
    return _flash_attention(settings, head_by_head, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash_attention(
    settings: FlashSettings, head_by_head: bool, operands: Operands
) -> tuple[Array, Array]:
    if head_by_head:
        out, log_sum_exp = _map_heads(lambda *parts: forward_pass(settings, *parts), operands)
    else:
        out, log_sum_exp = forward_pass(settings, operands)
    return out.astype(operands.query.dtype), log_sum_exp


def _forward_rule(
    settings: FlashSettings, head_by_head: bool, operands: Operands
) -> tuple[tuple[Array, Array], tuple]:
    leaves, tree = jax.tree.flatten(operands)
    operands = jax.tree.unflatten(tree, [leaf.value for leaf in leaves])
    perturbed = jax.tree.unflatten(tree, [leaf.perturbed for leaf in leaves])
    results = _flash_attention(settings, head_by_head, operands)
    # Residuals may hold only arrays. A boolean is therefore encoded in the tree's structure, as ()
    # or None. It tells the backward rule whether the gradients of the bias are needed.
    bias_inputs = (
        perturbed.bias_parameters,
        perturbed.query_tokens.features,
        perturbed.key_tokens.features,
    )
    return results, (operands, results, () if any(jax.tree.leaves(bias_inputs)) else None)


def _backward_rule(
    settings: FlashSettings, head_by_head: bool, residuals: tuple, cotangents: tuple
) -> tuple[Operands]:
    operands, results, bias_flag = residuals
    cotangents = tuple(
        jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x for x in cotangents
    )
    backward = functools.partial(backward_pass, settings, with_bias_gradients=bias_flag is not None)
    inputs = operands, *results, *cotangents
    gradients = _map_heads(backward, *inputs) if head_by_head else backward(*inputs)
    # Gradients stay float32 until here, as do the results of the forward pass: XLA for CPUs
    # converts a whole 16-bit array to float32 whenever a loop writes a part of it.
    query, key, value = (x.astype(y.dtype) for x, y in zip(gradients[:3], operands[:3]))
    return (gradients._replace(query=query, key=key, value=value),)


_flash_attention.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _map_heads(function: Callable[..., Any], operands: Operands, *arrays: Array) -> Any:
    """Applies `function` to one head of one batch row after another.

    The results are stacked as `[B, N, ...]`.
    """
    batch, num_heads = operands.query.shape[:2]

    def one_head(index: Array) -> Any:
        row, head = index // num_heads, index % num_heads

        def of_head(tree: Any) -> Any:
            return jax.tree.map(lambda x: _pick(_pick(x, row), head), tree)

        def of_row(tokens: TokenMetadata) -> TokenMetadata:
            return jax.tree.map(lambda x: x if x.ndim == 1 else _pick(x, row), tokens)

        head_operands = Operands(
            query=of_head(operands.query),
            key=of_head(operands.key),
            value=of_head(operands.value),
            bias_parameters=of_head(operands.bias_parameters),
            bias_constants=operands.bias_constants,
            query_tokens=of_row(operands.query_tokens),
            key_tokens=of_row(operands.key_tokens),
            mask=of_head(operands.mask),
            key_bounds=of_head(operands.key_bounds),
            dropout_key=None,
        )
        return function(head_operands, *of_head(arrays))

    stacked = jax.lax.map(one_head, jnp.arange(batch * num_heads, dtype=jnp.int32))
    return jax.tree.map(lambda x: x.reshape(batch, num_heads, *x.shape[1:]), stacked)


def _pick(x: Array, index: Array) -> Array:
    """`x[index]`, or `x[0]` where the axis has size 1."""
    return x[0] if x.shape[0] == 1 else slice_along(x, index, 1, 0)[0]
