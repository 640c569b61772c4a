"""What layers in a loop cost and save: time to compile by depth, and time of a step by depth.

    python benchmarks/depth.py [--loop=2,4,8] [--compile=4,8,32]

The default configuration's step (width 128, 8 heads, 32 windows of 128 bytes, each core one device)
with its layers compiled one by one and in a loop, taking turns in each of `--rounds` rounds:
medians, least and greatest, of the ratio to one by one in the same round, and of the time. Then
how long XLA takes for the step, of as many rounds, by depth, as the package compiles it: in a loop
where there are more than four.
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

_LOOP = flags.DEFINE_list("loop", ["2", "4", "8"], "Depths to time a step of.")
_COMPILE = flags.DEFINE_list("compile", ["4", "8", "16", "32"], "Depths to time compiling of.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds whose median is printed.")

_VOCABULARY = 256
_LOOPED, _ONE_BY_ONE = "in a loop", "one by one"


def main() -> int:
    """Prints a line a depth, of each of the two tables."""
    jax.config.update("jax_platforms", "cpu")
    cli.start_devices(32)
    say(f"{jax.device_count()} cores, jax {jax.__version__}\n")
    say("| layers | | / one by one | ms a step |")
    say("|---|---|---|---|")
    for layers in map(int, _LOOP.value):
        runs = {
            name: functools.partial(_timing.timed, _step(layers, unrolled))
            for name, unrolled in ((_LOOPED, 0), (_ONE_BY_ONE, layers))
        }
        numbers = _timing.in_turns(runs, _ROUNDS.value)
        for name, seconds in numbers.items():
            ratio = _timing.spread(_timing.ratios(seconds, numbers[_ONE_BY_ONE]))
            ms = _timing.spread([1000 * x for x in seconds], ".0f")
            say(f"| {layers} | {name} | {ratio} | {ms} |")
    depths = list(map(int, _COMPILE.value))
    runs = {str(n): functools.partial(_compile_seconds, n) for n in depths}
    numbers = _timing.in_turns(runs, _ROUNDS.value)
    say(f"\n| layers | s to compile | / {depths[0]} layers |")
    say("|---|---|---|")
    for layers, seconds in numbers.items():
        ratio = _timing.spread(_timing.ratios(seconds, numbers[str(depths[0])]))
        say(f"| {layers} | {_timing.spread(seconds, '.1f')} | {ratio} |")
    return 0


def _trainer(layers: int) -> Trainer:
    config = Config(
        model=Model(num_layers=layers, width=128, num_heads=8),
        optimizer=Optimizer(schedule="constant", warmup_steps=0),
        train=Train(length=128, batch_size=32, accumulation=4),
    )
    config.check()
    return Trainer(config, _VOCABULARY, sharding.make_mesh())


def _step(layers: int, unrolled: int) -> Callable[[], object]:
    """A step of so many layers, in a loop where there are more than `unrolled`."""
    usual, layer_stack._MAX_UNROLLED = layer_stack._MAX_UNROLLED, unrolled
    trainer = _trainer(layers)
    state = [trainer.initial_state()]
    tokens = np.random.default_rng(0).integers(0, _VOCABULARY, (32, 129), np.int32)
    batch = trainer.device_batch({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})

    def step() -> object:
        with jax.set_mesh(trainer.mesh):
            state[0], metrics = trainer.train_step(state[0], batch, np.int32(0))
        return jax.block_until_ready(metrics)

    step()
    layer_stack._MAX_UNROLLED = usual
    return step


def _compile_seconds(layers: int) -> float:
    trainer = _trainer(layers)
    tokens = jax.ShapeDtypeStruct((32, 128), np.int32, sharding=trainer.batch_sharding)
    with jax.set_mesh(trainer.mesh):
        batch = {"inputs": tokens, "targets": tokens}
        lowered = trainer.train_step.lower(trainer.abstract_state, batch, np.int32(0))
        begun = time.perf_counter()
        lowered.compile()
    return time.perf_counter() - begun


if __name__ == "__main__":
    cli.run(main)
