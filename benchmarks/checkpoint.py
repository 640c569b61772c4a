"""Measures the seconds to save and to restore a checkpoint.

    python benchmarks/checkpoint.py [--megabytes=400] [--rounds=5]

The checkpoint has the arrays of a transformer on one device: parameters, and two moments for each.
A save ends in the background, and training waits for its call only. The table gives the median, the
minimum and the maximum of the rounds, and the first round, in which programs are compiled. Files
are read soon after they are written, from the memory of the system.
"""

import pathlib
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
from absl import flags

from alibi_jax import cli
from alibi_jax.checkpoints import Checkpoints, Metadata
from alibi_jax.config import Checkpoint
from alibi_jax.distributed import sharding
from alibi_jax.distributed.processes import say

_MEGABYTES = flags.DEFINE_integer("megabytes", 400, "Size of all arrays, about.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Number of rounds; their median is printed.")

_LAYERS, _WIDTH = 8, 256
_BYTES_PER_LAYER = 3 * 12 * _WIDTH**2 * 4


def main() -> int:
    """Prints one table row per operation."""
    jax.config.update("jax_platforms", "cpu")
    cli.start_devices(1)
    placement = sharding.named_sharding(sharding.make_mesh())
    # Layers are stacked, and the rest is the table of words.
    words = max(1, (_MEGABYTES.value * 10**6 - _LAYERS * _BYTES_PER_LAYER) // (3 * 4 * _WIDTH))
    shapes = {
        "attention": (_LAYERS, 4, _WIDTH, _WIDTH),
        "feed_forward": (_LAYERS, 2, _WIDTH, 4 * _WIDTH),
        "norms": (_LAYERS, 2, _WIDTH),
        "embedding": (words, _WIDTH),
    }
    trees = [
        {
            name: jax.device_put(jax.random.normal(jax.random.key(seed), shape), placement)
            for name, shape in shapes.items()
        }
        for seed in range(3)
    ]
    params = trees[0]
    optimizer = {"mu": trees[1], "nu": trees[2], "count": jax.device_put(jnp.int32(1), placement)}
    seconds: dict[str, list[float]] = {
        name: []
        for name in ("call of save", "until it is saved", "restore all", "restore parameters")
    }
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder)
        for step in range(1, _ROUNDS.value + 1):
            with Checkpoints(workdir, Checkpoint(keep=1)) as checkpoints:
                start = time.perf_counter()
                checkpoints.save(params, optimizer, Metadata(step, {"model": {}}, "", {}, 256, {}))
                seconds["call of save"].append(time.perf_counter() - start)
                checkpoints.wait()
                seconds["until it is saved"].append(time.perf_counter() - start)
            with Checkpoints(workdir) as checkpoints:
                items = {"params": params, "optimizer": optimizer}
                for name, wanted in (
                    ("restore all", items),
                    ("restore parameters", {"params": params}),
                ):
                    abstract = jax.tree.map(
                        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement), wanted
                    )
                    start = time.perf_counter()
                    jax.block_until_ready(checkpoints.restore(step, **abstract))
                    seconds[name].append(time.perf_counter() - start)
    size = sum(x.nbytes for x in jax.tree.leaves((params, optimizer))) / 1e6
    say(f"{size:,.0f} MB, jax {jax.__version__}\n")
    say("| seconds | median | from - to | first round |")
    say("|---|---|---|---|")
    for name, numbers in seconds.items():
        numbers_range = f"{min(numbers):.2f} - {max(numbers):.2f}"
        say(f"| {name} | {statistics.median(numbers):.2f} | {numbers_range} | {numbers[0]:.2f} |")
    return 0


if __name__ == "__main__":
    cli.run(main)
