"""What ALiBi's attention costs on a GPU: against cuDNN's causal attention, which has no bias.

    python benchmarks/gpu_attention.py [--lengths=1024,4096]

Each implementation of `alibi_attention`, forward and with the gradients of queries, keys and
values, in bfloat16. Results are held against the dense ones, or against the blockwise ones where
all scores at once do not fit, to 2e-2 of the largest number; exit code 1 where one is further off
or does not run. Implementations take turns in each of `--rounds` rounds: medians, least and
greatest of times, and of their ratios to cuDNN's of the same round. Without a GPU there is nothing
to measure: `--device=cpu --lengths=512` rehearses this script, XLA in the place of cuDNN.
"""

import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from alibi_jax import alibi_slopes, cli
from alibi_jax.attention import alibi_attention
from alibi_jax.distributed.processes import say

_DEVICE = flags.DEFINE_enum("device", "gpu", ["gpu", "cpu"], "Where to run.")
_LENGTHS = flags.DEFINE_list(
    "lengths", ["1024", "2048", "4096", "8192", "16384", "32768"], "Of the rows, in tokens."
)
_TOKENS = flags.DEFINE_integer("tokens", 16384, "In a batch, or one row if that is longer.")
_HEADS = flags.DEFINE_integer("heads", 16, "Of queries and of keys.")
_SIZE = flags.DEFINE_integer("head_size", 64, "Features a head.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds whose median is printed.")

_UNBIASED = "no bias"
_TOLERANCE = 2e-2
# Calls a measurement, so that starting them does not count.
_CALLS = 10
# Arrays of all scores, in float32, that dense attention keeps at a time with its gradients.
_DENSE_ARRAYS = 4


def main() -> int:
    """Prints a table: a line a length, pass and implementation."""
    if _DEVICE.value == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        raise OSError("no GPU here: run this on one, or rehearse with --device=cpu --lengths=512")
    device, shape = jax.devices()[0], (_HEADS.value, _SIZE.value)
    say(f"{device.device_kind}, jax {jax.__version__}, {shape[0]} heads of {shape[1]}, bfloat16\n")
    say("| length | batch | pass | implementation | ratio | ms | off by | temporary MiB |")
    say("|---|---|---|---|---|---|---|---|")
    # A CPU tells no such number.
    memory = (device.memory_stats() or {}).get("bytes_limit", 2**32)
    fine = True
    for length in map(int, _LENGTHS.value):
        batch = max(1, _TOKENS.value // length)
        dense = _DENSE_ARRAYS * 4 * batch * shape[0] * length**2 <= memory
        names = ["dense", "blockwise", "folded"] if dense else ["blockwise", "folded"]
        arrays = [
            jax.random.normal(key, (batch, length, *shape), jnp.bfloat16)
            for key in jax.random.split(jax.random.key(0), 4)
        ]
        for kind in ("forward", "gradient"):
            fine &= _compare(f"| {length} | {batch} | {kind} |", kind, names, arrays)
    return 0 if fine else 1


def _compare(line: str, kind: str, names: Sequence[str], arrays: Sequence[jax.Array]) -> bool:
    """Prints a line an implementation; true where all are as the first of `names` that runs."""
    runs: dict[str, Any] = {}
    tail = {_UNBIASED: ""}
    reference, fine = None, True
    for name in (_UNBIASED, *names):
        try:
            run = jax.jit(functools.partial(_pass, name, kind)).lower(*arrays).compile()
            results = [np.asarray(x, np.float32) for x in run(*arrays)]
        except Exception as error:  # The other lines are worth having.
            say(f"{line} {name} | failed: {' '.join(str(error).split())[:200]} | | | |")
            fine = False
            continue
        runs[name] = run
        if name == _UNBIASED:
            continue
        reference = reference or results
        off = np.max(
            [np.abs(x - other).max() / np.abs(other).max() for x, other in zip(results, reference)]
        )
        # Not a number is not within it either.
        fine &= bool(off <= _TOLERANCE)
        tail[name] = f"{off:.1e}"

    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS.value):
        for name, run in runs.items():
            begun = time.perf_counter()
            jax.block_until_ready([run(*arrays) for _ in range(_CALLS)])
            times[name].append(1000 * (time.perf_counter() - begun) / _CALLS)
    for name, seconds in times.items():
        ratios = [x / other for x, other in zip(seconds, times.get(_UNBIASED, []))]
        temporary = runs[name].memory_analysis().temp_size_in_bytes / 2**20
        cells = [_spread(ratios), _spread(seconds), tail[name], f"{temporary:,.0f}"]
        say(f"{line} {name} | {' | '.join(cells)} |")
    return fine


def _pass(name: str, kind: str, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    *inputs, cotangent = arrays

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        if name == _UNBIASED:
            fused: Literal["cudnn", "xla"] = "cudnn" if _DEVICE.value == "gpu" else "xla"
            return jax.nn.dot_product_attention(
                query, key, value, is_causal=True, implementation=fused
            )
        return alibi_attention(query, key, value, alibi_slopes(_HEADS.value), implementation=name)

    if kind == "forward":
        return (attend(*inputs),)
    return jax.vjp(attend, *inputs)[1](cotangent)


def _spread(numbers: Sequence[float]) -> str:
    if not numbers:
        return ""
    return f"{statistics.median(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f})"


if __name__ == "__main__":
    cli.run(main)
