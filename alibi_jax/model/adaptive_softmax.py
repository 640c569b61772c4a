"""Adaptive input and softmax: the embeddings of rare tokens are narrower.

Grave et al. 2017 (arXiv 1609.04309), Baevski & Auli 2019 (arXiv 1809.10853). Tokens are numbered by
falling frequency. The tokens between two cutoffs form a band. The vectors of each band are
`model.adaptive_factor` times narrower than the vectors of the previous band. One softmax gives the
probabilities of the first band's tokens and, as further classes, of the other bands. The
probability of a token in another band is the probability of its band times its probability within
the band. Input and output share all tables, and all projections except the first band's: the output
has no projection for that band.

Axes: B batch, T tokens, D width, V vocabulary, R rows of a table, K width of a band, N targets.
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
    """The tokens `first` to `first + size − 1`, whose vectors have `width` features."""

    first: int
    size: int
    width: int


def make_bands(config: configs.Model, vocab_size: int) -> list[Band]:
    """The bands of a vocabulary. Raises ConfigError if the last band would have no tokens."""
    ends = (*config.cutoffs, vocab_size)
    if vocab_size <= ends[-2]:
        raise configs.ConfigError(
            f"model.adaptive_cutoffs={config.adaptive_cutoffs!r} with a vocabulary of "
            f"{vocab_size} tokens: the last cutoff must be below that"
        )
    return [
        Band(first, end - first, band_width(config, number))
        for number, (first, end) in enumerate(itertools.pairwise((0, *ends)))
    ]


def band_width(config: configs.Model, number: int) -> int:
    """The width of the vectors in a band; the first band is number 0."""
    return config.width // config.adaptive_factor**number


class AdaptiveVocabulary(nnx.Module):
    """The vocabulary with `model.adaptive_cutoffs`; it has the methods of `Vocabulary`."""

    def __init__(self, config: configs.Model, vocab_size: int, rngs: nnx.Rngs):
        self.vocab_size = vocab_size
        self.bands = tuple(make_bands(config, vocab_size))
        self.width = config.width
        self.dropout_rate = config.adaptive_dropout
        self.dtype = jnp.dtype(config.dtype)
        # The softmax of the first band has the other bands as classes after its own tokens.
        num_other_bands = len(self.bands) - 1
        self.num_classes = (
            self.bands[0].size + num_other_bands,
            *(band.size for band in self.bands[1:]),
        )

        def make_table(band: Band, num_classes: int) -> nnx.Param:
            values = jax.random.normal(rngs.params(), (padded_rows(num_classes), band.width))
            values *= band.width**-0.5
            if num_classes > band.size:
                class_rows = glorot_uniform((num_other_bands, band.width))
                values = values.at[band.size : num_classes].set(class_rows)
            return nnx.Param(values, axes=("vocab", "embed"))

        def glorot_uniform(shape: tuple[int, int]) -> Array:
            return jax.nn.initializers.glorot_uniform()(rngs.params(), shape, jnp.float32)

        def make_projection(band: Band) -> nnx.Param:
            return nnx.Param(glorot_uniform((band.width, config.width)), axes=(None, "embed"))

        self.tables = nnx.List(
            [make_table(band, number) for band, number in zip(self.bands, self.num_classes)]
        )
        self.projections = nnx.List([make_projection(band) for band in self.bands])

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The embeddings of tokens, in the compute dtype."""
        out = jnp.zeros((*tokens.shape, self.width), self.dtype)
        for band, table, projection in zip(self.bands, self.tables, self.projections):
            # The whole table is gathered, as in `Vocabulary`. Tokens of other bands get zeros.
            rows = _take_rows(constrain(table[...], None, None), _index_in_band(tokens, band))
            out += product("btk,kd->btd", rows.astype(self.dtype), projection[...])
        return out * math.sqrt(self.width)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Log-probabilities of all tokens of the vocabulary, float32."""
        first, *others = (
            _log_softmax(x, table[...][:num_classes])
            for x, table, num_classes in zip(
                self._band_inputs(hidden, None), self.tables, self.num_classes
            )
        )
        num_tokens = self.bands[0].size
        other_tokens = (
            first[..., num_tokens + number, None] + within_band
            for number, within_band in enumerate(others)
        )
        return jnp.concatenate([first[..., :num_tokens], *other_tokens], axis=-1)

    def token_nll(
        self,
        hidden: Float[Array, "B T D"],
        targets: Int[Array, "B T"],
        training_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T"]:
        """Negative log-likelihood of each target in nats, float32.

        With a `training_key` there is dropout on the input of the first softmax, and on the
        narrower inputs of the others.
        """
        # Each device computes the losses of its own tokens from whole tables, even if the mesh
        # shards the tables.
        token_axis = "tokens" if divides_evenly(targets, "batch", "tokens") else "sequence"
        row_axes = ("batch", token_axis)
        inputs = self._band_inputs(hidden, training_key)
        tables = [table[...] for table in self.tables]
        count = len(tables)

        def nll(*arrays: Array) -> Array:
            return self._nll(arrays[:count], arrays[count:-1], arrays[-1])

        axes = [*[(*row_axes, None)] * count, *[(None, None)] * count, row_axes]
        return map_over_shards(nll, axes, row_axes)(*inputs, *tables, targets)

    def _band_inputs(
        self, hidden: Float[Array, "B T D"], training_key: Key[Array, ""] | None
    ) -> list[Float[Array, "B T _"]]:
        """The input of each band's softmax: hidden states, projected to the width of the band."""
        hidden = dropout(hidden, self.dropout_rate, training_key, salt=0)
        projected = [
            product("btd,kd->btk", hidden, projection[...])
            for projection in list(self.projections)[1:]
        ]
        dropped = (
            dropout(x, self.dropout_rate, training_key, salt=number)
            for number, x in enumerate(projected, start=1)
        )
        return [hidden, *dropped]

    def _nll(
        self,
        inputs: Sequence[Float[Array, "B T _"]],
        tables: Sequence[Float[Array, "_ _"]],
        targets: Int[Array, "B T"],
    ) -> Float[Array, "B T"]:
        cutoffs = jnp.array([band.first for band in self.bands[1:]], targets.dtype)
        band_numbers = jnp.searchsorted(cutoffs, targets, side="right")
        classes = jnp.where(band_numbers == 0, targets, self.bands[0].size + band_numbers - 1)
        nll = token_nll(inputs[0], tables[0], classes, vocab_size=self.num_classes[0])
        for band, x, table in zip(self.bands[1:], inputs[1:], tables[1:]):
            indices = _index_in_band(targets, band).ravel()
            band_nll = _band_nll(band.size, x.reshape(-1, band.width), table, indices)
            nll += band_nll.reshape(nll.shape)
        return nll


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _band_nll(
    vocab_size: int,
    hidden: Float[Array, "N K"],
    table: Float[Array, "R K"],
    targets: Int[Array, "N"],
) -> Float[Array, "N"]:
    """`losses.token_nll` of the targets in a band, 0 for the targets that are -1.

    Only the targets in the band take time: they are collected, and the loop runs only over the
    chunks that they fill. JAX cannot differentiate a loop of unknown length, so the gradient is
    explicit.
    """
    chunk_size, num_chunks, order = _collect_targets(targets, len(table))

    def add_chunk(number: Int[Array, ""], nll: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(order, number * chunk_size, chunk_size)
        x, chunk_targets = (_take_rows(array, rows)[None] for array in (hidden, targets))
        chunk_nll = token_nll(x, table, chunk_targets, vocab_size=vocab_size)[0]
        return nll.at[rows].set(chunk_nll, mode="drop")

    return jax.lax.fori_loop(0, num_chunks, add_chunk, jnp.zeros(targets.shape, jnp.float32))


def _band_nll_forward(
    vocab_size: int, hidden: Array, table: Array, targets: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _band_nll(vocab_size, hidden, table, targets), (hidden, table, targets)


def _band_nll_backward(
    vocab_size: int, inputs: tuple[Array, Array, Array], nll_grad: Array
) -> tuple[Array, Array, None]:
    hidden, table, targets = inputs
    chunk_size, num_chunks, order = _collect_targets(targets, len(table))

    def add_chunk(number: Int[Array, ""], grads: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden_grad, table_grad = grads
        rows = jax.lax.dynamic_slice_in_dim(order, number * chunk_size, chunk_size)
        x, chunk_targets, chunk_nll_grad = (
            _take_rows(array, rows)[None] for array in (hidden, targets, nll_grad)
        )
        _, pull_back = jax.vjp(
            lambda x, table: token_nll(x, table, chunk_targets, vocab_size=vocab_size), x, table
        )
        x_grad, chunk_table_grad = pull_back(chunk_nll_grad)
        return hidden_grad.at[rows].set(x_grad[0], mode="drop"), table_grad + chunk_table_grad

    zeros = jnp.zeros_like(hidden), jnp.zeros_like(table)
    hidden_grad, table_grad = jax.lax.fori_loop(0, num_chunks, add_chunk, zeros)
    return hidden_grad, table_grad, None


_band_nll.defvjp(_band_nll_forward, _band_nll_backward)


def _collect_targets(targets: Int[Array, "N"], num_rows: int) -> tuple[int, Array, Int[Array, "_"]]:
    """(targets per chunk, number of chunks, indices of the targets that are not -1).

    Indices past the end fill the last chunk: for them `_take_rows` gives zeros, and `.set` drops
    what is written.
    """
    size = targets.size
    chunk_size = min(size, max(1, losses.MAX_CHUNK_LOGITS // num_rows))
    padded_size = -(-size // chunk_size) * chunk_size
    in_band = targets >= 0
    ranks = jnp.where(in_band, jnp.cumsum(in_band, dtype=jnp.int32) - 1, padded_size)
    order = jnp.full(padded_size, size).at[ranks].set(jnp.arange(size), mode="drop")
    return chunk_size, -(-in_band.sum(dtype=jnp.int32) // chunk_size), order


def _index_in_band(tokens: Int[Array, "B T"], band: Band) -> Int[Array, "B T"]:
    """The index of each token in the band, -1 for tokens of other bands."""
    indices = tokens - band.first
    return jnp.where((indices >= 0) & (indices < band.size), indices, -1)


def _take_rows(x: Array, rows: Int[Array, "..."]) -> Array:
    """The rows of `x` with these indices; zeros where an index is out of range."""
    return x.at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _log_softmax(hidden: Float[Array, "B T K"], table: Float[Array, "R K"]) -> Array:
    logits = jnp.einsum(
        "btk,vk->btv", hidden, table.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
    return jax.nn.log_softmax(logits, axis=-1)
