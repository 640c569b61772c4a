"""Linear biases folded into queries and keys, so that any kernel without biases serves."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from alibi_jax.biases.alibi import Slopes

# Whole numbers up to here are exact in bfloat16, so that a position is the sum of two of them.
_EXACT = 256
_LONGEST = 2 * _EXACT**2
# Key columns are divided by this and those of queries multiplied, so that neither leaves
# float16's range: positions reach 2^16, parts of slopes 2^-17 of the slope.
_UNIT = 16.0
# cuDNN takes widths that are multiples of this.
_MULTIPLE = 8
# Greatest error of a score, in nats, that is the relative error of a weight. In 16 bits weights
# are rounded by up to 0.4% in any case; float32 is asked for where 0.1% is to be seen.
_TOLERANCE = 1e-3
_TOLERANCE_OF_HALF = 2e-2


def folded(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    slopes: Slopes,
    *,
    window: int | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
) -> Float[Array, "B T N V"]:
    """Causal self-attention with linear biases by `jax.nn.dot_product_attention`.

    Softmax(query · key / sqrt(H) − m·(i−j)) · value over the keys j ≤ i, the last `window` of
    them where given: the query's own and those before. The dtype of query, key and value is one;
    with K < N each key head serves N/K neighbouring query heads. `implementation` is JAX's; None
    is cuDNN's fused kernel for 16 bits on a GPU, and elsewhere JAX's choice. All four arrays
    have gradients; that of the slopes sums positions times gradients that the kernel may have
    rounded to 16 bits, so it is the noisier the longer the rows.

    Press et al. 2021, "Train Short, Test Long", section 3; the columns as in
    FlashBias (arXiv:2505.12044), whose positions in 16 bits are not exact.

    Raises:
        ValueError: where queries and keys differ in number, the window is empty, a score could be
            off by more than 2e-2 in 16 bits or 1e-3 in float32 (`folded_error`), or there is
            not a slope for each query head. Traced slopes are taken to be at most 1, as
            ALiBi's are: steeper ones make the error larger in proportion.
    """
    length, size = query.shape[1], query.shape[-1]
    if key.shape[1] != length:
        raise ValueError(
            f"{length} queries, {key.shape[1]} keys: biases are folded in self-attention only, "
            "where every query is a key"
        )
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1: a query sees its own key")
    if refusal := folded_refusal(slopes, length, query.dtype):
        raise ValueError(refusal)
    if implementation is None and jax.default_backend() == "gpu" and _half(query.dtype):
        # JAX's own default is to keep every score, on a GPU too.
        implementation = "cudnn"

    query, key = fold(query, key, jnp.asarray(slopes, jnp.float32) * size**0.5)
    # One width for all: some fused kernels have no other.
    width = max(query.shape[-1], _rounded_up(value.shape[-1]))
    output = jax.nn.dot_product_attention(
        *(_padded(x, width) for x in (query, key, value)),
        scale=size**-0.5,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )
    return output[..., : value.shape[-1]]


def fold(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], slopes: Slopes
) -> tuple[Float[Array, "B T N W"], Float[Array, "B S K W"]]:
    """Queries and keys of more columns, whose products are query · key + m·(j − S//2).

    In a causal softmax that is −m·(i−j), for a row's own shift leaves its weights as they are.
    `slopes`, `[N]`, are those of the products: a kernel that divides them by sqrt(H) is given
    the slopes times sqrt(H), and its divisor stays the H of before. W is H + 6 rounded up to a
    multiple of 8, of zeros where there is no more to say. In the dtypes of `query` and `key`.

    A key's position is a multiple of 256 plus a rest, a slope three numbers of 8 bits: each is
    exact in bfloat16, and so are their products in float32. The gradient of the slopes comes
    through the first of the three. In float16 slopes may be up to 4094 here.

    Raises ValueError unless there is a slope for each query head, and for more than 131,072 keys:
    their positions would not be exact.
    """
    num_heads, num_keys = query.shape[2], key.shape[1]
    if len(slopes) != num_heads:
        raise ValueError(f"{len(slopes)} slopes for {num_heads} query heads")
    if num_keys > _LONGEST:
        raise ValueError(f"{num_keys} keys: two numbers of bfloat16 give {_LONGEST} positions")
    # From the middle, so that the sums, and with them their rounding, are half as large.
    positions = np.arange(num_keys) - num_keys // 2
    whole = np.round(positions / _EXACT) * _EXACT
    # The small ones first: a kernel that adds in order then has no sum above the last.
    of_keys = np.stack([positions - whole] * 3 + [whole] * 3, axis=-1)[:, None] / _UNIT
    of_queries = jnp.stack(_parts(jnp.asarray(slopes, jnp.float32) * _UNIT) * 2, axis=-1)
    return _joined(query, of_queries), _joined(key, jnp.asarray(of_keys, jnp.float32))


def folded_error(slopes: Slopes, length: int, dtype: DTypeLike) -> float:
    """By how much folding may put a score off, in nats, beside what is the same for a whole row.

    m·T·2⁻²¹, of the steepest slope m and rows of T. The columns and their products are exact
    (`fold`), so float32 alone rounds, and numbers of at most m·T/2: as each of the six products
    is added, by up to 2⁻²³ of them (a kernel may truncate), and by up to 2⁻²⁴ in sqrt(H), in
    1/sqrt(H) and in the product with either. Together 16·2⁻²⁴·m·T/2. Float16 has no parts of
    slopes below 2⁻²⁴: 3·2⁻³⁰·T more. What float32 makes of query · key itself is not counted.
    Infinite for rows that `fold` refuses.
    """
    if length > _LONGEST:
        return math.inf
    error = _steepest(slopes) * length * 2.0**-21
    return error + 3 * 2.0**-30 * length if dtype == jnp.float16 else error


def folded_refusal(slopes: Slopes, length: int, dtype: DTypeLike) -> str:
    """Why `folded` does not take such rows; nothing where it does."""
    known = (1.0,) if isinstance(slopes, jax.core.Tracer) else slopes
    error = folded_error(known, length, dtype)
    tolerance = _TOLERANCE_OF_HALF if _half(dtype) else _TOLERANCE
    if error <= tolerance:
        return ""
    return (
        f"slopes up to {_steepest(known):.3g} folded into {jnp.dtype(dtype)} rows of {length} "
        f"could put a score off by {error:.2g}, more than {tolerance:g}: use the blockwise "
        "implementation, or shorter rows"
    )


def _parts(x: Float[Array, "N"]) -> list[Float[Array, "N"]]:
    """Three numbers of 8 bits whose sum is x; the gradient of x is that of the first."""
    # Not a cast to bfloat16 and back, which XLA may leave out.
    high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    middle = jax.lax.reduce_precision(x - high, exponent_bits=8, mantissa_bits=7)
    low = x - high - middle
    return [x + jax.lax.stop_gradient(high - x), *jax.lax.stop_gradient([middle, low])]


def _joined(x: Float[Array, "B T N H"], columns: Float[Array, "..."]) -> Float[Array, "B T N W"]:
    columns = jnp.broadcast_to(columns, (*x.shape[:-1], columns.shape[-1])).astype(x.dtype)
    joined = jnp.concatenate([x, columns], axis=-1)
    return _padded(joined, _rounded_up(joined.shape[-1]))


def _padded(x: Float[Array, "B T N H"], width: int) -> Float[Array, "B T N W"]:
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[-1])))


def _steepest(slopes: Slopes) -> float:
    # In numpy alone: JAX would trace even known slopes under `jit`.
    return float(np.max(np.abs(np.asarray(slopes, np.float64))))


def _half(dtype: DTypeLike) -> bool:
    return jnp.finfo(dtype).bits == 16


def _rounded_up(width: int) -> int:
    return -(-width // _MULTIPLE) * _MULTIPLE
