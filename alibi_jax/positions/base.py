"""What a position method may do, and the method that does nothing."""

from flax import nnx
from jaxtyping import Array, Float, Int, Key

from alibi_jax.biases import Bias


class PositionMethod(nnx.Module):
    """No positions at all (NoPE): every hook leaves things as they are.

    Causal attention alone tells how many tokens came before (Kazemnejad et al. 2023,
    arXiv 2305.19466).
    """

    # The greatest length that the method can serve; None: it serves any.
    max_length: int | None = None
    # Gates that a token has in each layer (`gates`); they are cached along with keys and values.
    num_gates: int = 0

    def training_positions(
        self, positions: Int[Array, "*#B T"], key: Key[Array, ""], batch_size: int
    ) -> Int[Array, "*#B T"]:
        """Positions as a training step has them, for methods that draw them at random."""
        return positions

    def embed(
        self, x: Float[Array, "B T D"], positions: Int[Array, "*#B T"]
    ) -> Float[Array, "B T D"]:
        """Token embeddings with positions added, in the dtype of `x`."""
        return x

    def rotate(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        query_positions: Int[Array, "*#B T"],
        key_positions: Int[Array, "*#B S"],
    ) -> tuple[Float[Array, "B T N R"], Float[Array, "B S K R"]]:
        """Queries and keys with their positions worked in, in their own dtypes.

        Keys come from the cache as they were projected, so that what a method makes of them may
        depend on the queries and on how many they are.
        """
        return query, key

    def gates(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N"] | None:
        """Logarithms of forget gates, from a layer's normalised inputs, float32; None without.

        What they add up to between key and query is added to the scores.
        """
        return None

    def bias(self) -> Bias | None:
        """What is added to the scores: a function of positions; None for nothing.

        It takes positions of queries and keys, `[..., T]` and `[..., S]`, int32, to
        `[..., N, T, S]`, float32. Linear biases are a `LinearBias`.
        """
        return None
