"""Adaptive input and softmax: rare tokens in bands of narrower vectors.

Grave et al. 2017 (arXiv 1609.04309), Baevski & Auli 2019 (arXiv 1809.10853). Tokens are numbered
by falling frequency; those from one cutoff to the next are a band, whose vectors are `factor`
times narrower than the band's before. The first band's probabilities are those of one softmax with
the other bands themselves as further classes; a token of another band has its band's probability
times its own within it. Tables and projections are the same on the way in and out.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from alibi_jax import config as configs
from alibi_jax.layers import dropout
from alibi_jax.losses import in_chunks, token_nll
from alibi_jax.projection import product
from alibi_jax.sharding import constrain, split, splits
from alibi_jax.vocabulary import padded_rows


class Band(NamedTuple):
    """Tokens from `first` on, so many, and how wide their vectors are."""

    first: int
    size: int
    width: int


def make_bands(config: configs.Model, vocab_size: int) -> list[Band]:
    """The bands of a vocabulary. Raises ConfigError where it ends before the last one begins."""
    ends = (*config.cutoffs, vocab_size)
    if vocab_size <= ends[-2]:
        raise configs.ConfigError(
            f"model.adaptive_cutoffs={config.adaptive_cutoffs!r} with a vocabulary of "
            f"{vocab_size} tokens: the last cutoff must be below that"
        )
    widths = (config.width // config.adaptive_factor**n for n in range(len(ends)))
    each = zip(itertools.pairwise((0, *ends)), widths)
    return [Band(first, end - first, width) for (first, end), width in each]


class AdaptiveVocabulary(nnx.Module):
    """What `Vocabulary` is, with `model.adaptive_cutoffs`."""

    def __init__(self, config: configs.Model, vocab_size: int, rngs: nnx.Rngs):
        self.vocab_size = vocab_size
        self.bands = tuple(make_bands(config, vocab_size))
        self.width = config.width
        self.dropout_rate = config.adaptive_dropout
        self.dtype = jnp.dtype(config.dtype)
        # After the first band's tokens come the other bands, as classes.
        classes = len(self.bands) - 1
        self.rows = (self.bands[0].size + classes, *(band.size for band in self.bands[1:]))

        def table(band: Band, rows: int) -> nnx.Param:
            drawn = jax.random.normal(rngs.params(), (padded_rows(rows), band.width))
            return nnx.Param(drawn * band.width**-0.5, axes=("vocab", "embed"))

        def projection(band: Band) -> nnx.Param:
            draw = jax.nn.initializers.glorot_uniform()
            drawn = draw(rngs.params(), (band.width, config.width), jnp.float32)
            return nnx.Param(drawn, axes=(None, "embed"))

        self.tables = nnx.List([table(*each) for each in zip(self.bands, self.rows)])
        self.projections = nnx.List([projection(band) for band in self.bands])

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The vectors of tokens, in the compute dtype."""
        out = jnp.zeros((*tokens.shape, self.width), self.dtype)
        for band, table, projection in zip(self.bands, self.tables, self.projections):
            # Zeros for tokens of other bands. Gathered whole, as in `Vocabulary`.
            rows = constrain(table[...], None, None)[: band.size]
            rows = rows.at[tokens - band.first].get(
                mode="fill", fill_value=0.0, wrap_negative_indices=False
            )
            out += product("btk,kd->btd", rows.astype(self.dtype), projection[...])
        return out * math.sqrt(self.width)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Log-probabilities of each token of the vocabulary, float32."""
        each = zip(self._inputs(hidden, None), self.tables, self.rows)
        first, *others = (_log_softmax(x, table[...][:rows]) for x, table, rows in each)
        tokens = self.bands[0].size
        within = (first[..., tokens + n, None] + one for n, one in enumerate(others))
        return jnp.concatenate([first[..., :tokens], *within], axis=-1)

    def token_nll(
        self,
        hidden: Float[Array, "B T D"],
        targets: Int[Array, "B T"],
        training_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T"]:
        """Negative log-likelihood in nats of each target, float32.

        With a `training_key` there is dropout, before the softmax and before each narrower one.
        """
        # Each device takes tokens of its own, whatever else it has a part of, and all tables.
        along = "tokens" if splits(targets, "batch", "tokens") else "sequence"
        rows = ("batch", along)
        inputs = self._inputs(hidden, training_key)
        tables = [table[...] for table in self.tables]
        count = len(tables)

        def nll(*arrays: Array) -> Array:
            return self._nll(arrays[:count], arrays[count:-1], arrays[-1])

        axes = [*[(*rows, None)] * count, *[(None, None)] * count, rows]
        return split(nll, axes, rows)(*inputs, *tables, targets)

    def _inputs(
        self, hidden: Float[Array, "B T D"], training_key: Key[Array, ""] | None
    ) -> list[Float[Array, "B T _"]]:
        """What each band's table is multiplied with."""
        hidden = dropout(hidden, self.dropout_rate, training_key, salt=0)
        narrow = [product("btd,kd->btk", hidden, one[...]) for one in list(self.projections)[1:]]
        dropped = (
            dropout(x, self.dropout_rate, training_key, salt=number)
            for number, x in enumerate(narrow, start=1)
        )
        return [hidden, *dropped]

    def _nll(
        self,
        inputs: Sequence[Float[Array, "B T _"]],
        tables: Sequence[Float[Array, "_ _"]],
        targets: Int[Array, "B T"],
    ) -> Float[Array, "B T"]:
        cutoffs = jnp.array([band.first for band in self.bands[1:]], targets.dtype)
        number = jnp.searchsorted(cutoffs, targets, side="right")
        classes = jnp.where(number == 0, targets, self.bands[0].size + number - 1)
        nll = token_nll(inputs[0], tables[0], classes, vocab_size=self.rows[0])
        # In the order of bands, so that few chunks have targets of more than one, and the others'
        # logits need not be computed.
        order = jnp.argsort(number.ravel())
        within = jnp.zeros((1, targets.size), jnp.float32)
        for band, x, table in zip(self.bands[1:], inputs[1:], tables[1:]):
            own = targets.ravel()[order] - band.first
            own = jnp.where((own >= 0) & (own < band.size), own, -1)
            x = x.reshape(-1, band.width)[order]
            within += in_chunks(_if_any(table, band.size), x[None], own[None], len(table))
        return nll + jnp.zeros(targets.size).at[order].set(within[0]).reshape(targets.shape)


def _if_any(table: Float[Array, "R K"], size: int) -> Callable[[Array, Array], Array]:
    """The losses of targets in a table of so many tokens; nothing for those of -1."""

    def nll(x: Array, targets: Array) -> Array:
        present = targets >= 0
        return jax.lax.cond(
            present.any(),
            lambda: jnp.where(present, token_nll(x, table, targets, vocab_size=size), 0.0),
            lambda: jnp.zeros(targets.shape, jnp.float32),
        )

    return nll


def _log_softmax(hidden: Float[Array, "B T K"], table: Float[Array, "R K"]) -> Array:
    logits = jnp.einsum(
        "btk,vk->btv", hidden, table.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
    return jax.nn.log_softmax(logits, axis=-1)
