"""The token tables: from tokens to embeddings, and from hidden states to logits and losses.

Axes: B batch, T tokens, D width, V vocabulary, R rows of a table.
"""

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

# The number of rows of a table is a multiple of this. So a table can be sharded over any number of
# devices that divides 128, and fills a TPU's lanes. Rows past the vocabulary are padding.
ROW_MULTIPLE = 128


def padded_rows(num_tokens: int) -> int:
    """The number of rows of a table for `num_tokens` tokens."""
    return -(-num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE


class Vocabulary(nnx.Module):
    """A table with one row per token for embeddings, and the same or another table for logits."""

    def __init__(self, config: configs.Model, vocab_size: int, rngs: nnx.Rngs):
        self.vocab_size = vocab_size

        def make_table() -> nnx.Param:
            # Rows have standard deviation 1/sqrt(D), and `embed` multiplies them by sqrt(D)
            # (Vaswani et al. 2017, section 3.4). So embeddings have unit variance, and logits of
            # tied tables have unit scale.
            shape = padded_rows(vocab_size), config.width
            values = jax.random.normal(rngs.params(), shape) * config.width**-0.5
            return nnx.Param(values, axes=("vocab", "embed"))

        self.embedding = make_table()
        self.output = None if config.tied_embeddings else make_table()

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The embeddings of tokens, float32.

        With float32, the gradient of a row is added up in float32 over all its occurrences.
        """
        # The whole table is gathered first. In a table that is sharded along both axes, XLA would
        # assemble the rows one by one.
        table = constrain(self.embedding[...], None, None)
        return table[tokens] * math.sqrt(table.shape[1])

    @property
    def unembedding(self) -> Float[Array, "R D"]:
        """The table whose product with hidden states gives the logits, float32."""
        return (self.embedding if self.output is None else self.output)[...]

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of all tokens of the vocabulary, float32."""
        table = self.unembedding[: self.vocab_size].astype(hidden.dtype)
        return jnp.einsum("btd,vd->btv", hidden, table, preferred_element_type=jnp.float32)

    def token_nll(
        self,
        hidden: Float[Array, "B T D"],
        targets: Int[Array, "B T"],
        training_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T"]:
        """`losses.token_nll` over the vocabulary without the padding rows.

        `training_key` has no effect, since there is no dropout here.
        """
        nll: Callable[..., Array] = functools.partial(token_nll, vocab_size=self.vocab_size)
        row_axes = ("batch", "sequence")
        if num_shards("vocab") == 1:
            # Each device computes its own shard. Otherwise XLA would sum the table's gradient over
            # all devices after every chunk, and in 16 bits.
            nll = map_over_shards(nll, [(*row_axes, None), (None, None), row_axes], row_axes)
        return nll(hidden, self.unembedding, targets)
