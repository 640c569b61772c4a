"""Methods that add to the token embeddings, once, before the first layer."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from alibi_jax.embeddings import sinusoidal
from alibi_jax.positions.base import PositionMethod


class Sinusoidal(PositionMethod):
    """Sinusoidal embeddings (Vaswani et al. 2017, section 3.5), interleaved, from position 0."""

    def embed(
        self, x: Float[Array, "B T D"], positions: Int[Array, "*#B T"]
    ) -> Float[Array, "B T D"]:
        """Token embeddings with sinusoidal embeddings added, in the dtype of `x`."""
        sinusoids = jnp.broadcast_to(sinusoidal(positions, x.shape[-1]), x.shape)
        return (x + sinusoids).astype(x.dtype)


class Shape(Sinusoidal):
    """Sinusoidal embeddings of randomly shifted positions (SHAPE; Kiyono et al. 2021).

    In training, each sequence starts at a position drawn uniformly from 0 to `max_shift`; at other
    times it starts at 0. arXiv 2109.05644.
    """

    def __init__(self, max_shift: int):
        self.max_shift = max_shift

    def training_positions(
        self, positions: Int[Array, "*#B T"], key: Key[Array, ""], batch_size: int
    ) -> Int[Array, "B T"]:
        """Positions with a random shift for each row."""
        shifts = jax.random.randint(key, (batch_size, 1), 0, self.max_shift + 1)
        return positions + shifts


class Randomized(Sinusoidal):
    """Sinusoidal embeddings of an ordered random subset of positions (Ruoss et al. 2023).

    In training, T positions are drawn for each row from 0, 1, ..., `position_range` - 1 without
    replacement, and position p becomes the (p+1)-th smallest of them. At other times p stays p.
    (The authors' code also draws in evaluation, which rules out repeatable evaluations and a
    cache.) arXiv 2305.16843.
    """

    def __init__(self, position_range: int):
        self.position_range = position_range

    def training_positions(
        self, positions: Int[Array, "*#B T"], key: Key[Array, ""], batch_size: int
    ) -> Int[Array, "B T"]:
        """Positions looked up in a random subset for each row."""
        length = positions.shape[-1]
        if length > self.position_range:
            raise ValueError(
                f"{length} positions can't be drawn from a range of {self.position_range}"
            )

        def subset(key: Key[Array, ""]) -> Int[Array, "T"]:
            drawn = jax.random.choice(key, self.position_range, (length,), replace=False)
            return jnp.sort(drawn)

        subsets = jax.vmap(subset)(jax.random.split(key, batch_size))
        positions = jnp.broadcast_to(positions, (batch_size, length))
        return jnp.take_along_axis(subsets, positions, axis=1)


class Learned(PositionMethod):
    """A learned embedding for each of the first `max_length` positions, and none for later ones."""

    def __init__(self, max_length: int, width: int, rngs: nnx.Rngs):
        table = 0.02 * jax.random.normal(rngs.params(), (max_length, width), jnp.float32)
        self.table = nnx.Param(table, axes=(None, "embed"))
        self.max_length = max_length

    def embed(
        self, x: Float[Array, "B T D"], positions: Int[Array, "*#B T"]
    ) -> Float[Array, "B T D"]:
        """Token embeddings with the table's rows added, in the dtype of `x`.

        Raises:
            ValueError: when there are more positions in a row than the table has rows, or when a
                position is past the end of the table and is known while tracing. Otherwise a
                position past the end gives NaN, never the row of another position.
        """
        table = self.table[...]
        length = positions.shape[-1]
        if not isinstance(positions, jax.core.Tracer) and positions.size:
            # NumPy computes the maximum: under jit, JAX would trace even concrete positions.
            length = max(length, int(np.asarray(positions).max()) + 1)
        if length > table.shape[0]:
            raise ValueError(
                f"learned positions end at {table.shape[0]}, the training length: "
                f"there is no embedding for a length of {length}"
            )
        rows = table.at[positions].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return (x + jnp.broadcast_to(rows, x.shape)).astype(x.dtype)
