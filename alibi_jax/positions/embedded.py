"""Methods that add to the embeddings of the tokens, once, before the first layer."""

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
        """Token embeddings with sines and cosines added, in the dtype of `x`."""
        return (x + sinusoidal(positions, x.shape[-1])).astype(x.dtype)


class Shape(Sinusoidal):
    """Sinusoidal embeddings of positions shifted at random (SHAPE; Kiyono et al. 2021).

    In training each sequence starts anywhere from 0 to `max_shift`, drawn uniformly; otherwise
    at 0. arXiv 2109.05644.
    """

    def __init__(self, max_shift: int):
        self.max_shift = max_shift

    def training_positions(
        self, positions: Int[Array, "*#B T"], key: Key[Array, ""], batch_size: int
    ) -> Int[Array, "B T"]:
        """Positions with a shift of each row's own."""
        shifts = jax.random.randint(key, (batch_size, 1), 0, self.max_shift + 1)
        return positions + shifts


class Randomized(Sinusoidal):
    """Sinusoidal embeddings of an ordered random subset of positions (Ruoss et al. 2023).

    In training position p of a row is the (p+1)-th least of T drawn from 0, 1, ..., `range` - 1
    without replacement; otherwise p itself. (The authors' code draws whenever it runs, which
    leaves no repeatable evaluation and no cache.) arXiv 2305.16843.
    """

    def __init__(self, position_range: int):
        self.position_range = position_range

    def training_positions(
        self, positions: Int[Array, "*#B T"], key: Key[Array, ""], batch_size: int
    ) -> Int[Array, "B T"]:
        """Positions looked up in each row's own subset."""
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
    """A learned embedding for each position up to `max_length`, and none past it."""

    def __init__(self, max_length: int, width: int, rngs: nnx.Rngs):
        table = 0.02 * jax.random.normal(rngs.params(), (max_length, width), jnp.float32)
        self.table = nnx.Param(table, axes=(None, "embed"))
        self.max_length = max_length

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
