"""Measures time and memory of scoring the same number of targets in long and in short windows.

    python benchmarks/long_evaluation.py [--config=FILE] [--lengths=1024,65536]

Tokens are random, parameters are untrained, windows do not overlap, and each length has its own
process. Temporaries are the memory that the compiled program needs on each device. The peak is the
largest memory of the whole process, including its libraries and the compiler.
"""

import pathlib
import resource
import subprocess
import sys

import jax
import numpy as np
from absl import flags

from alibi_jax import cli
from alibi_jax.data.windows import evaluation_windows
from alibi_jax.distributed import sharding
from alibi_jax.distributed.processes import say
from alibi_jax.evaluation.scoring import Scorer
from alibi_jax.training.step import Trainer

_CONFIG = cli.define_config(pathlib.Path(__file__).parent.parent / "configs" / "tiny.py")
_LENGTHS = flags.DEFINE_list("lengths", ["1024", "65536"], "Lengths of the windows, in tokens.")
_TARGETS = flags.DEFINE_integer(
    "targets",
    None,
    "Targets per device, a multiple of each length; by default as many as the greatest length.",
)

_BATCH_TOKENS = 8192


def main() -> int:
    """Prints one table row per length."""
    lengths = [int(length) for length in _LENGTHS.value]
    if len(lengths) > 1:
        say("| length | targets | seconds | tokens/s | temporaries per device, MiB | peak, MiB |")
        say("|---|---|---|---|---|---|")
        other_arguments = [
            argument for argument in sys.argv[1:] if not argument.startswith("--lengths=")
        ]
        for length in lengths:
            arguments = [f"--lengths={length}", f"--targets={_TARGETS.value or max(lengths)}"]
            subprocess.run([sys.executable, sys.argv[0], *other_arguments, *arguments], check=True)
        return 0
    _measure(lengths[0])
    return 0


def _measure(length: int) -> None:
    """Prints the table row of a length."""
    config = _CONFIG.value
    config.check()
    jax.config.update("jax_platforms", "cpu")
    cli.start_devices()
    trainer = Trainer(config, 256, sharding.make_mesh())
    params = trainer.initial_state().params
    targets = (_TARGETS.value or length) * jax.device_count()
    tokens = np.random.default_rng(0).integers(1, 256, 1 + targets)
    windows = evaluation_windows(np.array([0, len(tokens)]), length, length)
    scorer = Scorer(trainer.graphdef, trainer.mesh, _BATCH_TOKENS)
    seconds = scorer(params, tokens, windows, f"at {length}").seconds
    batch = scorer.batch_size(len(windows), length)
    program = scorer.program(params, batch, length, 0)
    temporaries = program.memory_analysis().temp_size_in_bytes / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    say(
        f"| {length:,} | {targets:,} | {seconds:.1f} | {targets / seconds:,.0f} | "
        f"{temporaries:,.0f} | {peak:,.0f} |",
    )


if __name__ == "__main__":
    cli.run(main)
