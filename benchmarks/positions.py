"""What each position method costs: a training step and a generated token, against `none`.

    python benchmarks/positions.py --config=configs/tiny.py [--methods=none,alibi,rotary]

Random tokens, fresh parameters. Methods take turns in each of `--rounds` rounds, so that a busy
machine is busy for all of them; medians over the rounds of the time and of its ratio to `none`.
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
_METHODS = flags.DEFINE_list("methods", sorted(POSITIONS), "The methods; `none` is always there.")
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Rounds whose median is printed.")
_NEW_TOKENS = flags.DEFINE_integer(
    "new_tokens", 64, "Generated; with the prompt they make train.length."
)


def main() -> int:
    """Prints a line a method."""
    config = _CONFIG.value
    cli.start_devices(config.train.batch_size // config.train.accumulation)
    names = list(dict.fromkeys(["none", *_METHODS.value]))
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    runs = {}
    for name in names:
        model = dataclasses.replace(config.model, position=name)
        runs[name] = _runs(dataclasses.replace(config, model=model))
    for _ in range(_ROUNDS.value):
        for name in names:
            for run, seconds in zip(runs[name], times[name]):
                begun = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - begun)
    processes.say(f"{jax.device_count()} devices; medians of {_ROUNDS.value}")
    processes.say(f"{'':17} {'training step':>22}  {'a generated token':>22}")
    for name in names:
        cells = []
        for kind, count in enumerate((1, _NEW_TOKENS.value)):
            seconds = times[name][kind]
            ratio = statistics.median(
                one / other for one, other in zip(seconds, times["none"][kind])
            )
            cells.append(f"{1000 * statistics.median(seconds) / count:9.2f} ms, x {ratio:4.2f}")
        processes.say(f"{name:17} {cells[0]:>22}  {cells[1]:>22}")
    return 0


def _runs(config: Config) -> tuple[Callable[[], None], Callable[[], None]]:
    """A training step and a generation, compiled."""
    config.check()
    from flax import nnx

    from alibi_jax.distributed import sharding
    from alibi_jax.generate import generate
    from alibi_jax.training.step import Trainer

    train = config.train
    trainer = Trainer(config, 256, sharding.make_mesh())
    state = trainer.initial_state()
    block = np.random.default_rng(0).integers(1, 256, (train.batch_size, train.length), np.int32)
    batch = trainer.device_batch({"inputs": block, "targets": block})
    model = nnx.merge(trainer.graphdef, jax.tree.map(np.asarray, state.params))

    def step() -> None:
        nonlocal state
        with jax.set_mesh(trainer.mesh):
            state, metrics = trainer.train_step(state, batch, np.int32(0))
        jax.block_until_ready((state, metrics))

    def text() -> None:
        # A learned table ends with the training length.
        prompts = block[:4, : train.length - _NEW_TOKENS.value]
        generate(model, list(prompts), _NEW_TOKENS.value)

    step()
    text()
    return step, text


if __name__ == "__main__":
    cli.run(main)
