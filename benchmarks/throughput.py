"""Measures tokens per second of a configuration, in training and in scoring at several lengths.

    python benchmarks/throughput.py --config=configs/tiny.py [--config.train.accumulation=1]

Tokens are random and parameters are untrained. The results are medians of `--repeats` runs, without
compilation. To compare several settings, run the script for each of them in turn on one machine.
"""

import pathlib
import statistics
import time

import jax
import numpy as np
from absl import flags

from alibi_jax import cli
from alibi_jax.distributed import processes

_CONFIG = cli.define_config(pathlib.Path(__file__).parent.parent / "configs" / "tiny.py")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Number of runs; their median is printed.")
_MULTIPLES = flags.DEFINE_list(
    "multiples", ["1", "4", "32"], "Lengths of the scored windows, as multiples of train.length."
)


def main() -> int:
    """Prints one line per measurement."""
    config = _CONFIG.value
    config.check()
    cli.start_devices(config.train.batch_size // config.train.accumulation)
    from alibi_jax.data.windows import evaluation_windows
    from alibi_jax.distributed import sharding
    from alibi_jax.evaluation.scoring import Scorer
    from alibi_jax.training.step import Trainer

    train = config.train
    trainer = Trainer(config, 256, sharding.make_mesh())
    state = trainer.initial_state()
    tokens = np.random.default_rng(0).integers(1, 256, 200_000).astype(np.uint16)
    step_tokens = tokens[: train.batch_size * train.length].astype(np.int32)
    local_batch = {
        name: step_tokens.reshape(train.batch_size, train.length) for name in ("inputs", "targets")
    }
    batch = trainer.device_batch(local_batch)
    seconds = []
    with jax.set_mesh(trainer.mesh):
        for step in range(_REPEATS.value + 1):
            start = time.perf_counter()
            state, metrics = trainer.train_step(state, batch, np.int32(step))
            jax.block_until_ready((state, metrics))
            seconds.append(time.perf_counter() - start)
    processes.say(f"{jax.device_count()} devices; compiling the step: {seconds[0]:.1f} s")
    _print("training", train.batch_size * train.length, seconds[1:])

    scorer = Scorer(trainer.graphdef, trainer.mesh, batch_tokens=8192)
    for multiple in _MULTIPLES.value:
        length = int(multiple) * train.length
        bounds = np.array([0, 1 + max(32768, length)])
        windows = evaluation_windows(bounds, length, length)
        name = f"scoring at {length}"
        seconds = [
            scorer(state.params, tokens, windows, name).seconds for _ in range(_REPEATS.value)
        ]
        _print(name, len(windows.targets), seconds)
    return 0


def _print(name: str, tokens: int, seconds: list[float]) -> None:
    """Prints the median, the minimum and the maximum of tokens per second."""
    rate, minimum, maximum = (
        tokens / x for x in (statistics.median(seconds), max(seconds), min(seconds))
    )
    processes.say(f"{name}: {rate:,.0f} tokens/s (from {minimum:,.0f} to {maximum:,.0f})")


if __name__ == "__main__":
    cli.run(main)
