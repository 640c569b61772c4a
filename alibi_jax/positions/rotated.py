"""Methods that transform queries and keys by their positions, in each layer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from alibi_jax.positions.base import PositionMethod
from alibi_jax.rotations import rotary, transformer_xl, xpos


class Rotary(PositionMethod):
    """Rotary positions (Su et al. 2021, equation 34): queries and keys rotate with the position.

    `frequencies` are the speeds of the pairs of features, in radians per position; rescaled
    frequencies extend the usable length. The scores are those of queries and keys that are each
    multiplied by `temperature` (YaRN).
    """

    def __init__(self, frequencies: Float[Array, "R"], temperature: float = 1.0):
        # Python numbers, not an array: constants belong to the graph definition, not to the state.
        self.frequencies = tuple(float(frequency) for frequency in frequencies)
        self.temperature = temperature

    def rotate(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        query_positions: Int[Array, "*#B T"],
        key_positions: Int[Array, "*#B S"],
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"]]:
        """Queries and keys, rotated by their positions."""
        frequencies = jnp.asarray(self.frequencies, jnp.float32)
        # Multiplying queries by the square gives the same scores as multiplying both once.
        query = rotary(query, query_positions, frequencies=frequencies)
        if self.temperature != 1.0:
            query = (query * self.temperature**2).astype(query.dtype)
        return query, rotary(key, key_positions, frequencies=frequencies)


class XPos(PositionMethod):
    """xPos (Sun et al. 2022, algorithm 1): rotary with scores that decay with the distance."""

    def rotate(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        query_positions: Int[Array, "*#B T"],
        key_positions: Int[Array, "*#B S"],
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"]]:
        """Queries and keys, rotated and scaled by their positions."""
        return xpos(query, key, query_positions, key_positions)


class TransformerXL(PositionMethod):
    """Transformer-XL's relative encoding (Dai et al. 2019, section 3.3), with parameters per layer.

    Scores are (q + u)·k + (q + v)·W R, where R holds the sinusoids of the position difference i−j.
    """

    def __init__(self, width: int, num_heads: int, rngs: nnx.Rngs):
        head_size = width // num_heads
        kernel = jax.random.normal(rngs.params(), (width, num_heads, head_size), jnp.float32)
        self.kernel = nnx.Param(kernel * width**-0.5, axes=("embed", "heads", None))
        zeros = jnp.zeros((num_heads, head_size), jnp.float32)
        self.content_bias = nnx.Param(zeros, axes=("heads", None))
        self.position_bias = nnx.Param(zeros, axes=("heads", None))

    def rotate(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        query_positions: Int[Array, "*#B T"],
        key_positions: Int[Array, "*#B S"],
    ) -> tuple[Float[Array, "B T N R"], Float[Array, "B S K R"]]:
        """Queries and keys with D more features, so that plain attention has these scores."""
        return transformer_xl(
            query,
            key,
            query_positions,
            key_positions,
            content_bias=self.content_bias[...],
            position_bias=self.position_bias[...],
            kernel=self.kernel[...],
        )
