"""Softmax attention with a bias given by positions: one entry, four engines behind it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from alibi_jax.attention.engines import ENGINES, compute
from alibi_jax.attention.reach import NEGLIGIBLE
from alibi_jax.attention.visibility import Visibility
from alibi_jax.biases import Bias, LinearBias
from alibi_jax.biases.alibi import Slopes


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    bias: Bias | None = None,
    causal: bool = True,
    window: int | None = None,
    offset: int | Int[Array, ""] | None = None,
    query_positions: Int[Array, "*#B T"] | None = None,
    key_positions: Int[Array, "*#B S"] | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    query_features: Any = None,
    key_features: Any = None,
    mask: Bool[Array, "#B #N T S"] | None = None,
    tolerance: float = NEGLIGIBLE,
    implementation: str | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
) -> Float[Array, "B T N V"]:
    """Softmax(query · key / sqrt(H) + bias) · value, scores and softmax in float32.

    Shapes: as `jax.nn.dot_product_attention`; with K < N each key head serves N/K
    neighbouring query heads. `bias` is a function of query and key positions (default: 0, 1,
    2, ... for keys, and for queries their indices among them), so that no `[N, T, S]` array
    need exist; trees of features, `[B, T, ...]` and `[B, S, ...]`, are passed to it too where
    given. Causal masking goes by index: query t is key `offset` + t, by default S - T + t: the
    queries are the last of the keys. `offset` may be traced, as in a cache with room to spare.
    Positions and features feed the bias alone. Segment ids: a query sees the keys of its own
    segment; 0 is padding, which nothing sees and which sees nothing. `window`: a query sees
    keys less than so many indices away. `mask` is true where a query may see a key. A row that
    sees nothing is zero, and so are its gradients. Weights are dropped where there is a
    `dropout_key`. Returns the dtype of `query`.

    A `LinearBias` has a reach: of each row, keys whose weights together are proved to be at most
    `tolerance` of it may be left out (0: none; docs/attention.md). `implementation` is one of
    "dense", "blockwise", "pallas_tpu" and "folded"; None takes the one for the platform and
    shape. All but "dense", which serves short inputs, have derivatives in reverse only, and once.

    Raises:
        ValueError: where K does not divide N, a causal query has no key of its own (T > S), or
            queries are not keys (not causal, T != S) and a bias is to guess where they stand,
            or the named implementation cannot do what is asked.
    """
    sight, bias = _checked(
        query,
        key,
        value,
        bias,
        offset,
        Visibility(
            causal=causal,
            window=window,
            query_positions=query_positions,
            key_positions=key_positions,
            query_segment_ids=query_segment_ids,
            key_segment_ids=key_segment_ids,
        ),
        tolerance,
        implementation,
    )
    if (query_features is None) != (key_features is None):
        raise ValueError("give features of both queries and keys, or of neither")
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"dropout_rate={dropout_rate} must be at least 0 and below 1")
    if mask is not None and mask.dtype != bool:
        raise ValueError(f"mask is {mask.dtype}: give booleans, true where a query may see a key")
    if mask is not None:
        wanted = query.shape[0], query.shape[2], query.shape[1], key.shape[1]
        fits = [
            x == y or (x == 1 and axis < 2) for axis, (x, y) in enumerate(zip(mask.shape, wanted))
        ]
        if mask.ndim != 4 or not all(fits):
            raise ValueError(f"mask {mask.shape} must be {wanted}, with 1 for any of the first two")
    return compute(
        query,
        key,
        value,
        implementation=implementation,
        bias=bias,
        sight=sight,
        query_features=query_features,
        key_features=key_features,
        mask=mask,
        tolerance=tolerance,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
    )[0]


def attention_with_residual(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    bias: Bias | None = None,
    causal: bool = True,
    window: int | None = None,
    offset: int | Int[Array, ""] | None = None,
    query_positions: Int[Array, "*#B T"] | None = None,
    key_positions: Int[Array, "*#B S"] | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    tolerance: float = NEGLIGIBLE,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """`attention`, and the log-sum-exp of each row of scores, float32, -inf where it sees nothing.

    By these, results over parts of the keys are put together: each weighs exp(its log-sum-exp),
    as in ring attention (Liu et al. 2023, arXiv 2310.01889). A traced `offset` may then be below
    0 or past the keys given. By the engines that keep log-sum-exps: dense and blockwise.
    """
    sight, bias = _checked(
        query,
        key,
        value,
        bias,
        offset,
        Visibility(
            causal=causal,
            window=window,
            query_positions=query_positions,
            key_positions=key_positions,
            query_segment_ids=query_segment_ids,
            key_segment_ids=key_segment_ids,
        ),
        tolerance,
        None,
    )
    return compute(query, key, value, bias=bias, sight=sight, tolerance=tolerance, residual=True)


def _checked(
    query: Array,
    key: Array,
    value: Array,
    bias: Bias | None,
    offset: int | Array | None,
    sight: Visibility,
    tolerance: float,
    implementation: str | None,
) -> tuple[Visibility, Bias | None]:
    """What was given, with an offset and in arrays; raises ValueError for what does not fit."""
    arrays = query, key, value
    if any(not jnp.issubdtype(x.dtype, jnp.floating) for x in arrays):
        kinds = ", ".join(str(x.dtype) for x in arrays)
        raise ValueError(f"queries, keys and values of {kinds}: give floats")
    fits = all(x.ndim == 4 for x in arrays) and key.shape[:3] == value.shape[:3]
    if not fits or key.shape != (query.shape[0], *key.shape[1:3], query.shape[3]):
        raise ValueError(
            f"query {query.shape}, key {key.shape} and value {value.shape} do not belong together: "
            "[B, T, N, H], [B, S, K, H], [B, S, K, V]"
        )
    batch, length, num_heads = query.shape[:3]
    key_length, num_kv_heads = key.shape[1:3]
    for name, x, wanted in (
        ("query_positions", sight.query_positions, length),
        ("key_positions", sight.key_positions, key_length),
        ("query_segment_ids", sight.query_segment_ids, length),
        ("key_segment_ids", sight.key_segment_ids, key_length),
    ):
        if x is not None and (x.shape[-1] != wanted or x.shape[:-1] not in ((), (1,), (batch,))):
            raise ValueError(f"{name} {x.shape} are not of {batch} rows of {wanted}")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"{num_kv_heads} key heads do not divide {num_heads} query heads")
    if isinstance(bias, LinearBias):
        if np.ndim(bias.slopes) != 1:
            raise ValueError(f"slopes {bias.slopes} must be one a query head: {num_heads}")
        if len(bias.slopes) != num_heads:
            raise ValueError(f"{len(bias.slopes)} slopes for {num_heads} query heads")
        # Arrays of float32, whatever sequence of numbers they were given as.
        future = bias.future_slopes
        if future is not None and len(future) != num_heads:
            raise ValueError(f"{len(future)} future slopes for {num_heads} query heads")
        bias = LinearBias(_numbers(bias.slopes), None if future is None else _numbers(future))
    known = key_length - length if offset is None else offset
    if isinstance(known, int | np.integer):
        known = int(known)
    elif not isinstance(known, jax.Array) or not jnp.issubdtype(known.dtype, jnp.integer):
        raise ValueError(f"offset={known!r} must be a whole number")
    else:
        known = known.astype(jnp.int32)
    if sight.causal and isinstance(known, int) and not 0 <= known <= key_length - length:
        at = "" if offset is None else f" from key {offset} on"
        raise ValueError(
            f"causal attention of {length} queries{at} needs as many keys: {key_length}"
        )
    placed = offset is not None or (
        sight.query_positions is not None and sight.key_positions is not None
    )
    if bias is not None and not sight.causal and length != key_length and not placed:
        raise ValueError(
            f"a bias between {length} queries and {key_length} other keys needs query_positions "
            "and key_positions: in cross attention there is no distance to assume"
        )
    if (sight.query_segment_ids is None) != (sight.key_segment_ids is None):
        raise ValueError("give segment ids of both queries and keys, or of neither")
    window = sight.window
    if window is not None and not isinstance(window, int | np.integer):
        raise ValueError(f"window={window} must be a whole number")
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1: a query's own key")
    if not 0.0 <= tolerance < 1.0:
        raise ValueError(f"tolerance={tolerance} must be at least 0 and below 1")
    if implementation not in (None, *ENGINES):
        raise ValueError(
            f"implementation={implementation!r}: no such engine; there are {', '.join(ENGINES)}"
        )
    ids = (
        x if x is None else jnp.broadcast_to(x, (batch, x.shape[-1]))
        for x in (sight.query_segment_ids, sight.key_segment_ids)
    )
    of_queries, of_keys = ids
    return sight._replace(offset=known, query_segment_ids=of_queries, key_segment_ids=of_keys), bias


def _numbers(slopes: Slopes) -> Array | np.ndarray:
    """Float32, in whatever sequence they were given; not traced where they are not yet."""
    if isinstance(slopes, jax.Array):
        return slopes.astype(jnp.float32)
    return np.asarray(slopes, np.float32)


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
    query_positions: Int[Array, "*#B T"] | None = None,
    key_positions: Int[Array, "*#B S"] | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    mask: Bool[Array, "#B #N T S"] | None = None,
    tolerance: float = NEGLIGIBLE,
    implementation: str | None = None,
) -> Float[Array, "B T N V"]:
    """Attention with linear biases (Press et al. 2021, section 3): `attention` with -m·|i-j|.

    `slopes` are of the query heads; keys after their query use `future_slopes` where given, as
    in `alibi_bias_at`. Everything else is as `attention` has it.
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
