"""Measures the loss in chunks on a CPU: the time, by the number of logits that exist at a time.

    python benchmarks/loss.py [--vocabulary=32768] [--length=1024] [--dtype=bfloat16]

A step computes the loss and its gradients with respect to the hidden states and the table. Each
core is one device and has one row. All chunk sizes take turns in each of `--rounds` rounds. The
table gives the median, the minimum and the maximum of three numbers: the time, its ratio to the
time with the package's chunk size in the same round, and the achieved share of the FLOP/s of a
2048 x 2048 x 2048 matrix product. The share counts the product that gives the logits and the two
products of its gradient.
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
_LENGTH = flags.DEFINE_integer("length", 1024, "Length of a row, in tokens.")
_WIDTH = flags.DEFINE_integer("width", 512, "Width of the hidden states.")
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Dtype of the hidden states."
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Number of rounds; their median is printed.")


def main() -> int:
    """Prints one table row per chunk size."""
    jax.config.update("jax_platforms", "cpu")
    cli.start_devices()
    default = losses.MAX_CHUNK_LOGITS
    sizes = [(default << 2) >> shift for shift in (8, 6, 4, 3, 2, 1, 0)]
    runs: dict[str | int, Callable[[], float]] = {
        _timing.PRODUCT_RATE: _timing.product_rate(_DTYPE.value)
    }
    memory = {}
    for size in sizes:
        step, memory[size] = _prepare(size)
        runs[size] = functools.partial(_timing.seconds_per_call, step)
    numbers = _timing.alternate(runs, _ROUNDS.value)
    rates = numbers.pop(_timing.PRODUCT_RATE)
    shape = f"[{jax.device_count()}, {_LENGTH.value}, {_WIDTH.value}]"
    say(f"{shape} {_DTYPE.value}, vocabulary of {_VOCABULARY.value}, jax {jax.__version__}\n")
    say(
        f"| logits at a time per device | / {default:,} | ms | share of product "
        "| temporaries per device, MiB |"
    )
    say("|---|---|---|---|---|")
    flops = 6 * jax.device_count() * _LENGTH.value * _WIDTH.value * _VOCABULARY.value
    for size, seconds in numbers.items():
        shares = [100 * flops / x / rate for x, rate in zip(seconds, rates)]
        cells = [
            _timing.median_and_range(_timing.ratios(seconds, numbers[default])),
            _timing.median_and_range([1000 * x for x in seconds], ",.1f"),
            _timing.median_and_range(shares, ".0f") + " %",
            f"{memory[size]:,.0f}",
        ]
        say(f"| {size:,} | {' | '.join(cells)} |")
    return 0


def _prepare(size: int) -> tuple[Callable[[], object], float]:
    """A compiled step that waits for its results, and the MiB of its temporaries per device."""
    rng, mesh = np.random.default_rng(0), sharding.make_mesh()
    shape = jax.device_count(), _LENGTH.value
    row_sharding = sharding.named_sharding(mesh, "batch")
    hidden = jnp.asarray(rng.standard_normal((*shape, _WIDTH.value), np.float32), _DTYPE.value)
    table = 0.02 * rng.standard_normal((_VOCABULARY.value, _WIDTH.value), np.float32)
    arrays = (
        jax.device_put(hidden, row_sharding),
        jax.device_put(table, sharding.named_sharding(mesh)),
        jax.device_put(rng.integers(0, _VOCABULARY.value, shape), row_sharding),
    )

    def loss(*arrays: jax.Array) -> jax.Array:
        return losses.token_nll(*arrays).sum()

    default, losses.MAX_CHUNK_LOGITS = losses.MAX_CHUNK_LOGITS, size
    try:
        with jax.set_mesh(mesh):
            # A new function for each size: JAX would reuse the trace of an old function.
            step = jax.jit(jax.value_and_grad(lambda *x: loss(*x), (0, 1)))
            compiled = step.lower(*arrays).compile()
    finally:
        losses.MAX_CHUNK_LOGITS = default
    temporaries = compiled.memory_analysis().temp_size_in_bytes / 2**20
    return lambda: jax.block_until_ready(compiled(*arrays)), temporaries


if __name__ == "__main__":
    cli.run(main)
