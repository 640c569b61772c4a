"""What an adaptive vocabulary saves against one table, and how that depends on the text.

    python benchmarks/adaptive.py [--length=1024] [--dtype=float32]

Input, loss and the gradients of all parameters and hidden states, of the paper's vocabulary:
267,735 words in bands of 20,000, 40,000 and the rest, width 1024, a row on each core as one device.
Words are drawn as often as Zipf has it, 1/rank; or all from the first band, or the last. All take
turns in each of `--rounds` rounds; medians, least and greatest, of the ratio to the first in the
same round, and of the time.
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

_LENGTH = flags.DEFINE_integer("length", 1024, "Of a row, in tokens.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the hidden states.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds whose median is printed.")

_WORDS, _WIDTH = 267_735, 1024
_OURS = "adaptive"
_LAST = 60_000


def main() -> int:
    """Prints a line a vocabulary."""
    jax.config.update("jax_platforms", "cpu")
    cli.start_devices()
    model = Model(width=_WIDTH, num_heads=8, adaptive_cutoffs="20000,60000", dtype=_DTYPE.value)
    words = _words((jax.device_count(), _LENGTH.value))
    shares = [f"{(words >= cutoff).mean():.1%}" for cutoff in model.cutoffs]
    say(f"{jax.device_count()} rows of {_LENGTH.value}, {_DTYPE.value}, jax {jax.__version__}")
    say(f"of the words, {' and '.join(shares)} are past the first and the second cutoff\n")
    one_table = dataclasses.replace(model, adaptive_cutoffs="")
    steps = {
        _OURS: _step(AdaptiveVocabulary, model, words),
        "adaptive, words of the first band": _step(AdaptiveVocabulary, model, words % 20_000),
        "adaptive, words of the last": _step(
            AdaptiveVocabulary, model, _LAST + words % (_WORDS - _LAST)
        ),
        "one table of all words": _step(Vocabulary, one_table, words),
    }
    runs = {name: functools.partial(_timing.timed, step) for name, step in steps.items()}
    numbers = _timing.in_turns(runs, _ROUNDS.value)
    say(f"| | / {_OURS} | ms |")
    say("|---|---|---|")
    for name, seconds in numbers.items():
        ratio = _timing.spread(_timing.ratios(seconds, numbers[_OURS]))
        say(f"| {name} | {ratio} | {_timing.spread([1000 * x for x in seconds], ',.0f')} |")
    return 0


def _words(shape: tuple[int, int]) -> np.ndarray:
    weights = 1 / np.arange(1, _WORDS + 1)
    draw = np.random.default_rng(0).choice(_WORDS, shape, p=weights / weights.sum())
    return draw.astype(np.int32)


def _step(kind: type[nnx.Module], model: Model, words: np.ndarray) -> Callable[[], object]:
    mesh = sharding.make_mesh()
    graphdef, params = nnx.split(jax.jit(lambda: kind(model, _WORDS, nnx.Rngs(0)))())
    rows = sharding.named_sharding(mesh, "batch", None)
    targets = jax.device_put(words, rows)
    hidden = jax.device_put(
        np.random.default_rng(1).normal(size=(*words.shape, _WIDTH)).astype(_DTYPE.value),
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
