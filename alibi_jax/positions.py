"""Position methods: what tells a transformer in which order its tokens stand.

A method is up to three hooks: it adds to the embeddings, rotates queries and keys, or biases
the scores. It is a Flax module because some of them learn; those that do not hold no
parameters.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from alibi_jax.biases import alibi_bias_at, alibi_slopes, t5_bias_at
from alibi_jax.config import ConfigError, nearest
from alibi_jax.embeddings import sinusoidal
from alibi_jax.rotations import rotary


class PositionMethod(nnx.Module):
    """No positions at all (NoPE): every hook leaves things as they are.

    Causal attention alone tells how many tokens came before (Kazemnejad et al. 2023).
    """

    def embed(
        self, x: Float[Array, "B T D"], positions: Int[Array, "*#B T"]
    ) -> Float[Array, "B T D"]:
        """Token embeddings with positions added."""
        return x

    def rotate(
        self, x: Float[Array, "B T N H"], positions: Int[Array, "*#B T"]
    ) -> Float[Array, "B T N H"]:
        """Queries or keys, rotated by their positions."""
        return x

    def bias(
        self, query_positions: Int[Array, "*#B T"], key_positions: Int[Array, "*#B S"]
    ) -> Float[Array, "*#B N T S"] | None:
        """What is added to the scores, float32; None for nothing."""
        return None


class Alibi(PositionMethod):
    """Attention with linear biases (Press et al. 2021, section 3): -m·|i-j|, m fixed by head."""

    def __init__(self, num_heads: int):
        self.num_heads = num_heads

    def bias(
        self, query_positions: Int[Array, "*#B T"], key_positions: Int[Array, "*#B S"]
    ) -> Float[Array, "*#B N T S"]:
        """The linear bias. Slopes are of all heads, whatever the sharding."""
        return alibi_bias_at(alibi_slopes(self.num_heads), query_positions, key_positions)


class T5(PositionMethod):
    """T5's relative bias (Raffel et al. 2020, section 2.1): learned by head and distance bucket.

    One table serves all layers, as in T5: 32 buckets, logarithmic from distance 16 to 128.
    """

    def __init__(self, num_heads: int, rngs: nnx.Rngs):
        table = 0.02 * jax.random.normal(rngs.params(), (32, num_heads), jnp.float32)
        self.table = nnx.Param(table, axes=(None, "heads"))

    def bias(
        self, query_positions: Int[Array, "*#B T"], key_positions: Int[Array, "*#B S"]
    ) -> Float[Array, "*#B N T S"]:
        """The learned bias of each pair's bucket."""
        return t5_bias_at(self.table[...], query_positions, key_positions)


class Rotary(PositionMethod):
    """Rotary positions (Su et al. 2021, equation 34): queries and keys turn with position."""

    def rotate(
        self, x: Float[Array, "B T N H"], positions: Int[Array, "*#B T"]
    ) -> Float[Array, "B T N H"]:
        """Queries or keys, rotated by their positions."""
        return rotary(x, positions)


class Sinusoidal(PositionMethod):
    """Sinusoidal embeddings (Vaswani et al. 2017, section 3.5), interleaved, from position 0."""

    def embed(
        self, x: Float[Array, "B T D"], positions: Int[Array, "*#B T"]
    ) -> Float[Array, "B T D"]:
        """Token embeddings with sines and cosines added, in the dtype of `x`."""
        return (x + sinusoidal(positions, x.shape[-1])).astype(x.dtype)


class Learned(PositionMethod):
    """A learned embedding for each position up to `max_length`, and none past it."""

    def __init__(self, max_length: int, width: int, rngs: nnx.Rngs):
        table = 0.02 * jax.random.normal(rngs.params(), (max_length, width), jnp.float32)
        self.table = nnx.Param(table, axes=(None, "embed"))

    def embed(
        self, x: Float[Array, "B T D"], positions: Int[Array, "*#B T"]
    ) -> Float[Array, "B T D"]:
        """Token embeddings with the table's rows added, in the dtype of `x`.

        Raises:
            ValueError: when positions pass the table's end, as far as that is known while
                tracing. Where it is not, they give NaN, never another position's row.
        """
        table = self.table[...]
        asked = positions.shape[-1]
        if not isinstance(positions, jax.core.Tracer) and positions.size:
            # By numpy: under jit, JAX traces even what is known.
            asked = max(asked, int(np.asarray(positions).max()) + 1)
        if asked > table.shape[0]:
            raise ValueError(
                f"learned positions end at {table.shape[0]}, the training length: "
                f"there is no embedding for a length of {asked}"
            )
        rows = table.at[positions].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return (x + rows).astype(x.dtype)


METHODS: dict[str, Callable[..., PositionMethod]] = {
    "alibi": lambda num_heads, **_: Alibi(num_heads),
    "sinusoidal": lambda **_: Sinusoidal(),
    "learned": lambda max_length, width, rngs, **_: Learned(max_length, width, rngs),
    "rotary": lambda **_: Rotary(),
    "t5": lambda num_heads, rngs, **_: T5(num_heads, rngs),
    "none": lambda **_: PositionMethod(),
}


def make_position_method(
    name: str, *, num_heads: int, width: int, max_length: int, rngs: nnx.Rngs
) -> PositionMethod:
    """The method of that name. `max_length` is how far a learned table reaches.

    Raises:
        ConfigError: for a name that is not in METHODS.
    """
    if name not in METHODS:
        raise ConfigError(f"model.position={name!r} is not known; {nearest(name, METHODS)}")
    return METHODS[name](num_heads=num_heads, width=width, max_length=max_length, rngs=rngs)
