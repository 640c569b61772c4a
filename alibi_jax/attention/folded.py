"""Linear biases folded into queries and keys, for attention kernels that take no biases."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from alibi_jax.biases.alibi import Slopes

# All integers up to this one are exact in bfloat16. So two bfloat16 numbers can represent a
# position: a multiple of this number, and a remainder.
_MAX_EXACT_INTEGER = 256
_MAX_LENGTH = 2 * _MAX_EXACT_INTEGER**2
# Key columns are divided by this number and query columns multiplied by it, so that both stay
# within float16's range: positions grow to 2^16, and the smallest part of a slope may be 2^-17 of
# the slope.
_COLUMN_SCALE = 16.0
# cuDNN takes head sizes that are multiples of this number.
_SIZE_MULTIPLE = 8
# The greatest error of a score that is accepted, in nats. An error in nats equals the relative
# error of the weight. In 16 bits a weight is rounded by up to 0.4 % anyway, so the limit there is
# loose. Float32 is for users who need to resolve 0.1 %.
_MAX_ERROR_FLOAT32 = 1e-3
_MAX_ERROR_16_BIT = 2e-2


def folded(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    slopes: Slopes,
    *,
    window: int | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
) -> Float[Array, "B T N V"]:
    """Causal self-attention with linear biases, computed by `jax.nn.dot_product_attention`.

    Returns softmax(query · key / sqrt(H) − m·(i−j)) · value over the keys j ≤ i, or over the last
    `window` of them, the query's own included. Query, key and value have the same dtype. With
    K < N each key head serves N/K neighbouring query heads. `implementation` is passed
    to `jax.nn.dot_product_attention`; None selects cuDNN's fused kernel for 16 bits on a GPU, and
    JAX's default elsewhere. All four arrays have gradients. The gradient of the slopes is a sum
    of positions times gradients that the kernel may have rounded to 16 bits, so its noise grows
    with the length.

    Press et al. 2021, "Train Short, Test Long", section 3; columns as in FlashBias
    (arXiv:2505.12044), whose positions in 16 bits are not exact.

    Raises:
        ValueError: if the numbers of queries and keys differ, the window is empty, the numbers of
            slopes and query heads differ, or a score could be off by more than 2e-2 in 16 bits or
            1e-3 in float32 (`folded_error`). Traced slopes are assumed to be at most 1, as ALiBi's
            are; steeper slopes increase the error in proportion.
    """
    length, size = query.shape[1], query.shape[-1]
    if key.shape[1] != length:
        raise ValueError(
            f"{length} queries, {key.shape[1]} keys: biases can be folded only in self-attention, "
            "where every query is a key"
        )
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1: a query sees its own key")
    if refusal := folded_refusal(slopes, length, query.dtype):
        raise ValueError(refusal)
    if implementation is None and jax.default_backend() == "gpu" and _has_16_bits(query.dtype):
        # JAX's own default materialises all scores, on a GPU too.
        implementation = "cudnn"

    query, key = fold(query, key, jnp.asarray(slopes, jnp.float32) * size**0.5)
    # Some fused kernels require one head size for queries, keys and values.
    common_size = max(query.shape[-1], _round_up(value.shape[-1]))
    output = jax.nn.dot_product_attention(
        *(_pad_features(x, common_size) for x in (query, key, value)),
        scale=size**-0.5,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )
    return output[..., : value.shape[-1]]


def fold(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], slopes: Slopes
) -> tuple[Float[Array, "B T N W"], Float[Array, "B S K W"]]:
    """Queries and keys with extra columns, whose products are query · key + m·(j − S//2).

    In a causal softmax this is the bias −m·(i−j), because a shift of a whole row leaves its weights
    unchanged. `slopes`, `[N]`, apply to the products: for a kernel that divides products by
    sqrt(H), give the slopes times sqrt(H), and keep the divisor for the original H. W is H + 6
    rounded up to a multiple of 8, with zeros in the unused columns. The results have the dtypes
    of `query` and `key`.

    A key's position is a multiple of 256 plus a remainder, and a slope is a sum of three numbers
    of 8 bits. All of them are exact in bfloat16, and their products are exact in float32. The
    gradient of the slopes comes through the first of the three numbers. In float16 slopes may be
    up to 4094 here.

    Raises ValueError if the numbers of slopes and query heads differ, and for more than
    131,072 keys, whose positions would not be exact.
    """
    num_heads, num_keys = query.shape[2], key.shape[1]
    if len(slopes) != num_heads:
        raise ValueError(f"{len(slopes)} slopes for {num_heads} query heads")
    if num_keys > _MAX_LENGTH:
        raise ValueError(
            f"{num_keys} keys: two bfloat16 numbers represent at most {_MAX_LENGTH} positions"
        )
    # These columns restate ALiBi's formula, `alibi_bias_at` (biases/alibi.py).
    # Positions count from the middle, which halves the sums and so their rounding errors.
    positions = np.arange(num_keys) - num_keys // 2
    coarse = np.round(positions / _MAX_EXACT_INTEGER) * _MAX_EXACT_INTEGER
    # The small columns come first. In a kernel that adds in order, no partial sum then exceeds the
    # final sum.
    key_columns = np.stack([positions - coarse] * 3 + [coarse] * 3, axis=-1)[:, None]
    key_columns /= _COLUMN_SCALE
    scaled_slopes = jnp.asarray(slopes, jnp.float32) * _COLUMN_SCALE
    query_columns = jnp.stack(_three_parts(scaled_slopes) * 2, axis=-1)
    return (
        _append_columns(query, query_columns),
        _append_columns(key, jnp.asarray(key_columns, jnp.float32)),
    )


def folded_error(slopes: Slopes, length: int, dtype: DTypeLike) -> float:
    """A bound on the error of a score through folding, in nats, up to a shift of the whole row.

    The bound is m·T·2⁻²¹ for the steepest slope m and rows of T tokens. The columns and their
    products are exact (`fold`), so only float32 rounds, and it rounds numbers of at most m·T/2.
    Each of the six additions errs by up to 2⁻²³ of m·T/2 (a kernel may truncate). Each of sqrt(H),
    1/sqrt(H) and the two products with them errs by up to 2⁻²⁴ of it. The sum is 16·2⁻²⁴·m·T/2.
    In float16 the parts of a slope below 2⁻²⁴ are lost, which adds 3·2⁻³⁰·T. The rounding of
    query · key itself in float32 is not counted. The bound is infinite for rows that `fold`
    refuses.
    """
    if length > _MAX_LENGTH:
        return math.inf
    error = _steepest(slopes) * length * 2.0**-21
    return error + 3 * 2.0**-30 * length if dtype == jnp.float16 else error


def folded_refusal(slopes: Slopes, length: int, dtype: DTypeLike) -> str:
    """The reason why `folded` does not take rows of this length and dtype; empty if it does."""
    concrete_slopes = (1.0,) if isinstance(slopes, jax.core.Tracer) else slopes
    error = folded_error(concrete_slopes, length, dtype)
    max_error = _MAX_ERROR_16_BIT if _has_16_bits(dtype) else _MAX_ERROR_FLOAT32
    if error <= max_error:
        return ""
    return (
        f"cannot fold slopes up to {_steepest(concrete_slopes):.3g} into {jnp.dtype(dtype)} rows "
        f"of {length} tokens, because a score could be off by {error:.2g}, more than "
        f"{max_error:g}: use 'blockwise', or shorter rows"
    )


def _three_parts(x: Float[Array, "N"]) -> list[Float[Array, "N"]]:
    """Three numbers of 8 bits whose sum is x. The gradient of x is the first number's."""
    # `reduce_precision`, because XLA may remove a cast to bfloat16 and back.
    high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    middle = jax.lax.reduce_precision(x - high, exponent_bits=8, mantissa_bits=7)
    low = x - high - middle
    return [x + jax.lax.stop_gradient(high - x), *jax.lax.stop_gradient([middle, low])]


def _append_columns(
    x: Float[Array, "B T N H"], columns: Float[Array, "..."]
) -> Float[Array, "B T N W"]:
    columns = jnp.broadcast_to(columns, (*x.shape[:-1], columns.shape[-1])).astype(x.dtype)
    extended = jnp.concatenate([x, columns], axis=-1)
    return _pad_features(extended, _round_up(extended.shape[-1]))


def _pad_features(x: Float[Array, "B T N H"], size: int) -> Float[Array, "B T N W"]:
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, size - x.shape[-1])))


def _steepest(slopes: Slopes) -> float:
    # In numpy, because JAX would trace even concrete slopes under `jit`.
    return float(np.max(np.abs(np.asarray(slopes, np.float64))))


def _has_16_bits(dtype: DTypeLike) -> bool:
    return jnp.finfo(dtype).bits == 16


def _round_up(size: int) -> int:
    return -(-size // _SIZE_MULTIPLE) * _SIZE_MULTIPLE
