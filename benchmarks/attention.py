"""Measures attention with linear biases on a CPU: ours, other implementations in JAX, and PyTorch.

    python benchmarks/attention.py [--torch_python=PATH] [--lengths=512,1024] [--figure=FILE]

Attention is causal, with one row and 8 heads of size 64, in float32 and bfloat16. Two passes are
measured: the forward pass alone, and the forward pass with the gradients of queries, keys and
values. All implementations take turns in each of `--rounds` rounds. The first table gives the
median, the minimum and the maximum of three numbers: the time, its ratio to the time of "ours, all
cores" in the same round, and the achieved share of the FLOP/s of a 2048 x 2048 x 2048 matrix
product in the same dtype. The share counts the FLOPs of full causal attention, and for the
gradients twice the FLOPs of the forward pass. It does not count recomputation, and it counts the
keys that reach leaves out. The second table gives the memory of each implementation at
`--memory_length`, each measured in a new process.

"Ours, all cores" has one device per core and shards the heads over the devices, as training does.
All other implementations, also "ours", have one device that uses all cores as threads. The order of
the heads gives each device an equal share of the steep slopes. The error is the greatest difference
from the result of "ours, all cores", relative to the largest number. With a bias it must be at most
1e-3 in float32 and 2e-2 in bfloat16; otherwise the exit code is 1. An implementation is skipped if
it does not fit into memory. Beyond 4,096 tokens, implementations that build an array of all pairs
are skipped.
"""

import concurrent.futures
import contextlib
import functools
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import _figure
import _timing
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from alibi_jax import alibi_bias, alibi_slopes, cli
from alibi_jax.attention import alibi_attention
from alibi_jax.config import Mesh
from alibi_jax.distributed import sharding
from alibi_jax.distributed.processes import say

_LENGTHS = flags.DEFINE_list(
    "lengths", ["512", "1024", "4096", "16384"], "Lengths of both passes, in tokens."
)
_FORWARD_LENGTHS = flags.DEFINE_list(
    "forward_lengths", ["65536"], "Further lengths of the forward pass."
)
_DTYPES = flags.DEFINE_list(
    "dtypes", ["float32", "bfloat16"], "Dtypes of queries, keys and values."
)
_MEMORY_LENGTH = flags.DEFINE_integer("memory_length", 4096, "Length at which memory is measured.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Number of rounds; their median is printed.")
_TORCH = flags.DEFINE_string("torch_python", sys.executable, "A Python interpreter with torch.")
_FIGURE = flags.DEFINE_string(
    "figure", "docs/figures/attention.png", "File for the figure of times."
)

_HEADS, _SIZE = 8, 64
_PASSES = ("forward", "gradient")
# The greatest error of a result, relative to the largest number. A bias of m·j, unlike a bias of a
# distance, grows with the length of the row, and so does its rounding error.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
_OURS = "ours, all cores"
_TORCH_NAMES = {"torch mask": "mask", "torch flex": "flex", "torch causal, no bias": "causal"}
# The colours are safe for colour-blind readers (Okabe & Ito 2008). Each library has one colour, and
# markers and dashes distinguish its lines.
_LINE_STYLES = {
    _OURS: ("#0072B2", "o-"),
    "ours": ("#0072B2", "s--"),
    "ours without reach": ("#0072B2", "^:"),
    "jax.nn, key bias": ("#D55E00", "D-"),
    "naive": ("#D55E00", "v--"),
    "torch mask": ("#009E73", "P-"),
    "torch flex": ("#009E73", "X--"),
    "torch causal, no bias": ("#009E73", "*:"),
}
# These implementations build an array of all pairs, which takes gigabytes beyond this length.
_QUADRATIC = ("naive", "jax.nn, key bias", "torch mask", "torch flex")
_MAX_QUADRATIC_LENGTH = 4096


class Setting(NamedTuple):
    """A length, a dtype and a pass, "forward" or "gradient"."""

    length: int
    dtype: str
    pass_name: str

    def __str__(self) -> str:
        return f"| {self.length} | {self.dtype} | {self.pass_name} |"

    @property
    def flops(self) -> float:
        """The FLOPs of full causal attention: of the scores, the values and their gradients."""
        return 2 * _HEADS * self.length**2 * _SIZE * (1 if self.pass_name == "forward" else 3)


def main() -> int:
    """Prints the table of times and the table of memory, and draws the times."""
    jax.config.update("jax_platforms", "cpu")
    cli.start_devices(_HEADS)
    torch = _timing.torch_version(_TORCH.value)
    say(f"{jax.device_count()} cores, jax {jax.__version__}, torch {torch}\n")
    say(f"| length | dtype | pass | | / {_OURS} | ms | share of product | error |")
    say("|---|---|---|---|---|---|---|---|")
    cases = [(length, pass_name) for length in _LENGTHS.value for pass_name in _PASSES]
    cases += [(length, _PASSES[0]) for length in _FORWARD_LENGTHS.value]
    settings = [
        Setting(int(x), dtype, pass_name) for x, pass_name in cases for dtype in _DTYPES.value
    ]
    names = [name for name in _LINE_STYLES if torch or name not in _TORCH_NAMES]
    all_agree, panels = True, {}
    for setting in settings:
        panel = panels.setdefault(f"{setting.pass_name}, {setting.dtype}", {})
        agree, times = _compare(setting, [name for name in names if _is_measured(name, setting)])
        for name, milliseconds in times.items():
            panel.setdefault(name, []).append((setting.length, milliseconds))
        all_agree &= agree
    _print_memory(names)
    _figure.draw(panels, _LINE_STYLES, _FIGURE.value)
    say(f"\nwrote {_FIGURE.value}")
    return 0 if all_agree else 1


def _compare(setting: Setting, names: Sequence[str]) -> tuple[bool, dict[str, float]]:
    """Prints one table row per implementation.

    Returns whether the results of all implementations agree, and the median milliseconds of each.
    """
    runs: dict[str, Callable[[], float]] = {
        _timing.PRODUCT_RATE: _timing.product_rate(setting.dtype)
    }
    samples: dict[str, np.ndarray] = {}
    with contextlib.ExitStack() as stack:
        torch_process = None
        for name in names:
            try:
                if name in _TORCH_NAMES:
                    torch_process = torch_process or stack.enter_context(
                        _timing.TorchProcess(_TORCH.value)
                    )
                    samples[name] = np.array(
                        _prepare_in_torch(torch_process, name, setting), np.float32
                    )
                    runs[name] = functools.partial(
                        torch_process, "seconds", name=_TORCH_NAMES[name]
                    )
                else:
                    run = _prepare(name, setting)
                    samples[name] = _timing.sample([np.asarray(x, np.float32) for x in run()])
                    runs[name] = functools.partial(_timing.seconds_per_call, run)
            except (OSError, MemoryError) as error:
                say(f"{setting} {name} | {error} | | | |")
        numbers = _timing.alternate(runs, _ROUNDS.value)
    rates, all_agree = numbers.pop(_timing.PRODUCT_RATE), True
    for name, seconds in numbers.items():
        max_error = np.abs(samples[name] - samples[_OURS]).max() / np.abs(samples[_OURS]).max()
        biased = "no bias" not in name
        # Written so that NaN does not count as agreement.
        all_agree &= not biased or bool(max_error <= _TOLERANCE[setting.dtype])
        shares = [100 * setting.flops / x / rate for x, rate in zip(seconds, rates)]
        cells = [
            _timing.median_and_range(_timing.ratios(seconds, numbers[_OURS])),
            _timing.median_and_range([1000 * x for x in seconds], ".1f"),
            _timing.median_and_range(shares, ".0f") + " %",
            f"{max_error:.0e}" if biased else "",
        ]
        say(f"{setting} {name} | {' | '.join(cells)} |")
    return all_agree, {name: 1000 * statistics.median(seconds) for name, seconds in numbers.items()}


def _prepare(name: str, setting: Setting) -> Callable[[], tuple[jax.Array, ...]]:
    """A compiled call that waits for its results; raises MemoryError if it would not fit."""
    axes = ("batch", None, "heads", None)
    mesh = sharding.make_mesh(Mesh(data=1, tensor=-1)) if name == _OURS else None
    placement = jax.devices()[0] if mesh is None else sharding.named_sharding(mesh, *axes)
    arrays = [
        jax.device_put(jnp.asarray(x, setting.dtype), placement)
        for x in _timing.normal_arrays(4, setting.length, _HEADS, _SIZE)
    ]

    def attend(*inputs: jax.Array) -> jax.Array:
        sharded_attend = sharding.map_over_shards(
            functools.partial(_attend, name), [*[axes] * 3, ("heads",)], axes
        )
        return sharded_attend(*inputs, jnp.asarray(_slopes()))

    def results(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        *inputs, cotangent = arrays
        if setting.pass_name == "forward":
            return (attend(*inputs),)
        return jax.vjp(attend, *inputs)[1](cotangent)

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        compiled = jax.jit(results).lower(*arrays).compile()
    # This is the memory of one device. Only implementations on one device need much memory.
    _timing.check_memory(compiled.memory_analysis().temp_size_in_bytes)
    return lambda: jax.block_until_ready(compiled(*arrays))


def _attend(
    name: str, query: jax.Array, key: jax.Array, value: jax.Array, slopes: jax.Array
) -> jax.Array:
    """The output of the implementation `name`."""
    if name == "naive":
        scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
        scores = scores * _SIZE**-0.5 + alibi_bias(slopes, query.shape[1])
        visible = jnp.tri(query.shape[1], dtype=bool)
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)).astype(value.dtype)
        out = jnp.einsum("bnts,bsnh->btnh", weights, value, preferred_element_type=jnp.float32)
        return out.astype(value.dtype)
    if name == "jax.nn, key bias":
        # Adding m·i to a row does not change its softmax, so a bias of m·j alone is sufficient.
        bias = (slopes[:, None] * jnp.arange(key.shape[1]))[None, :, None]
        return jax.nn.dot_product_attention(query, key, value, bias, is_causal=True)
    tolerance = {"tolerance": 0.0} if name == "ours without reach" else {}
    return alibi_attention(query, key, value, slopes, implementation="blockwise", **tolerance)


def _slopes() -> np.ndarray:
    """The slopes of all heads, device by device.

    With D devices, each device gets every D-th head.
    """
    slopes = np.asarray(alibi_slopes(_HEADS))
    return slopes.reshape(-1, jax.device_count()).T.ravel()


def _prepare_in_torch(torch_process: _timing.TorchProcess, name: str, setting: Setting) -> list:
    """Prepares an implementation in PyTorch, and returns a sample of its results.

    Raises MemoryError if it would not fit.
    """
    if name == "torch mask":
        # Twice the mask, because PyTorch makes another array of its size.
        _timing.check_memory(2 * _HEADS * setting.length**2 * jnp.dtype(setting.dtype).itemsize)
    return torch_process(
        "attention",
        name=_TORCH_NAMES[name],
        **setting._asdict(),
        slopes=_slopes().tolist(),
        size=_SIZE,
    )


def _is_measured(name: str, setting: Setting) -> bool:
    """Whether an implementation is measured in a setting."""
    if name == "torch flex" and setting.pass_name == "gradient":
        return False
    return setting.length <= _MAX_QUADRATIC_LENGTH or name not in _QUADRATIC


def _print_memory(names: Sequence[str]) -> None:
    """Prints the memory that each implementation needs in addition to its inputs."""
    say(f"\nMiB in addition to the memory before the call, at length {_MEMORY_LENGTH.value}:\n")
    columns = [(dtype, pass_name) for dtype in _DTYPES.value for pass_name in _PASSES]
    say(f"| | {' | '.join(' '.join(column) for column in columns)} |")
    say("|---|" + "---|" * len(columns))
    for name in names:
        settings = [Setting(_MEMORY_LENGTH.value, *column) for column in columns]
        say(f"| {name} | {' | '.join(_memory(name, setting) for setting in settings)} |")


def _memory(name: str, setting: Setting) -> str:
    """The cell of an implementation in the table of memory."""
    if not _is_measured(name, setting):
        return ""
    try:
        if name in _TORCH_NAMES:
            with _timing.TorchProcess(_TORCH.value) as torch_process:
                _prepare_in_torch(torch_process, name, setting)
                size = torch_process("peak_memory", name=_TORCH_NAMES[name])
        else:
            spawn = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
                size = pool.submit(_peak_memory, name, setting).result()
    except (OSError, MemoryError) as error:
        return str(error)
    return f"{size:,.0f}"


def _peak_memory(name: str, setting: Setting) -> float:
    """The MiB of an implementation in JAX, in the present process."""
    jax.config.update("jax_platforms", "cpu")
    sharding.use_cpu_cores(_HEADS)
    return _timing.peak_memory(_prepare(name, setting))


if __name__ == "__main__":
    cli.run(main)
