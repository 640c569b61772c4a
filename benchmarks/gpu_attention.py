"""Measures ALiBi's attention on a GPU, compared with cuDNN's causal attention without a bias.

    python benchmarks/gpu_attention.py [--lengths=1024,4096]

Each engine of `alibi_attention` is measured in bfloat16: the forward pass alone, and with the
gradients of queries, keys and values. Results must agree with the results of "dense" to 2e-2 of the
largest number, or with the results of "blockwise" if all scores at once do not fit into memory. The
exit code is 1 if a result differs more or if an engine does not run. The engines take turns in each
of `--rounds` rounds. The table gives the median, the minimum and the maximum of the time, and of
its ratio to the time of cuDNN in the same round. Without a GPU there is nothing to measure, but
`--device=cpu --lengths=512` tests this script, with XLA instead of cuDNN.
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

_DEVICE = flags.DEFINE_enum("device", "gpu", ["gpu", "cpu"], "Platform to run on.")
_LENGTHS = flags.DEFINE_list(
    "lengths", ["1024", "2048", "4096", "8192", "16384", "32768"], "Lengths of a row, in tokens."
)
_TOKENS = flags.DEFINE_integer("tokens", 16384, "Tokens of a batch; at least one row.")
_HEADS = flags.DEFINE_integer("heads", 16, "Number of query heads and of key heads.")
_SIZE = flags.DEFINE_integer("head_size", 64, "Features per head.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Number of rounds; their median is printed.")

_UNBIASED = "no bias"
_TOLERANCE = 2e-2
# Number of calls in a measurement, so that the overhead of starting calls does not count.
_CALLS = 10
# Number of float32 arrays of all scores that dense attention with gradients has at a time.
_DENSE_ARRAYS = 4


def main() -> int:
    """Prints one table row per length, pass and engine."""
    if _DEVICE.value == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        raise OSError("no GPU: use a machine with a GPU, or test with --device=cpu --lengths=512")
    device, shape = jax.devices()[0], (_HEADS.value, _SIZE.value)
    say(f"{device.device_kind}, jax {jax.__version__}, {shape[0]} heads of {shape[1]}, bfloat16\n")
    say("| length | batch | pass | engine | ratio | ms | error | temporaries, MiB |")
    say("|---|---|---|---|---|---|---|---|")
    # JAX does not report the memory of a CPU.
    memory = (device.memory_stats() or {}).get("bytes_limit", 2**32)
    all_agree = True
    for length in map(int, _LENGTHS.value):
        batch = max(1, _TOKENS.value // length)
        dense_fits = _DENSE_ARRAYS * 4 * batch * shape[0] * length**2 <= memory
        names = ["dense", "blockwise", "folded"] if dense_fits else ["blockwise", "folded"]
        arrays = [
            jax.random.normal(key, (batch, length, *shape), jnp.bfloat16)
            for key in jax.random.split(jax.random.key(0), 4)
        ]
        for pass_name in ("forward", "gradient"):
            all_agree &= _compare(f"| {length} | {batch} | {pass_name} |", pass_name, names, arrays)
    return 0 if all_agree else 1


def _compare(
    prefix: str, pass_name: str, names: Sequence[str], arrays: Sequence[jax.Array]
) -> bool:
    """Prints one table row per engine.

    Returns whether all engines run and agree with the first engine of `names` that runs.
    """
    runs: dict[str, Any] = {}
    errors = {_UNBIASED: ""}
    reference, all_agree = None, True
    for name in (_UNBIASED, *names):
        try:
            run = jax.jit(functools.partial(_run_pass, name, pass_name)).lower(*arrays).compile()
            results = [np.asarray(x, np.float32) for x in run(*arrays)]
        except Exception as error:  # The other engines are still measured.
            say(f"{prefix} {name} | failed: {' '.join(str(error).split())[:200]} | | | |")
            all_agree = False
            continue
        runs[name] = run
        if name == _UNBIASED:
            continue
        reference = reference or results
        max_error = np.max(
            [np.abs(x - other).max() / np.abs(other).max() for x, other in zip(results, reference)]
        )
        # Written so that NaN does not count as agreement.
        all_agree &= bool(max_error <= _TOLERANCE)
        errors[name] = f"{max_error:.1e}"

    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS.value):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready([run(*arrays) for _ in range(_CALLS)])
            times[name].append(1000 * (time.perf_counter() - start) / _CALLS)
    for name, milliseconds in times.items():
        ratios = [x / other for x, other in zip(milliseconds, times.get(_UNBIASED, []))]
        temporary = runs[name].memory_analysis().temp_size_in_bytes / 2**20
        cells = [
            _median_and_range(ratios),
            _median_and_range(milliseconds),
            errors[name],
            f"{temporary:,.0f}",
        ]
        say(f"{prefix} {name} | {' | '.join(cells)} |")
    return all_agree


def _run_pass(name: str, pass_name: str, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The output of an engine in the forward pass, or the three gradients."""
    *inputs, cotangent = arrays

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        if name == _UNBIASED:
            implementation_name: Literal["cudnn", "xla"] = (
                "cudnn" if _DEVICE.value == "gpu" else "xla"
            )
            return jax.nn.dot_product_attention(
                query, key, value, is_causal=True, implementation=implementation_name
            )
        return alibi_attention(query, key, value, alibi_slopes(_HEADS.value), implementation=name)

    if pass_name == "forward":
        return (attend(*inputs),)
    return jax.vjp(attend, *inputs)[1](cotangent)


def _median_and_range(numbers: Sequence[float]) -> str:
    """The median, the minimum and the maximum, as text; empty without numbers."""
    if not numbers:
        return ""
    return f"{statistics.median(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f})"


if __name__ == "__main__":
    cli.run(main)
