"""Softmax attention block by block with a running maximum and sum, and its gradient.

The online softmax of Milakov & Gimelshein 2018 (arXiv 1805.02867); the gradient computes each
block of scores anew from the rows' log-sum-exps (Dao et al. 2022, arXiv 2205.14135, section 3.1
and algorithm 4). Blocks of queries are the outer loop, and for each of them a range of blocks of
keys, which may be traced, is the inner one.
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

# Finite, so that the difference of two of them is 0 and not NaN.
MASKED = float(jnp.finfo(jnp.float32).min)


class Ranges(NamedTuple):
    """Key blocks of each query block: from `first` to before `stop`.

    Those of them from `full_first` to before `full_stop` need no mask.
    """

    first: Int[Array, "blocks"]
    full_first: Int[Array, "blocks"]
    full_stop: Int[Array, "blocks"]
    stop: Int[Array, "blocks"]


class Operands(NamedTuple):
    """Everything that is cut into blocks; leading axes, if any, are batch and heads."""

    query: Float[Array, "*G T H"]
    key: Float[Array, "*G S H"]
    value: Float[Array, "*G S V"]
    bias: Any
    rows: TokenMetadata
    columns: TokenMetadata
    mask: Bool[Array, "*#G T S"] | None
    ranges: Ranges
    dropout_key: Key[Array, ""] | None


@dataclasses.dataclass(frozen=True)
class FlashSettings:
    """What is known while tracing.

    `bias` takes its operands and the places of queries and keys to `[..., t, s]`, `seen` the
    places of both to what a query may see, or None for all.
    """

    bias: Callable[[Any, TokenMetadata, TokenMetadata], Array] | None
    seen: Callable[[TokenMetadata, TokenMetadata], Array | None]
    query_block: int
    key_block: int
    # Whether there are blocks to mask before and after those that need none.
    masked_before: bool
    masked_after: bool
    dropout_rate: float


def _blocks(rule: FlashSettings, operands: Operands, row: Array, step: Callable, start: Any) -> Any:
    """The steps of a query block: `step(carry, column, masked)` over its key blocks."""
    first, full_first, full_stop, stop = (x[row] for x in operands.ranges)

    def run(start: Any, first: Array, stop: Array, masked: bool) -> Any:
        return jax.lax.fori_loop(first, stop, lambda j, carry: step(carry, j, masked), start)

    if rule.masked_before:
        start = run(start, first, full_first, True)
    start = run(start, full_first, full_stop, False)
    return run(start, full_stop, stop, True) if rule.masked_after else start


def _visible(
    rule: FlashSettings, operands: Operands, rows: TokenMetadata, columns: TokenMetadata, at: tuple
) -> Any:
    """What the queries of a block may see of the keys of another; None for all."""
    seen = rule.seen(rows, columns)
    if operands.mask is None:
        return seen
    mask = take_block(take_block(operands.mask, at[0], rule.query_block), at[1], rule.key_block, -1)
    return mask if seen is None else mask & seen


def _biased(
    bias_of: Callable[[Any, TokenMetadata, TokenMetadata], Array],
    rows: TokenMetadata,
    columns: TokenMetadata,
    shape: tuple[int, ...],
    bias: Any,
    row_features: Any,
    column_features: Any,
) -> Array:
    """The bias between blocks, as a function of what it has gradients for."""
    rows = rows._replace(features=row_features)
    columns = columns._replace(features=column_features)
    return jnp.broadcast_to(bias_of(bias, rows, columns).astype(jnp.float32), shape)


def _kept(
    rule: FlashSettings, operands: Operands, at: tuple, shape: tuple[int, ...]
) -> Array | None:
    """Where dropout keeps the weights of a block, `[..., t, s]`; None without dropout."""
    if operands.dropout_key is None:
        return None
    key = jax.random.fold_in(jax.random.fold_in(operands.dropout_key, at[0]), at[1])
    return jax.random.bernoulli(key, 1.0 - rule.dropout_rate, shape)


def forward_pass(rule: FlashSettings, operands: Operands) -> tuple[Array, Array]:
    """The result, and the log-sum-exp of each row of scores, both float32.

    The latter is -inf where a row sees nothing.
    """
    scale = operands.query.shape[-1] ** -0.5
    number = operands.query.shape[-2] // rule.query_block

    def query_block(i: Array) -> tuple[Array, Array]:
        query = take_block(operands.query, i, rule.query_block)
        rows = take_token_block(operands.rows, i, rule.query_block)

        def step(carry: tuple[Array, ...], j: Array, masked: bool) -> tuple[Array, ...]:
            out, top, total = carry
            key, value = (take_block(x, j, rule.key_block) for x in (operands.key, operands.value))
            columns = take_token_block(operands.columns, j, rule.key_block)
            scores = _dot("...th,...sh->...ts", query, key) * scale
            if rule.bias is not None:
                scores += rule.bias(operands.bias, rows, columns).astype(jnp.float32)
            visible = _visible(rule, operands, rows, columns, (i, j)) if masked else None
            if visible is not None:
                scores = jnp.where(visible, scores, MASKED)
            # Not below the floor that it starts from, though a bias be -inf all along.
            new = jnp.maximum(top, scores.max(axis=-1))
            weights = jnp.exp(scores - new[..., None])
            if visible is not None:
                # Where a row has seen no key yet, every score is the same.
                weights = jnp.where(visible, weights, 0.0)
            shrink = jnp.exp(top - new)
            total = total * shrink + weights.sum(axis=-1)
            kept = _kept(rule, operands, (i, j), weights.shape)
            if kept is not None:
                weights = jnp.where(kept, weights / (1.0 - rule.dropout_rate), 0.0)
            out = out * shrink[..., None] + _dot(
                "...ts,...sv->...tv", weights.astype(value.dtype), value
            )
            return out, new, total

        shape = query.shape[:-1]
        start = (
            _full(operands, (*shape, operands.value.shape[-1]), 0.0),
            _full(operands, shape, MASKED),
            _full(operands, shape, 0.0),
        )
        out, top, total = _blocks(rule, operands, i, step, start)
        some = total > 0.0
        total = jnp.where(some, total, 1.0)
        log_sum = jnp.where(some, top + jnp.log(total), -jnp.inf)
        return out / total[..., None], log_sum

    out, log_sum = jax.lax.map(query_block, jnp.arange(number, dtype=jnp.int32))
    return join_blocks(out, -2), join_blocks(log_sum, -1)


def _dot(equation: str, left: Array, right: Array) -> Array:
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def vary_alike(operands: Operands, x: Array) -> Array:
    """`x`, varying over the devices of a `jax.shard_map` as the operands do; `x` outside of one."""
    varying = (jax.typeof(y).mat.varying for y in jax.tree.leaves(operands))
    missing = frozenset().union(*varying) - jax.typeof(x).mat.varying
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x


def _full(operands: Operands, shape: tuple[int, ...], value: float) -> Float[Array, "..."]:
    return vary_alike(operands, jnp.full(shape, value, jnp.float32))


def backward_pass(
    rule: FlashSettings,
    operands: Operands,
    out: Array,
    log_sum: Array,
    out_bar: Array,
    log_sum_bar: Array,
    *,
    biased: bool,
) -> Operands:
    """What the gradients of `forward`'s results make of its operands': float32.

    `biased` asks for those of the bias and the features.
    """
    # So that exp(score - it) is 0 where a row sees nothing.
    log_sum = jnp.where(log_sum == -jnp.inf, jnp.inf, log_sum)
    scale = operands.query.shape[-1] ** -0.5
    number = operands.query.shape[-2] // rule.query_block
    # Of each row, the mean of its weights' gradients, less that of its log-sum-exp.
    means = (out_bar.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1) - log_sum_bar

    keys_transposed = jnp.swapaxes(operands.key, -1, -2)

    def zeros(tree: Any) -> Any:
        return jax.tree.map(lambda x: _full(operands, x.shape, 0.0), tree)

    def query_block(sums: tuple, i: Array) -> tuple[tuple, tuple]:
        query, bar = (take_block(x, i, rule.query_block) for x in (operands.query, out_bar))
        rows = take_token_block(operands.rows, i, rule.query_block)
        log_sums, mean = (take_block(x, i, rule.query_block, -1) for x in (log_sum, means))

        def step(carry: tuple, j: Array, masked: bool) -> tuple:
            query_bar, row_bar, (key_bar, value_bar, bias_bar, column_bar) = carry
            key, value = (take_block(x, j, rule.key_block) for x in (operands.key, operands.value))
            columns = take_token_block(operands.columns, j, rule.key_block)
            # Transposed, [s, t], as are keys below and what queries get, [h, t]: no product sums
            # over the rows of its first operand, for which CPUs' fast 16-bit products do not serve.
            scores = _dot("...sh,...th->...st", key, query) * scale
            shape = *query.shape[:-1], key.shape[-2]
            pull = None
            if rule.bias is not None:
                bias_of = functools.partial(_biased, rule.bias, rows, columns, shape)
                parts = operands.bias, rows.features, columns.features
                if not biased:
                    bias = bias_of(*parts)
                else:
                    bias, pull = jax.vjp(bias_of, *parts)
                scores += jnp.swapaxes(bias, -1, -2)
            weights = jnp.exp(scores - log_sums[..., None, :])
            visible = _visible(rule, operands, rows, columns, (i, j)) if masked else None
            if visible is not None:
                weights = jnp.where(jnp.swapaxes(visible, -1, -2), weights, 0.0)
            weights_bar = _dot("...sv,...tv->...st", value, bar)
            used = weights
            kept = _kept(rule, operands, (i, j), shape)
            if kept is not None:
                rate, kept = 1.0 - rule.dropout_rate, jnp.swapaxes(kept, -1, -2)
                used = jnp.where(kept, weights / rate, 0.0)
                weights_bar = jnp.where(kept, weights_bar / rate, 0.0)
            scores_bar = weights * (weights_bar - mean[..., None, :])
            if pull is not None:
                biases = pull(jnp.swapaxes(scores_bar, -1, -2))
                bias_bar, row_bar = jax.tree.map(jnp.add, (bias_bar, row_bar), biases[:2])
                column_bar = jax.tree.map(
                    lambda x, part: add_to_block(x, part, j, rule.key_block, 1),
                    column_bar,
                    biases[2],
                )
            scores_bar = scores_bar.astype(query.dtype)
            key_transposed = take_block(keys_transposed, j, rule.key_block, -1)
            query_bar += _dot("...hs,...st->...ht", key_transposed, scores_bar)
            key_bar = add_to_block(
                key_bar, _dot("...st,...th->...sh", scores_bar, query), j, rule.key_block
            )
            value_bar = add_to_block(
                value_bar,
                _dot("...st,...tv->...sv", used.astype(bar.dtype), bar),
                j,
                rule.key_block,
            )
            return query_bar, row_bar, (key_bar, value_bar, bias_bar, column_bar)

        start = (
            jnp.swapaxes(zeros(query), -1, -2),
            zeros(rows.features) if biased else None,
            sums,
        )
        query_bar, row_bar, sums = _blocks(rule, operands, i, step, start)
        return sums, (jnp.swapaxes(query_bar, -1, -2) * scale, row_bar)

    sums = zeros((operands.key, operands.value))
    sums += zeros((operands.bias, operands.columns.features)) if biased else (None, None)
    sums, (query_bar, row_bar) = jax.lax.scan(
        query_block, sums, jnp.arange(number, dtype=jnp.int32)
    )
    key_bar, value_bar, bias_bar, column_bar = sums
    row_bar = jax.tree.map(lambda x: join_blocks(x, 1), row_bar)
    none: Any = None
    return Operands(
        join_blocks(query_bar, -2),
        key_bar * scale,
        value_bar,
        bias=bias_bar,
        rows=TokenMetadata(none, none, none, row_bar),
        columns=TokenMetadata(none, none, none, column_bar),
        mask=None,
        ranges=none,
        dropout_key=None,
    )
