"""Measures layers in a loop: the time of a training step and the compile time, by depth.

    python benchmarks/depth.py [--loop=2,4,8] [--compile=4,8,32]

The step is the default configuration's: width 128, 8 heads, and 32 windows of 128 bytes. Each core
is one device. The first table compares layers in a loop with layers that are compiled one by one.
Both take turns in each of `--rounds` rounds. The table gives the median, the minimum and the
maximum of the time of a step, and of its ratio to the time of "one by one" in the same round. The
second table gives the time in which XLA compiles the step, in the same number of rounds. There the
package chooses: it compiles more than four layers as a loop.
"""

import functools
import time
from collections.abc import Callable

import _timing
import jax
import numpy as np
from absl import flags

from alibi_jax import cli
from alibi_jax.config import Config, Model, Optimizer, Train
from alibi_jax.distributed import sharding
from alibi_jax.distributed.processes import say
from alibi_jax.model import layer_stack
from alibi_jax.training.step import Trainer

_LOOP = flags.DEFINE_list("loop", ["2", "4", "8"], "Numbers of layers for the time of a step.")
_COMPILE = flags.DEFINE_list(
    "compile", ["4", "8", "16", "32"], "Numbers of layers for the compile time."
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Number of rounds; their median is printed.")

_VOCABULARY = 256
_LOOPED, _ONE_BY_ONE = "in a loop", "one by one"


def main() -> int:
    """Prints two tables with rows for each depth."""
    jax.config.update("jax_platforms", "cpu")
    cli.start_devices(32)
    say(f"{jax.device_count()} cores, jax {jax.__version__}\n")
    say("| layers | | / one by one | ms per step |")
    say("|---|---|---|---|")
    for layers in map(int, _LOOP.value):
        runs = {
            name: functools.partial(_timing.seconds_per_call, _step(layers, max_unrolled))
            for name, max_unrolled in ((_LOOPED, 0), (_ONE_BY_ONE, layers))
        }
        numbers = _timing.alternate(runs, _ROUNDS.value)
        for name, seconds in numbers.items():
            ratio = _timing.median_and_range(_timing.ratios(seconds, numbers[_ONE_BY_ONE]))
            milliseconds = _timing.median_and_range([1000 * x for x in seconds], ".0f")
            say(f"| {layers} | {name} | {ratio} | {milliseconds} |")
    depths = list(map(int, _COMPILE.value))
    runs = {str(n): functools.partial(_compile_seconds, n) for n in depths}
    numbers = _timing.alternate(runs, _ROUNDS.value)
    say(f"\n| layers | s to compile | / {depths[0]} layers |")
    say("|---|---|---|")
    for layers, seconds in numbers.items():
        ratio = _timing.median_and_range(_timing.ratios(seconds, numbers[str(depths[0])]))
        say(f"| {layers} | {_timing.median_and_range(seconds, '.1f')} | {ratio} |")
    return 0


def _trainer(layers: int) -> Trainer:
    """The trainer of the default configuration with `layers` layers."""
    config = Config(
        model=Model(num_layers=layers, width=128, num_heads=8),
        optimizer=Optimizer(schedule="constant", warmup_steps=0),
        train=Train(length=128, batch_size=32, accumulation=4),
    )
    config.check()
    return Trainer(config, _VOCABULARY, sharding.make_mesh())


def _step(layers: int, max_unrolled: int) -> Callable[[], object]:
    """A compiled step with `layers` layers, in a loop if there are more than `max_unrolled`."""
    default, layer_stack._MAX_UNROLLED = layer_stack._MAX_UNROLLED, max_unrolled
    trainer = _trainer(layers)
    state = [trainer.initial_state()]
    tokens = np.random.default_rng(0).integers(0, _VOCABULARY, (32, 129), np.int32)
    batch = trainer.device_batch({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})

    def step() -> object:
        with jax.set_mesh(trainer.mesh):
            state[0], metrics = trainer.train_step(state[0], batch, np.int32(0))
        return jax.block_until_ready(metrics)

    step()
    layer_stack._MAX_UNROLLED = default
    return step


def _compile_seconds(layers: int) -> float:
    """The seconds in which XLA compiles a step."""
    trainer = _trainer(layers)
    tokens = jax.ShapeDtypeStruct((32, 128), np.int32, sharding=trainer.batch_sharding)
    with jax.set_mesh(trainer.mesh):
        batch = {"inputs": tokens, "targets": tokens}
        lowered = trainer.train_step.lower(trainer.abstract_state, batch, np.int32(0))
        start = time.perf_counter()
        lowered.compile()
    return time.perf_counter() - start


if __name__ == "__main__":
    cli.run(main)
