"""ALiBi: a bias that falls linearly with the distance, with a fixed slope for each head."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Real

from alibi_jax.biases.distances import per_head, positions_by_length, relative_positions

Slopes = Float[Array, "N"] | Float[np.ndarray, "N"] | Sequence[float]


def alibi_slopes(num_heads: int | np.integer) -> Float[Array, "N"]:
    """The slope of each head, in the order of the paper's code.

    Float32 `[N]`. If N is a power of two, head h (from 1 to N) has the slope 2^(−8h/N). Any other
    N gets the slopes of the next lower power of two, followed by every other slope of the next
    higher one, so its slopes are not sorted. Raises ValueError for fewer than one head.

    Press et al. 2021, "Train Short, Test Long", section 3 and `get_slopes` of its code.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads={num_heads} must be at least 1")
    power = 1 << (int(num_heads).bit_length() - 1)
    slopes = _geometric(power) + _geometric(2 * power)[0::2][: num_heads - power]
    # The values are concrete even under a trace, because a model that is made under `jit` may keep
    # them. They are put on the device, not computed there: the current mesh may describe absent
    # devices, for which a program is only compiled.
    with jax.ensure_compile_time_eval():
        return jax.device_put(np.array(slopes, np.float32))


def _geometric(num_heads: int) -> list[float]:
    return [2.0 ** (-8.0 * head / num_heads) for head in range(1, num_heads + 1)]


def alibi_bias(
    num_heads_or_slopes: int | np.integer | Slopes,
    query_length: int,
    key_length: int | None = None,
    *,
    offset: int | Int[Array, ""] | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "N T S"]:
    """ALiBi's bias, −m·|i−j|, of T queries over S keys.

    `[N, T, S]`, computed in float32 and cast to `dtype` last. `key_length` defaults to
    `query_length`. Keys have the positions 0 … S−1, and query t has the position `offset` + t.
    `offset`, an integer, defaults to S−T, which aligns the last query with the last key; it may
    be traced. Raises ValueError for more queries than keys without an offset, and for an offset
    that is not an integer.

    Press et al. 2021, "Train Short, Test Long", section 3. The absolute value makes the bias
    valid in both directions. The caller's attention applies the mask.
    """
    slopes = (
        alibi_slopes(int(num_heads_or_slopes))
        if isinstance(num_heads_or_slopes, int | np.integer)
        else num_heads_or_slopes
    )
    queries, keys = positions_by_length(query_length, key_length, offset)
    return alibi_bias_at(slopes, queries, keys, dtype=dtype)


def alibi_bias_at(
    slopes: Slopes,
    query_positions: Real[Array, "... T"],
    key_positions: Real[Array, "... S"],
    *,
    future_slopes: Slopes | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "... N T S"]:
    """ALiBi's bias, −m·|i−j|, of queries at positions i over keys at positions j.

    `[..., N, T, S]`, computed in float32 and cast to `dtype` last; the leading axes of the
    positions broadcast. Positions need not be whole: integers are subtracted as int32, which is
    exact, and floating-point numbers in at least float32. If `future_slopes`, `[N]`, are given,
    keys after their query use them, so that an encoder can distinguish the two directions. Raises
    ValueError unless there is one slope, and one future slope if any, for each head, and for
    positions that are no numbers.

    Press et al. 2021, "Train Short, Test Long", section 3; for encoders
    ofirpress/attention_with_linear_biases#5.
    """
    relative = relative_positions(query_positions, key_positions)[..., None, :, :]
    past = jnp.asarray(slopes, jnp.float32)
    if past.ndim != 1:
        raise ValueError("slopes must be an array [N], one for each head: pass alibi_slopes(N)")
    slope = per_head(past, relative.ndim)
    if future_slopes is not None:
        future = jnp.asarray(future_slopes, jnp.float32)
        if future.shape != past.shape:
            raise ValueError(
                f"{future.size} future slopes for {past.size} slopes: give one for each head"
            )
        slope = jnp.where(relative > 0, per_head(future, relative.ndim), slope)
    # The TPU kernel (`_biased_scores` in attention/tpu/kernels.py) and the folded engine (`fold` in
    # attention/folded.py) restate this formula: change all three together.
    # The integer is negated, not the product: a key at its query's own position gets 0, not -0.
    return (slope * (-jnp.abs(relative)).astype(jnp.float32)).astype(dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearBias:
    """ALiBi's bias as a function of positions (`alibi_bias_at`) that exposes its slopes.

    With a `LinearBias`, unlike with any other bias function, attention can skip the keys that are
    too far away to matter, and can use the engines "pallas_tpu" and "folded".
    """

    slopes: Slopes
    future_slopes: Slopes | None = None

    def __call__(
        self, query_positions: Real[Array, "... T"], key_positions: Real[Array, "... S"]
    ) -> Float[Array, "... N T S"]:
        """The bias, float32."""
        return alibi_bias_at(
            self.slopes, query_positions, key_positions, future_slopes=self.future_slopes
        )
