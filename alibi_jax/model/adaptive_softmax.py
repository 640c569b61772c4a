"""Adaptive input and softmax: rare tokens in bands of narrower vectors.

Grave et al. 2017 (arXiv 1609.04309), Baevski & Auli 2019 (arXiv 1809.10853). Tokens are numbered
by falling frequency; those from one cutoff to the next are a band, whose vectors are `factor`
times narrower than the band's before. The first band's probabilities are those of one softmax with
the other bands themselves as further classes; a token of another band has its band's probability
times its own within it. Tables and projections are the same on the way in and out.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from alibi_jax import config as configs
from alibi_jax.distributed.sharding import constrain, divides_evenly, map_over_shards
from alibi_jax.model import losses
from alibi_jax.model.dropout import dropout
from alibi_jax.model.losses import token_nll
from alibi_jax.model.projection import product
from alibi_jax.model.vocabulary import padded_rows


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
    each = enumerate(itertools.pairwise((0, *ends)))
    return [Band(first, end - first, band_width(config, n)) for n, (first, end) in each]


def band_width(config: configs.Model, number: int) -> int:
    """How wide the vectors of a band's tokens are; the first band is number 0."""
    return config.width // config.adaptive_factor**number


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
            drawn *= band.width**-0.5
            if rows > band.size:
                drawn = drawn.at[band.size : rows].set(even((classes, band.width)))
            return nnx.Param(drawn, axes=("vocab", "embed"))

        def even(shape: tuple[int, int]) -> Array:
            return jax.nn.initializers.glorot_uniform()(rngs.params(), shape, jnp.float32)

        def projection(band: Band) -> nnx.Param:
            return nnx.Param(even((band.width, config.width)), axes=(None, "embed"))

        self.tables = nnx.List([table(*each) for each in zip(self.bands, self.rows)])
        self.projections = nnx.List([projection(band) for band in self.bands])

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The vectors of tokens, in the compute dtype."""
        out = jnp.zeros((*tokens.shape, self.width), self.dtype)
        for band, table, projection in zip(self.bands, self.tables, self.projections):
            # Gathered whole, as in `Vocabulary`; zeros for tokens of other bands.
            rows = _rows(constrain(table[...], None, None), _own(tokens, band))
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
        along = "tokens" if divides_evenly(targets, "batch", "tokens") else "sequence"
        rows = ("batch", along)
        inputs = self._inputs(hidden, training_key)
        tables = [table[...] for table in self.tables]
        count = len(tables)

        def nll(*arrays: Array) -> Array:
            return self._nll(arrays[:count], arrays[count:-1], arrays[-1])

        axes = [*[(*rows, None)] * count, *[(None, None)] * count, rows]
        return map_over_shards(nll, axes, rows)(*inputs, *tables, targets)

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
        for band, x, table in zip(self.bands[1:], inputs[1:], tables[1:]):
            own = _own(targets, band).ravel()
            nll += _some_nll(band.size, x.reshape(-1, band.width), table, own).reshape(nll.shape)
        return nll


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _some_nll(
    vocab_size: int,
    hidden: Float[Array, "N K"],
    table: Float[Array, "R K"],
    targets: Int[Array, "N"],
) -> Float[Array, "N"]:
    """`losses.token_nll` of the targets that are not -1, the only ones that take time; else 0.

    They are collected, and gone through in as many chunks as there are; JAX can't differentiate
    a loop whose length is not known, so the gradient is written down.
    """
    chunk, chunks, order = _collected(targets, len(table))

    def one(number: Int[Array, ""], nll: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(order, number * chunk, chunk)
        x, some = (_rows(of, rows)[None] for of in (hidden, targets))
        return nll.at[rows].set(token_nll(x, table, some, vocab_size=vocab_size)[0], mode="drop")

    return jax.lax.fori_loop(0, chunks, one, jnp.zeros(targets.shape, jnp.float32))


def _some_nll_forward(
    vocab_size: int, hidden: Array, table: Array, targets: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _some_nll(vocab_size, hidden, table, targets), (hidden, table, targets)


def _some_nll_backward(
    vocab_size: int, inputs: tuple[Array, Array, Array], bar: Array
) -> tuple[Array, Array, None]:
    hidden, table, targets = inputs
    chunk, chunks, order = _collected(targets, len(table))

    def one(number: Int[Array, ""], bars: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = jax.lax.dynamic_slice_in_dim(order, number * chunk, chunk)
        x, some, some_bar = (_rows(of, rows)[None] for of in (hidden, targets, bar))
        _, pull = jax.vjp(lambda x, y: token_nll(x, y, some, vocab_size=vocab_size), x, table)
        x_bar, table_bar = pull(some_bar)
        return bars[0].at[rows].set(x_bar[0], mode="drop"), bars[1] + table_bar

    hidden_bar, table_bar = jax.lax.fori_loop(
        0, chunks, one, (jnp.zeros_like(hidden), jnp.zeros_like(table))
    )
    return hidden_bar, table_bar, None


_some_nll.defvjp(_some_nll_forward, _some_nll_backward)


def _collected(targets: Int[Array, "N"], num_rows: int) -> tuple[int, Array, Int[Array, "_"]]:
    """(targets a chunk, chunks with targets, the places of the targets that are not -1).

    After those come places past the end, which `_rows` fills with zeros and `.set` drops.
    """
    size = targets.size
    chunk = min(size, max(1, losses.LOGITS // num_rows))
    room = -(-size // chunk) * chunk
    present = targets >= 0
    ranks = jnp.where(present, jnp.cumsum(present) - 1, room)
    order = jnp.full(room, size).at[ranks].set(jnp.arange(size), mode="drop")
    return chunk, -(-present.sum() // chunk), order


def _own(tokens: Int[Array, "B T"], band: Band) -> Int[Array, "B T"]:
    """The number of each token in its band; -1 for those of another."""
    own = tokens - band.first
    return jnp.where((own >= 0) & (own < band.size), own, -1)


def _rows(x: Array, rows: Int[Array, "..."]) -> Array:
    """Those rows, zeros for what is none."""
    return x.at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _log_softmax(hidden: Float[Array, "B T K"], table: Float[Array, "R K"]) -> Array:
    logits = jnp.einsum(
        "btk,vk->btv", hidden, table.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
    return jax.nn.log_softmax(logits, axis=-1)
