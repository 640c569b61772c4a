"""Measures the time of each position method, for a training step and for a generated token.

    python benchmarks/positions.py --config=configs/tiny.py [--methods=none,alibi,rotary]

Tokens are random and parameters are untrained. The methods take turns in each of `--rounds` rounds,
so that other load on the machine slows down all of them. The table gives the medians of the time
and of its ratio to the time of `none` in the same round.
"""

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from absl import flags

from alibi_jax import cli
from alibi_jax.config import POSITIONS, Config
from alibi_jax.distributed import processes

_CONFIG = cli.define_config(pathlib.Path(__file__).parent.parent / "configs" / "tiny.py")
_METHODS = flags.DEFINE_list(
    "methods", sorted(POSITIONS), "Position methods; `none` is always measured."
)
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Number of rounds; their median is printed.")
_NEW_TOKENS = flags.DEFINE_integer(
    "new_tokens", 64, "Tokens to generate; the prompt has the rest of train.length tokens."
)


def main() -> int:
    """Prints one line per method."""
    config = _CONFIG.value
    cli.start_devices(config.train.batch_size // config.train.accumulation)
    names = list(dict.fromkeys(["none", *_METHODS.value]))
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    runs = {}
    for name in names:
        model = dataclasses.replace(config.model, position=name)
        runs[name] = _compiled_runs(dataclasses.replace(config, model=model))
    for _ in range(_ROUNDS.value):
        for name in names:
            for run, seconds in zip(runs[name], times[name]):
                start = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - start)
    processes.say(f"{jax.device_count()} devices; medians of {_ROUNDS.value} rounds")
    processes.say(f"{'':17} {'training step':>24}  {'generated token':>24}")
    for name in names:
        cells = []
        for column, count in enumerate((1, _NEW_TOKENS.value)):
            seconds = times[name][column]
            ratio = statistics.median(x / other for x, other in zip(seconds, times["none"][column]))
            cells.append(f"{1000 * statistics.median(seconds) / count:9.2f} ms, ratio {ratio:4.2f}")
        processes.say(f"{name:17} {cells[0]:>24}  {cells[1]:>24}")
    return 0


def _compiled_runs(config: Config) -> tuple[Callable[[], None], Callable[[], None]]:
    """A function that runs a compiled training step, and one that generates tokens."""
    config.check()
    from flax import nnx

    from alibi_jax.distributed import sharding
    from alibi_jax.generate import generate
    from alibi_jax.training.step import Trainer

    train = config.train
    trainer = Trainer(config, 256, sharding.make_mesh())
    state = trainer.initial_state()
    tokens = np.random.default_rng(0).integers(1, 256, (train.batch_size, train.length), np.int32)
    batch = trainer.device_batch({"inputs": tokens, "targets": tokens})
    model = nnx.merge(trainer.graphdef, jax.tree.map(np.asarray, state.params))

    def step() -> None:
        nonlocal state
        with jax.set_mesh(trainer.mesh):
            state, metrics = trainer.train_step(state, batch, np.int32(0))
        jax.block_until_ready((state, metrics))

    def generation() -> None:
        # A learned position table ends at the training length.
        prompts = tokens[:4, : train.length - _NEW_TOKENS.value]
        generate(model, list(prompts), _NEW_TOKENS.value)

    step()
    generation()
    return step, generation


if __name__ == "__main__":
    cli.run(main)
