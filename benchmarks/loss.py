"""What the chunks of the loss cost on a CPU: how many logits exist at a time, against the time.

    python benchmarks/loss.py [--vocabulary=32768] [--length=1024] [--dtype=bfloat16]

The loss and its gradients in hidden states and table, a row on each core as one device. All sizes
take turns in each of `--rounds` rounds; medians, least and greatest, of the ratio to the size that
the package has in the same round, of the time, and of the share of the speed of a
2048 x 2048 x 2048 matrix product, counting the logits' product and the two of its gradient.
"""

import functools
from collections.abc import Callable

import _timing
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from alibi_jax import cli
from alibi_jax.distributed import sharding
from alibi_jax.distributed.processes import say
from alibi_jax.model import losses

_VOCABULARY = flags.DEFINE_integer("vocabulary", 32768, "Rows of the table.")
_LENGTH = flags.DEFINE_integer("length", 1024, "Of a row, in tokens.")
_WIDTH = flags.DEFINE_integer("width", 512, "Of the hidden states.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the hidden states.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds whose median is printed.")


def main() -> int:
    """Prints a line a size."""
    jax.config.update("jax_platforms", "cpu")
    cli.start_devices()
    usual = losses.MAX_CHUNK_LOGITS
    sizes = [usual >> 6, usual >> 4, usual >> 2, usual >> 1, usual, usual << 1, usual << 2]
    runs: dict[str | int, Callable[[], float]] = {"": _timing.product_rate(_DTYPE.value)}
    memory = {}
    for size in sizes:
        step, memory[size] = _prepare(size)
        runs[size] = functools.partial(_timing.timed, step)
    numbers = _timing.in_turns(runs, _ROUNDS.value)
    rates = numbers.pop("")
    shape = f"[{jax.device_count()}, {_LENGTH.value}, {_WIDTH.value}]"
    say(f"{shape} {_DTYPE.value}, a vocabulary of {_VOCABULARY.value}, jax {jax.__version__}\n")
    say(f"| logits at a time, a device | / {usual:,} | ms | share of product | temporaries, MiB |")
    say("|---|---|---|---|---|")
    flops = 6 * jax.device_count() * _LENGTH.value * _WIDTH.value * _VOCABULARY.value
    for size, seconds in numbers.items():
        shares = [100 * flops / x / rate for x, rate in zip(seconds, rates)]
        cells = [
            _timing.spread(_timing.ratios(seconds, numbers[usual])),
            _timing.spread([1000 * x for x in seconds], ",.1f"),
            _timing.spread(shares, ".0f") + " %",
            f"{memory[size]:,.0f}",
        ]
        say(f"| {size:,} | {' | '.join(cells)} |")
    return 0


def _prepare(size: int) -> tuple[Callable[[], object], float]:
    """A call that waits for its results, and the MiB that it takes on a device beside them."""
    rng, mesh = np.random.default_rng(0), sharding.make_mesh()
    rows = jax.device_count(), _LENGTH.value
    of_rows = sharding.named_sharding(mesh, "batch")
    hidden = jnp.asarray(rng.standard_normal((*rows, _WIDTH.value), np.float32), _DTYPE.value)
    table = 0.02 * rng.standard_normal((_VOCABULARY.value, _WIDTH.value), np.float32)
    arrays = (
        jax.device_put(hidden, of_rows),
        jax.device_put(table, sharding.named_sharding(mesh)),
        jax.device_put(rng.integers(0, _VOCABULARY.value, rows), of_rows),
    )

    def loss(*arrays: jax.Array) -> jax.Array:
        return losses.token_nll(*arrays).sum()

    usual, losses.MAX_CHUNK_LOGITS = losses.MAX_CHUNK_LOGITS, size
    try:
        with jax.set_mesh(mesh):
            # A function of its own: one that was traced before would be remembered.
            step = jax.jit(jax.value_and_grad(lambda *x: loss(*x), (0, 1)))
            compiled = step.lower(*arrays).compile()
    finally:
        losses.MAX_CHUNK_LOGITS = usual
    used = compiled.memory_analysis().temp_size_in_bytes / 2**20
    return lambda: jax.block_until_ready(compiled(*arrays)), used


if __name__ == "__main__":
    cli.run(main)
