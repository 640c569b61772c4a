"""The interface of position methods, which is also the method `none`."""

from flax import nnx
from jaxtyping import Array, Float, Int, Key

from alibi_jax.biases import Bias


class PositionMethod(nnx.Module):
    """No position method (NoPE): every hook leaves its inputs unchanged.

    Other methods override some hooks. The model uses `embed`, `training_positions` and
    `max_length` only for methods that all layers share; it uses the other members in each layer.

    Without a position method, causal attention by itself tells a token how many tokens came before
    it (Kazemnejad et al. 2023, arXiv 2305.19466).
    """

    # The longest input that the method can handle; None: it handles any length.
    max_length: int | None = None
    # The number of gates of a token in each layer (`gates`). The cache holds the gates too.
    num_gates: int = 0

    def training_positions(
        self, positions: Int[Array, "*#B T"], key: Key[Array, ""], batch_size: int
    ) -> Int[Array, "*#B T"]:
        """The positions for a training step, for methods that draw them at random."""
        return positions

    def embed(
        self, x: Float[Array, "B T D"], positions: Int[Array, "*#B T"]
    ) -> Float[Array, "B T D"]:
        """Token embeddings with position embeddings added, in the dtype of `x`."""
        return x

    def rotate(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        query_positions: Int[Array, "*#B T"],
        key_positions: Int[Array, "*#B S"],
    ) -> tuple[Float[Array, "B T N R"], Float[Array, "B S K R"]]:
        """Queries and keys that encode their positions, in the dtypes of the inputs.

        The cache holds keys as they were projected, before this hook. So the result for cached
        keys may depend on the queries and on the number of keys.
        """
        return query, key

    def gates(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N"] | None:
        """The log forget gates, float32, from a layer's normalised inputs; None: no gates.

        The score of a query and a key gets the sum of the log gates of all tokens after the key,
        up to and including the query.
        """
        return None

    def bias(self) -> Bias | None:
        """The bias that is added to the scores, as a function of positions; None: no bias.

        The function maps int32 positions of queries, `[..., T]`, and of keys, `[..., S]`, to a
        float32 bias, `[..., N, T, S]`. A linear bias must be a `LinearBias`.
        """
        return None
