"""Softmax attention block by block with a running maximum and sum, and its gradient.

The forward pass is the online softmax of Milakov & Gimelshein 2018 (arXiv 1805.02867). The backward
pass recomputes each block of scores from the log-sum-exps of the rows (Dao et al. 2022, arXiv
2205.14135, section 3.1 and algorithm 4). The outer loop is over blocks of queries. The inner loop
is over the key blocks of one query block; its bounds may be traced.

d_x is the gradient of x.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from alibi_jax.attention.blocks import add_to_block, join_blocks, take_block, take_token_block
from alibi_jax.attention.visibility import TokenMetadata
from alibi_jax.biases.distances import same_rank

# Finite, so that the difference of two masked scores is 0 and not NaN.
MASKED = float(jnp.finfo(jnp.float32).min)


class KeyLoopBounds(NamedTuple):
    """The key blocks of each query block: `start` to `stop` - 1.

    The key blocks from `full_start` to `full_stop` - 1 are full: each query sees each of their
    keys, so these blocks need no mask.
    """

    start: Int[Array, "blocks"]
    full_start: Int[Array, "blocks"]
    full_stop: Int[Array, "blocks"]
    stop: Int[Array, "blocks"]


class Operands(NamedTuple):
    """The arrays that are processed in blocks; leading axes, if any, are batch and heads."""

    query: Float[Array, "*G T H"]
    key: Float[Array, "*G S H"]
    value: Float[Array, "*G S V"]
    bias_parameters: Any
    # Arrays that the bias reads and that have no gradient.
    bias_constants: Any
    query_tokens: TokenMetadata
    key_tokens: TokenMetadata
    mask: Bool[Array, "*#G T S"] | None
    key_bounds: KeyLoopBounds
    dropout_key: Key[Array, ""] | None


@dataclasses.dataclass(frozen=True)
class FlashSettings:
    """The settings of a flash attention, all known while tracing.

    `bias` maps its constants, its parameters and the metadata of queries and keys to a bias
    `[..., t, s]`. `visible` maps the metadata to true where a query sees a key, or to None if each
    query sees each key.
    """

    bias: Callable[[Any, Any, TokenMetadata, TokenMetadata], Array] | None
    visible: Callable[[TokenMetadata, TokenMetadata], Array | None]
    query_block_size: int
    key_block_size: int
    # Whether any query block has masked key blocks before its full key blocks.
    masked_before: bool
    # Whether any query block has masked key blocks after its full key blocks.
    masked_after: bool
    dropout_rate: float


def _loop_over_key_blocks(
    settings: FlashSettings, operands: Operands, query_block: Array, step: Callable, init: Any
) -> Any:
    """Runs `step(carry, key_block, masked)` over the key blocks of a query block."""
    start, full_start, full_stop, stop = (x[query_block] for x in operands.key_bounds)

    def run(init: Any, start: Array, stop: Array, masked: bool) -> Any:
        return jax.lax.fori_loop(start, stop, lambda j, carry: step(carry, j, masked), init)

    carry = init
    if settings.masked_before:
        carry = run(carry, start, full_start, True)
    carry = run(carry, full_start, full_stop, False)
    return run(carry, full_stop, stop, True) if settings.masked_after else carry


def _visible_in_block(
    settings: FlashSettings,
    operands: Operands,
    tokens: tuple[TokenMetadata, TokenMetadata],
    i: Array,
    j: Array,
) -> Array | None:
    """True where queries of block i see keys of block j; None where each query sees each key."""
    visible = settings.visible(*tokens)
    if operands.mask is None:
        return visible
    mask_rows = take_block(operands.mask, i, settings.query_block_size)
    mask = take_block(mask_rows, j, settings.key_block_size, -1)
    return mask if visible is None else mask & visible


def _bias_of_block(
    bias: Callable[[Any, TokenMetadata, TokenMetadata], Array],
    query_tokens: TokenMetadata,
    key_tokens: TokenMetadata,
    shape: tuple[int, ...],
    parameters: Any,
    query_features: Any,
    key_features: Any,
) -> Array:
    """The bias between two blocks, as a function of the inputs that have gradients."""
    query_tokens = query_tokens._replace(features=query_features)
    key_tokens = key_tokens._replace(features=key_features)
    values = bias(parameters, query_tokens, key_tokens)
    return jnp.broadcast_to(values.astype(jnp.float32), shape)


def _dropout_keep(
    settings: FlashSettings, operands: Operands, i: Array, j: Array, shape: tuple[int, ...]
) -> Array | None:
    """True where dropout keeps a weight of blocks i and j, `[..., t, s]`; None without dropout."""
    if operands.dropout_key is None:
        return None
    key = jax.random.fold_in(jax.random.fold_in(operands.dropout_key, i), j)
    return jax.random.bernoulli(key, 1.0 - settings.dropout_rate, shape)


def forward_pass(settings: FlashSettings, operands: Operands) -> tuple[Array, Array]:
    """Computes the result, and the log-sum-exp of each row of scores, both float32.

    The log-sum-exp is -inf where a row sees nothing.
    """
    scale = operands.query.shape[-1] ** -0.5
    query_block_size, key_block_size = settings.query_block_size, settings.key_block_size
    num_query_blocks = operands.query.shape[-2] // query_block_size

    def attend(i: Array) -> tuple[Array, Array]:
        query = take_block(operands.query, i, query_block_size)
        query_tokens = take_token_block(operands.query_tokens, i, query_block_size)

        def step(carry: tuple[Array, ...], j: Array, masked: bool) -> tuple[Array, ...]:
            out, row_max, row_sum = carry
            key, value = (take_block(x, j, key_block_size) for x in (operands.key, operands.value))
            key_tokens = take_token_block(operands.key_tokens, j, key_block_size)
            scores = _dot("...th,...sh->...ts", query, key) * scale
            if settings.bias is not None:
                bias = settings.bias(
                    operands.bias_constants, operands.bias_parameters, query_tokens, key_tokens
                )
                scores, bias = same_rank(scores, bias.astype(jnp.float32))
                scores += bias
            tokens = query_tokens, key_tokens
            visible = _visible_in_block(settings, operands, tokens, i, j) if masked else None
            if visible is not None:
                scores = jnp.where(visible, scores, MASKED)
            # `row_max` starts at MASKED. So `new_max` is finite even in a row whose biases are all
            # -inf, and no difference below is NaN.
            new_max = jnp.maximum(row_max, scores.max(axis=-1))
            weights = jnp.exp(scores - new_max[..., None])
            if visible is not None:
                # In a row that has seen no key yet, all scores equal the maximum, so that all
                # weights are 1.
                weights = jnp.where(visible, weights, 0.0)
            rescale = jnp.exp(row_max - new_max)
            row_sum = row_sum * rescale + weights.sum(axis=-1)
            keep = _dropout_keep(settings, operands, i, j, weights.shape)
            if keep is not None:
                weights = jnp.where(keep, weights / (1.0 - settings.dropout_rate), 0.0)
            out = out * rescale[..., None] + _dot(
                "...ts,...sv->...tv", weights.astype(value.dtype), value
            )
            return out, new_max, row_sum

        shape = query.shape[:-1]
        init = (
            _full(operands, (*shape, operands.value.shape[-1]), 0.0),
            _full(operands, shape, MASKED),
            _full(operands, shape, 0.0),
        )
        out, row_max, row_sum = _loop_over_key_blocks(settings, operands, i, step, init)
        sees_keys = row_sum > 0.0
        row_sum = jnp.where(sees_keys, row_sum, 1.0)
        log_sum_exp = jnp.where(sees_keys, row_max + jnp.log(row_sum), -jnp.inf)
        return out / row_sum[..., None], log_sum_exp

    out, log_sum_exp = jax.lax.map(attend, jnp.arange(num_query_blocks, dtype=jnp.int32))
    return join_blocks(out, -2), join_blocks(log_sum_exp, -1)


def _dot(equation: str, left: Array, right: Array) -> Array:
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def match_varying_axes(operands: Any, x: Array) -> Array:
    """`x`, marked as varying over each axis of a `jax.shard_map` over which an operand varies.

    Returns `x` itself outside of `jax.shard_map`.
    """
    varying = (jax.typeof(y).mat.varying for y in jax.tree.leaves(operands))
    missing = frozenset().union(*varying) - jax.typeof(x).mat.varying
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x


def _full(operands: Operands, shape: tuple[int, ...], value: float) -> Float[Array, "..."]:
    return match_varying_axes(operands, jnp.full(shape, value, jnp.float32))


def backward_pass(
    settings: FlashSettings,
    operands: Operands,
    out: Array,
    log_sum_exp: Array,
    d_out: Array,
    d_log_sum_exp: Array,
    *,
    with_bias_gradients: bool,
) -> Operands:
    """Computes the operands' gradients, float32, from the gradients of the forward pass's results.

    The gradients of the bias's parameters and of the features are computed only if
    `with_bias_gradients` is true.
    """
    # exp(score - inf) is 0 in rows that see nothing.
    log_sum_exp = jnp.where(log_sum_exp == -jnp.inf, jnp.inf, log_sum_exp)
    scale = operands.query.shape[-1] ** -0.5
    query_block_size, key_block_size = settings.query_block_size, settings.key_block_size
    num_query_blocks = operands.query.shape[-2] // query_block_size
    # Algorithm 4's D, the weighted mean of a row's d_weights, minus the log-sum-exp's gradient.
    deltas = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1) - d_log_sum_exp

    keys_transposed = jnp.swapaxes(operands.key, -1, -2)

    def zeros(tree: Any) -> Any:
        return jax.tree.map(lambda x: _full(operands, x.shape, 0.0), tree)

    def gradients_of_block(key_sums: tuple, i: Array) -> tuple[tuple, tuple]:
        query, d_out_block = (take_block(x, i, query_block_size) for x in (operands.query, d_out))
        query_tokens = take_token_block(operands.query_tokens, i, query_block_size)
        log_sum_exps, delta = (
            take_block(x, i, query_block_size, -1) for x in (log_sum_exp, deltas)
        )

        def step(carry: tuple, j: Array, masked: bool) -> tuple:
            d_query, d_query_features, (d_key, d_value, d_parameters, d_key_features) = carry
            key, value = (take_block(x, j, key_block_size) for x in (operands.key, operands.value))
            key_tokens = take_token_block(operands.key_tokens, j, key_block_size)
            # The scores are transposed to [s, t]; below, the keys are transposed to [h, s] and
            # d_query to [h, t]. So no product sums over the rows of its first operand: on CPUs such
            # products are slow in 16 bits.
            scores = _dot("...sh,...th->...st", key, query) * scale
            shape = *query.shape[:-1], key.shape[-2]
            bias_vjp = None
            if settings.bias is not None:
                bias_of_block = functools.partial(
                    _bias_of_block,
                    functools.partial(settings.bias, operands.bias_constants),
                    query_tokens,
                    key_tokens,
                    shape,
                )
                inputs = operands.bias_parameters, query_tokens.features, key_tokens.features
                if not with_bias_gradients:
                    bias = bias_of_block(*inputs)
                else:
                    bias, bias_vjp = jax.vjp(bias_of_block, *inputs)
                scores += jnp.swapaxes(bias, -1, -2)
            weights = jnp.exp(scores - log_sum_exps[..., None, :])
            tokens = query_tokens, key_tokens
            visible = _visible_in_block(settings, operands, tokens, i, j) if masked else None
            if visible is not None:
                weights = jnp.where(jnp.swapaxes(visible, -1, -2), weights, 0.0)
            d_weights = _dot("...sv,...tv->...st", value, d_out_block)
            dropped_weights = weights
            keep = _dropout_keep(settings, operands, i, j, shape)
            if keep is not None:
                keep_rate, keep = 1.0 - settings.dropout_rate, jnp.swapaxes(keep, -1, -2)
                dropped_weights = jnp.where(keep, weights / keep_rate, 0.0)
                d_weights = jnp.where(keep, d_weights / keep_rate, 0.0)
            d_scores = weights * (d_weights - delta[..., None, :])
            if bias_vjp is not None:
                *summed, d_key_features_block = bias_vjp(jnp.swapaxes(d_scores, -1, -2))
                d_parameters, d_query_features = jax.tree.map(
                    jnp.add, (d_parameters, d_query_features), tuple(summed)
                )
                d_key_features = jax.tree.map(
                    lambda x, part: add_to_block(x, part, j, key_block_size, 1),
                    d_key_features,
                    d_key_features_block,
                )
            d_scores = d_scores.astype(query.dtype)
            key_transposed = take_block(keys_transposed, j, key_block_size, -1)
            d_query += _dot("...hs,...st->...ht", key_transposed, d_scores)
            d_key = add_to_block(
                d_key, _dot("...st,...th->...sh", d_scores, query), j, key_block_size
            )
            d_value = add_to_block(
                d_value,
                _dot("...st,...tv->...sv", dropped_weights.astype(d_out.dtype), d_out_block),
                j,
                key_block_size,
            )
            return d_query, d_query_features, (d_key, d_value, d_parameters, d_key_features)

        init = (
            jnp.swapaxes(zeros(query), -1, -2),
            zeros(query_tokens.features) if with_bias_gradients else None,
            key_sums,
        )
        d_query, d_query_features, key_sums = _loop_over_key_blocks(
            settings, operands, i, step, init
        )
        return key_sums, (jnp.swapaxes(d_query, -1, -2) * scale, d_query_features)

    key_sums = zeros((operands.key, operands.value))
    key_sums += (
        zeros((operands.bias_parameters, operands.key_tokens.features))
        if with_bias_gradients
        else (None, None)
    )
    key_sums, (d_query, d_query_features) = jax.lax.scan(
        gradients_of_block, key_sums, jnp.arange(num_query_blocks, dtype=jnp.int32)
    )
    d_key, d_value, d_parameters, d_key_features = key_sums
    d_query_features = jax.tree.map(lambda x: join_blocks(x, 1), d_query_features)
    none: Any = None
    return Operands(
        join_blocks(d_query, -2),
        d_key * scale,
        d_value,
        bias_parameters=d_parameters,
        bias_constants=none,
        query_tokens=TokenMetadata(none, none, none, d_query_features),
        key_tokens=TokenMetadata(none, none, none, d_key_features),
        mask=None,
        key_bounds=none,
        dropout_key=None,
    )
