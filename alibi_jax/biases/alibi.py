"""ALiBi: biases that fall in proportion to the distance, by a slope fixed for each head."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from alibi_jax.biases._positions import positions_by_length, relative_positions

Slopes = Float[Array, "N"] | Float[np.ndarray, "N"] | Sequence[float]


def alibi_slopes(num_heads: int | np.integer) -> Float[Array, "N"]:
    """The slope of each head, in the order of the paper's code.

    Float32 `[N]`. For a power of two, head h of N (from 1) has 2^(−8h/N); other counts continue
    the slopes of the power of two below with every other slope of the power of two above, so
    they are not sorted. Raises ValueError for fewer than one head.

    Press et al. 2021, "Train Short, Test Long", section 3 and `get_slopes` of its code.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads={num_heads} must be at least 1")
    power = 1 << (int(num_heads).bit_length() - 1)
    slopes = _geometric(power) + _geometric(2 * power)[0::2][: num_heads - power]
    # Numbers even where this is traced: a model may be made under `jit` and keep them. Put, not
    # computed: the mesh that is set may be of devices that are not here, to compile for them.
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

    `[N, T, S]`, computed in float32 and cast to `dtype` last. `key_length` is `query_length`
    unless given. Keys stand at 0 … S−1 and query t at `offset` + t, by default S−T: the queries
    are the last of the keys. `offset` may be traced. Raises ValueError for more queries than
    keys without an offset.

    Press et al. 2021, "Train Short, Test Long", section 3. The absolute value makes it right in
    both directions; masking is left to the attention.
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
    query_positions: Int[Array, "... T"],
    key_positions: Int[Array, "... S"],
    *,
    future_slopes: Slopes | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "... N T S"]:
    """ALiBi's bias, −m·|i−j|, of queries at positions i over keys at positions j.

    `[..., N, T, S]`, computed in float32 and cast to `dtype` last; the leading axes of the
    positions broadcast. Keys after their query use `future_slopes`, `[N]`, where given, so that
    an encoder can tell the two directions apart. Raises ValueError unless there is one for each
    slope.

    Press et al. 2021, "Train Short, Test Long", section 3; for encoders
    ofirpress/attention_with_linear_biases#5.
    """
    relative = relative_positions(query_positions, key_positions)[..., None, :, :]
    past = jnp.asarray(slopes, jnp.float32)
    if past.ndim != 1:
        raise ValueError("slopes must be one a head, [N]: of a number of heads, alibi_slopes(N)")
    slope = past[:, None, None]
    if future_slopes is not None:
        future = jnp.asarray(future_slopes, jnp.float32)
        if future.shape != past.shape:
            raise ValueError(f"{future.size} future slopes for {past.size} slopes: one a head each")
        slope = jnp.where(relative > 0, future[:, None, None], slope)
    # Negated as an integer: a key at its query's own position gets 0, not -0.
    return (slope * (-jnp.abs(relative)).astype(jnp.float32)).astype(dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearBias:
    """ALiBi's bias as a function of positions, whose slopes can be seen: `alibi_bias_at`.

    Attention that is given this rather than any other function keeps no bias in memory, and can
    tell which keys are too far away to matter.
    """

    slopes: Slopes
    future_slopes: Slopes | None = None

    def __call__(
        self, query_positions: Int[Array, "... T"], key_positions: Int[Array, "... S"]
    ) -> Float[Array, "... N T S"]:
        """The bias, float32."""
        return alibi_bias_at(
            self.slopes, query_positions, key_positions, future_slopes=self.future_slopes
        )
