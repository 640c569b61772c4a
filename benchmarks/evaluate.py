"""Measures tokens per second when scoring a long stream on a CPU, with reach and without.

    python benchmarks/evaluate.py [--config=FILE] [--lengths=128,4096]

Tokens are random and parameters are untrained. Reach depends on the norms of the queries and keys,
so a trained model has another reach. The two variants alternate in each of `--rounds` rounds. The
table gives the median, the minimum and the maximum of the ratio of speeds and of tokens per second.
Up to 256 tokens attention is dense and does not use reach.
"""

import contextlib
import functools
import pathlib

import _timing
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
_LENGTHS = flags.DEFINE_list(
    "lengths", ["128", "256", "512", "1024", "2048", "4096"], "Lengths of the windows, in tokens."
)
_TOKENS = flags.DEFINE_integer("tokens", 32768, "Tokens of the stream; at least one window.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Number of rounds; their median is printed.")

_BATCH_TOKENS = 8192


def main() -> int:
    """Prints one table row per length."""
    config = _CONFIG.value
    config.check()
    jax.config.update("jax_platforms", "cpu")
    cli.start_devices(config.train.batch_size // config.train.accumulation)
    trainer = Trainer(config, 256, sharding.make_mesh())
    params = trainer.initial_state().params
    say(f"{jax.device_count()} cores, jax {jax.__version__}, {config.model.dtype}\n")
    say("| length | with reach / without | with reach, tokens/s | without, tokens/s |")
    say("|---|---|---|---|")
    for length in map(int, _LENGTHS.value):
        tokens = np.random.default_rng(0).integers(1, 256, 1 + max(_TOKENS.value, length))
        windows = evaluation_windows(np.array([0, len(tokens)]), length, length)

        def rate(scorer: Scorer, tokens=tokens, windows=windows, length=length) -> float:
            scores = scorer(params, tokens, windows, f"scoring at {length}")
            return len(scores.nll) / scores.seconds

        runs = {}
        for name, options in (("with", {}), ("without", {"tolerance": 0.0})):
            scorer = Scorer(trainer.graphdef, trainer.mesh, _BATCH_TOKENS)
            # The first call traces the program, so the options have to hold during it.
            with _timing.attention_options(**options) if options else contextlib.nullcontext():
                rate(scorer)
            runs[name] = functools.partial(rate, scorer)
        rates = _timing.alternate(runs, _ROUNDS.value)
        cells = [
            _timing.median_and_range(_timing.ratios(rates["with"], rates["without"])),
            *(_timing.median_and_range(numbers, ",.0f") for numbers in rates.values()),
        ]
        say(f"| {length} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    cli.run(main)
