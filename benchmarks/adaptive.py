"""Measures the time of an adaptive vocabulary and of a single table, for several texts.

    python benchmarks/adaptive.py [--length=1024] [--width=1024] [--dtype=float32]

A step computes the embeddings, the loss, and the gradients of all parameters and hidden states. The
vocabulary is the paper's: 267,735 words in bands of 20,000, of 40,000 and of the rest, by default
with width 1024. Each core is one device and has one row. Words are drawn with probabilities
proportional to 1/rank (Zipf's law), or all from the first band, or all from the last band. All
vocabularies take turns in each of `--rounds` rounds. The table gives the median, the minimum and
the maximum of the time, and of its ratio to the first line's time in the same round.
"""

import dataclasses
import functools
from collections.abc import Callable

import _timing
import jax
import numpy as np
from absl import flags
from flax import nnx

from alibi_jax import cli
from alibi_jax.config import Model
from alibi_jax.distributed import sharding
from alibi_jax.distributed.processes import say
from alibi_jax.model.adaptive_softmax import AdaptiveVocabulary
from alibi_jax.model.vocabulary import Vocabulary

_LENGTH = flags.DEFINE_integer("length", 1024, "Length of a row, in tokens.")
_WIDTH = flags.DEFINE_integer("width", 1024, "Width of the hidden states.")
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Dtype of the hidden states."
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Number of rounds; their median is printed.")

_WORDS = 267_735
_ADAPTIVE = "adaptive"
_LAST_BAND_START = 60_000


def main() -> int:
    """Prints one table row per vocabulary."""
    jax.config.update("jax_platforms", "cpu")
    cli.start_devices()
    model = Model(
        width=_WIDTH.value, num_heads=8, adaptive_cutoffs="20000,60000", dtype=_DTYPE.value
    )
    words = _words((jax.device_count(), _LENGTH.value))
    shares = [f"{(words >= cutoff).mean():.1%}" for cutoff in model.cutoffs]
    say(f"{jax.device_count()} rows of {_LENGTH.value}, {_DTYPE.value}, jax {jax.__version__}")
    say(f"{' and '.join(shares)} of the words are beyond the first and the second cutoff\n")
    one_table = dataclasses.replace(model, adaptive_cutoffs="")
    steps = {
        _ADAPTIVE: _step(AdaptiveVocabulary, model, words),
        "adaptive, words of the first band": _step(AdaptiveVocabulary, model, words % 20_000),
        "adaptive, words of the last band": _step(
            AdaptiveVocabulary, model, _LAST_BAND_START + words % (_WORDS - _LAST_BAND_START)
        ),
        "one table of all words": _step(Vocabulary, one_table, words),
    }
    runs = {name: functools.partial(_timing.seconds_per_call, step) for name, step in steps.items()}
    numbers = _timing.alternate(runs, _ROUNDS.value)
    say(f"| | / {_ADAPTIVE} | ms |")
    say("|---|---|---|")
    for name, seconds in numbers.items():
        ratio = _timing.median_and_range(_timing.ratios(seconds, numbers[_ADAPTIVE]))
        milliseconds = _timing.median_and_range([1000 * x for x in seconds], ",.0f")
        say(f"| {name} | {ratio} | {milliseconds} |")
    return 0


def _words(shape: tuple[int, int]) -> np.ndarray:
    """Random words with probabilities proportional to 1/rank."""
    weights = 1 / np.arange(1, _WORDS + 1)
    draw = np.random.default_rng(0).choice(_WORDS, shape, p=weights / weights.sum())
    return draw.astype(np.int32)


def _step(
    vocabulary_type: type[nnx.Module], model: Model, words: np.ndarray
) -> Callable[[], object]:
    """A compiled step with this type of vocabulary; the words are inputs and targets."""
    mesh = sharding.make_mesh()
    graphdef, params = nnx.split(jax.jit(lambda: vocabulary_type(model, _WORDS, nnx.Rngs(0)))())
    row_sharding = sharding.named_sharding(mesh, "batch", None)
    targets = jax.device_put(words, row_sharding)
    hidden = jax.device_put(
        np.random.default_rng(1).normal(size=(*words.shape, _WIDTH.value)).astype(_DTYPE.value),
        sharding.named_sharding(mesh, "batch", None, None),
    )

    @jax.jit
    def gradients(params, hidden, targets):
        def loss(params, hidden):
            vocabulary = nnx.merge(graphdef, params)
            embedded = vocabulary.embed(targets).astype(hidden.dtype)
            return vocabulary.token_nll(hidden + embedded, targets).sum()

        return jax.grad(loss, argnums=(0, 1))(params, hidden)

    def step() -> object:
        with jax.set_mesh(mesh):
            return jax.block_until_ready(gradients(params, hidden, targets))

    step()
    return step


if __name__ == "__main__":
    cli.run(main)
