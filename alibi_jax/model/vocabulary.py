"""From tokens to vectors and from vectors to the probabilities of tokens."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from alibi_jax import config as configs
from alibi_jax.distributed.sharding import constrain, map_over_shards, num_shards
from alibi_jax.model.losses import token_nll

# Tables have a multiple of so many rows, so that they split over any number of devices that
# divides it, and fill a TPU's lanes. Rows past the vocabulary are no token's.
ROWS = 128


def padded_rows(tokens: int) -> int:
    """Rows of a table of so many tokens."""
    return -(-tokens // ROWS) * ROWS


class Vocabulary(nnx.Module):
    """A table of a row a token; the same one, or another, gives the logits."""

    def __init__(self, config: configs.Model, vocab_size: int, rngs: nnx.Rngs):
        self.vocab_size = vocab_size

        def table() -> nnx.Param:
            # Standard deviation 1/sqrt(D), scaled up by sqrt(D) on the way in (Vaswani et al.
            # 2017, section 3.4): unit-variance inputs, and tied logits of unit scale.
            shape = padded_rows(vocab_size), config.width
            drawn = jax.random.normal(rngs.params(), shape) * config.width**-0.5
            return nnx.Param(drawn, axes=("vocab", "embed"))

        self.embedding = table()
        self.output = None if config.tied_embeddings else table()

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The vectors of tokens, float32: the gradient adds up a row for each time one occurs."""
        # Gathered whole: looked up in a table split both ways, rows would be assembled one by one.
        table = constrain(self.embedding[...], None, None)
        return table[tokens] * math.sqrt(table.shape[1])

    @property
    def unembedding(self) -> Float[Array, "R D"]:
        """What hidden states are multiplied with to give logits, float32."""
        return (self.embedding if self.output is None else self.output)[...]

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Of each token of the vocabulary, float32."""
        table = self.unembedding[: self.vocab_size].astype(hidden.dtype)
        return jnp.einsum("btd,vd->btv", hidden, table, preferred_element_type=jnp.float32)

    def token_nll(
        self,
        hidden: Float[Array, "B T D"],
        targets: Int[Array, "B T"],
        training_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T"]:
        """`losses.token_nll`, of the vocabulary's tokens alone; there is no dropout."""
        nll: Callable[..., Array] = functools.partial(token_nll, vocab_size=self.vocab_size)
        rows = ("batch", "sequence")
        if num_shards("vocab") == 1:
            # Each device by itself: the compiler would sum up the table's gradient over all of
            # them for every chunk, and in 16 bits.
            nll = map_over_shards(nll, [(*rows, None), (None, None), rows], rows)
        return nll(hidden, self.unembedding, targets)
