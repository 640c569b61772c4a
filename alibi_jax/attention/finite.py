"""Numbers that are not finite reach exactly the queries that see them, in every engine.

The weight of a key that a query does not see is 0, but 0 times NaN is NaN. Engines therefore
compute with zeros in place of the tokens that have a number that is not finite, and afterwards the
results of the queries that see such a token become NaN. A result that became NaN has no gradient.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, Real

from alibi_jax.attention.blocks import slice_along, take_token_block
from alibi_jax.attention.dense import dense
from alibi_jax.attention.flash_passes import match_varying_axes
from alibi_jax.attention.visibility import Visibility, token_metadata, visible_pairs


class BadTokens(NamedTuple):
    """True for tokens with a number that is not finite, in the query, or in the key or value."""

    queries: Bool[Array, "*#B T #N"]
    keys: Bool[Array, "*#B S #K"]


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _fill_rows(x: Float[Array, "*R H"], rows: Bool[Array, "*#R"], number: float) -> Array:
    """`x` with `number` in the rows that are marked."""
    # `jax.checkpoint` keeps `rows` for the gradient, and not a mask in the shape of `x`.
    return jnp.where(rows[..., None], jnp.asarray(number, x.dtype), x)


def finite_metadata(
    positions: Real[Array, "*#B T"] | None, features: Any
) -> tuple[Real[Array, "*#B T"] | None, Any, Bool[Array, "#B T"] | None]:
    """Positions and features with zeros for numbers that are not finite.

    The third result marks the tokens with such a number. It is None if there are no floating-point
    numbers.
    """
    if positions is not None and jnp.issubdtype(positions.dtype, jnp.floating):
        positions = jnp.atleast_2d(positions)
    tree = positions, features
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    if not floats:
        return positions, features, None
    bad = [~jnp.isfinite(x).all(axis=tuple(range(2, x.ndim))) for x in floats]
    positions, features = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), tree)
    return positions, features, functools.reduce(jnp.logical_or, bad)


def attend_to_finite(
    attend: Callable[[Array, Array, Array], tuple[Array, Any]],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    bad_queries: Bool[Array, "#B T"] | None,
    bad_keys: Bool[Array, "#B S"] | None,
    reached: Callable[[BadTokens], Bool[Array, "B T N"]],
) -> tuple[Float[Array, "B T N V"], Any]:
    """`attend(query, key, value)` for arrays that may have numbers that are not finite.

    `bad_queries` and `bad_keys` mark the tokens whose metadata have one too. `reached` maps tokens
    to the queries that have or see one of them. `attend` returns the result and the log-sum-exp of
    each row, or None.
    """
    queries = ~jnp.isfinite(query).all(axis=-1)
    keys = ~(jnp.isfinite(key).all(axis=-1) & jnp.isfinite(value).all(axis=-1))
    if bad_queries is not None:
        queries |= bad_queries[..., None]
    if bad_keys is not None:
        keys |= bad_keys[..., None]
    out, log_sum_exp = attend(
        _fill_rows(query, queries, 0.0), _fill_rows(key, keys, 0.0), _fill_rows(value, keys, 0.0)
    )
    rows = reached(BadTokens(queries, keys))
    if log_sum_exp is not None:
        log_sum_exp = jnp.where(rows, jnp.nan, log_sum_exp)
    return _fill_rows(out, rows, jnp.nan), log_sum_exp


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def dense_and_finite(
    dropout_rate: float,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    bias: Float[Array, "*#B N T S"] | None,
    mask: Bool[Array, "*#B #N T S"] | None,
    bad_queries: Bool[Array, "#B T"] | None,
    bad_keys: Bool[Array, "#B S"] | None,
    dropout_key: Key[Array, ""] | None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """`dense` by `attend_to_finite`, without a copy of the keys and values if all is finite.

    In decoding, a copy of the cache would take longer than attention.
    """
    operands = query, key, value, bias, mask, bad_queries, bad_keys, dropout_key
    out, log_sum_exp, all_finite = dense(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
    )
    compute_again = ~all_finite
    for bad in (bad_queries, bad_keys):
        if bad is not None:
            compute_again |= bad.any()
    # A loop of no steps, unlike a condition, costs nothing under `jax.vmap` either.
    out, log_sum_exp, _ = jax.lax.while_loop(
        lambda carry: carry[-1],
        lambda carry: (*_dense_of_finite(dropout_rate, *operands), ~carry[-1]),
        (out, log_sum_exp, compute_again),
    )
    return out, log_sum_exp


@dense_and_finite.defjvp
def _dense_jvp(dropout_rate: float, primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    return jax.jvp(functools.partial(_dense_of_finite, dropout_rate), primals, tangents)


def _dense_of_finite(
    dropout_rate: float,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    bad_queries: Array | None,
    bad_keys: Array | None,
    dropout_key: Array | None,
) -> tuple[Array, Array]:
    def attend(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        return dense(
            query,
            key,
            value,
            bias=bias,
            mask=mask,
            dropout_rate=dropout_rate,
            dropout_key=dropout_key,
        )[:2]

    return attend_to_finite(
        attend,
        query,
        key,
        value,
        bad_queries,
        bad_keys,
        lambda bad: reached_rows(bad, mask),
    )


def reached_rows(bad: BadTokens, visible: Bool[Array, "#B #N T S"] | None) -> Bool[Array, "B T N"]:
    """The queries that see a bad key, and the bad queries that see any key."""
    num_heads = bad.queries.shape[2]
    keys = jnp.repeat(bad.keys, num_heads // bad.keys.shape[2], axis=2)
    keys = jnp.swapaxes(keys, 1, 2)[:, :, None]
    if visible is None:
        return bad.queries | jnp.swapaxes(keys.any(axis=-1), 1, 2)
    sees_bad_key = jnp.swapaxes((visible & keys).any(axis=-1), 1, 2)
    sees_any_key = jnp.swapaxes(visible.any(axis=-1), 1, 2)
    return sees_bad_key | (bad.queries & sees_any_key)


def reached_by_visibility(bad: BadTokens, visibility: Visibility) -> Bool[Array, "B T N"]:
    """`reached_rows`, computed for one query after another, and only if any token is bad."""
    length, key_length = bad.queries.shape[1], bad.keys.shape[1]
    queries, keys = token_metadata(visibility, length, key_length, None, None)

    def add_row(index: Array, rows: Array) -> Array:
        query = take_token_block(queries, index, 1)
        visible = visible_pairs(query, keys, causal=visibility.causal, window=visibility.window)
        if visible is not None and visible.ndim == 2:
            visible = visible[None, None]
        if visibility.mask is not None:
            mask = slice_along(visibility.mask, index, 1, 2)
            visible = mask if visible is None else visible & mask
        of_query = bad._replace(queries=slice_along(bad.queries, index, 1, 1))
        row = reached_rows(of_query, visible)
        return jax.lax.dynamic_update_slice_in_dim(rows, row, index, 1)

    # A loop of no steps, unlike a condition, costs nothing under `jax.vmap` either.
    steps = jnp.where(bad.queries.any() | bad.keys.any(), length, 0)
    none = jnp.zeros_like(bad.queries)
    none = match_varying_axes((bad, queries, keys, visibility.mask), none)
    return jax.lax.fori_loop(0, steps, add_row, none)
