"""Softmax attention with a bias that is a function of positions; four engines compute it."""

from typing import Any, Literal, TypedDict, Unpack, overload

from jaxtyping import Array, Bool, Float, Int, Key, Real

from alibi_jax.attention.engines import compute_attention
from alibi_jax.attention.reach import NEGLIGIBLE
from alibi_jax.attention.validation import (
    check_arrays,
    check_distances,
    check_options,
    resolve_bias,
    resolve_offset,
    resolve_visibility,
)
from alibi_jax.attention.visibility import Visibility
from alibi_jax.biases import Bias, LinearBias
from alibi_jax.biases.alibi import Slopes


class _Options(TypedDict, total=False):
    """The optional arguments of `attention`, for type checkers: both overloads take them."""

    bias: Bias | None
    causal: bool
    window: int | None
    offset: int | Int[Array, ""] | None
    query_positions: Real[Array, "*#B T"] | None
    key_positions: Real[Array, "*#B S"] | None
    query_segment_ids: Int[Array, "B T"] | None
    key_segment_ids: Int[Array, "B S"] | None
    query_features: Any
    key_features: Any
    mask: Bool[Array, "#B #N T S"] | None
    tolerance: float
    implementation: str | None
    dropout_rate: float
    dropout_key: Key[Array, ""] | None


@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    return_residual: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Array: ...


@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    return_residual: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Array, Array]: ...


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    bias: Bias | None = None,
    causal: bool = True,
    window: int | None = None,
    offset: int | Int[Array, ""] | None = None,
    query_positions: Real[Array, "*#B T"] | None = None,
    key_positions: Real[Array, "*#B S"] | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    query_features: Any = None,
    key_features: Any = None,
    mask: Bool[Array, "#B #N T S"] | None = None,
    tolerance: float = NEGLIGIBLE,
    implementation: str | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    return_residual: bool = False,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Computes softmax(query · key / sqrt(H) + bias) · value, with float32 scores and softmax.

    Shapes are those of `jax.nn.dot_product_attention`: with K < N, each key head serves N/K
    neighbouring query heads. The result has the dtype of `query`. A row that sees nothing is zero,
    and so are its gradients.

    `implementation`, which is JAX's own name for this argument, selects the engine that computes
    the result. Every engine can be differentiated once in reverse mode. Only "dense", the engine
    for short inputs, can be differentiated again or in forward mode.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        bias: Function of query and key positions, and of features if given, that returns a bias
            `[..., N, T, S]` to add to the scores. Engines call it for blocks of queries and keys,
            so that no `[N, T, S]` array has to exist. A `LinearBias` has a reach: the engine may
            leave out keys that provably have at most `tolerance` of a row's weight in total
            (docs/attention.md).
        causal: Whether a query sees no key after it. Query t has the index `offset` + t among the
            keys.
        window: Query t sees only keys whose index differs from its own by less than `window`, an
            integer of any size.
        offset: Index of the first query among the keys. The default is S − T: the queries are the
            last of the keys. It may be traced, as in a cache with free slots.
        query_positions: Positions for the bias, which need not be whole if the bias does not need
            whole positions. They have no gradient. The default is the indices among the keys.
        key_positions: See `query_positions`. The default is 0, 1, 2, ...
        query_segment_ids: A query sees the keys of its own segment. Id 0 is padding, which sees
            nothing and is not seen.
        key_segment_ids: See `query_segment_ids`.
        query_features: Tree of arrays `[B, T, ...]`. The bias function receives the features of
            the queries and of the keys after the positions.
        key_features: Tree of arrays `[B, S, ...]`.
        mask: True where a query may see a key.
        tolerance: Greatest share of a row's weight that may be left out; 0 leaves out nothing.
        implementation: "dense", "blockwise", "pallas_tpu" or "folded". None chooses the engine for
            the platform and the shapes.
        dropout_rate: Share of the weights to drop, if there is a `dropout_key`.
        dropout_key: Random key of the dropout. Without it no weight is dropped.
        return_residual: Also returns the log-sum-exp of each row of scores, float32 `[B, T, N]`,
            -inf where a row sees nothing. The result over all keys is the mean of the results over
            parts of the keys with weights exp(log-sum-exp), as in ring attention (Liu et al. 2023,
            arXiv 2310.01889). For a part, a traced `offset` may be below 0 or past the keys. Only
            "dense" and "blockwise" can return the log-sum-exp.

    Raises:
        ValueError: if K does not divide N, if a causal query has no key of its own (not checked if
            `offset` is a JAX array), if a bias in cross-attention (not causal, T != S) has neither
            positions nor an offset, or if the named engine cannot serve the arguments.
    """
    check_arrays(query, key, value)
    visibility = Visibility(
        causal=causal,
        window=window,
        offset=resolve_offset(offset, query.shape[1], key.shape[1], causal),
        query_positions=query_positions,
        key_positions=key_positions,
        query_segment_ids=query_segment_ids,
        key_segment_ids=key_segment_ids,
        mask=mask,
    )
    visibility = resolve_visibility(visibility, query, key)
    bias = resolve_bias(bias, query.shape[2])
    check_distances(bias, visibility, query, key, offset_given=offset is not None)
    check_options(query_features, key_features, tolerance, implementation, dropout_rate)
    out, log_sum_exp = compute_attention(
        query,
        key,
        value,
        bias=bias,
        visibility=visibility,
        query_features=query_features,
        key_features=key_features,
        tolerance=tolerance,
        implementation=implementation,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        return_residual=return_residual,
    )
    return (out, log_sum_exp) if return_residual else out


def alibi_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    slopes: Slopes,
    *,
    future_slopes: Slopes | None = None,
    causal: bool = True,
    window: int | None = None,
    offset: int | Int[Array, ""] | None = None,
    query_positions: Real[Array, "*#B T"] | None = None,
    key_positions: Real[Array, "*#B S"] | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    mask: Bool[Array, "#B #N T S"] | None = None,
    tolerance: float = NEGLIGIBLE,
    implementation: str | None = None,
) -> Float[Array, "B T N V"]:
    """Computes attention with linear biases, −m·|i−j| (Press et al. 2021, section 3).

    `slopes` has one slope m per query head. Keys after their query use `future_slopes`, if given,
    as in `alibi_bias_at`. The other arguments are those of `attention`.
    """
    return attention(
        query,
        key,
        value,
        bias=LinearBias(slopes, future_slopes),
        causal=causal,
        window=window,
        offset=offset,
        query_positions=query_positions,
        key_positions=key_positions,
        query_segment_ids=query_segment_ids,
        key_segment_ids=key_segment_ids,
        mask=mask,
        tolerance=tolerance,
        implementation=implementation,
    )
