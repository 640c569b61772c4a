"""What attention with linear biases costs on a CPU: ours, other ways in JAX, and PyTorch.

    python benchmarks/attention.py [--torch_python=PATH] [--lengths=512,1024] [--figure=FILE]

One row, 8 heads of 64, causal, float32 and bfloat16, forward and with the gradients of queries,
keys and values. All take turns in each of `--rounds` rounds; medians, least and greatest, of the
ratio to ours on all cores in the same round, of the time, and of the share of the speed of a
2048 x 2048 x 2048 matrix product in that dtype. That share counts the products that a causal row
asks for, a gradient's twice a forward pass's: what is recomputed does not count, and what reach
leaves out does. Then what each needs in memory, in a process of its own, at `--memory_length`.

Ours runs on each core as one device, heads split over them, as training does; the others, and
ours on one device, have all cores as that device's threads: both of ours are printed. Heads are in
an order that gives each device its share of the steep ones. All with a bias must give the same: to
1e-3 in float32 and 2e-2 in bfloat16 of the largest number, or the exit code is 1. What does not
fit into memory, and beyond 4,096 tokens what builds an array of all pairs, is left out.
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

_LENGTHS = flags.DEFINE_list("lengths", ["512", "1024", "4096", "16384"], "In tokens.")
_FORWARD_LENGTHS = flags.DEFINE_list("forward_lengths", ["65536"], "Without gradients.")
_DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "Of queries, keys and values.")
_MEMORY_LENGTH = flags.DEFINE_integer("memory_length", 4096, "At which memory is measured.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds whose median is printed.")
_TORCH = flags.DEFINE_string("torch_python", sys.executable, "An interpreter that has torch.")
_FIGURE = flags.DEFINE_string("figure", "docs/figures/attention.png", "Where to draw times.")

_HEADS, _SIZE = 8, 64
_KINDS = ("forward", "gradient")
# A bias of m·j, not of a distance, is as large as the row is long, and rounded as such numbers are.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
_OURS = "ours, all cores"
_IN_TORCH = {"torch mask": "mask", "torch flex": "flex", "torch causal, no bias": "causal"}
# Colour-blind safe (Okabe & Ito 2008); a colour is of a library, and dashes tell its lines apart.
_LINES = {
    _OURS: ("#0072B2", "o-"),
    "ours": ("#0072B2", "s--"),
    "ours without reach": ("#0072B2", "^:"),
    "jax.nn, key bias": ("#D55E00", "D-"),
    "naive": ("#D55E00", "v--"),
    "torch mask": ("#009E73", "P-"),
    "torch flex": ("#009E73", "X--"),
    "torch causal, no bias": ("#009E73", "*:"),
}
# What builds an array of all pairs takes gigabytes beyond this length.
_SQUARE = ("naive", "jax.nn, key bias", "torch mask", "torch flex")
_SQUARE_LENGTH = 4096


class Setting(NamedTuple):
    """What is measured: "forward" or "gradient"."""

    length: int
    dtype: str
    kind: str

    def __str__(self) -> str:
        return f"| {self.length} | {self.dtype} | {self.kind} |"

    @property
    def flops(self) -> float:
        """Of the products of scores and of values that are seen, and of their gradients."""
        return 2 * _HEADS * self.length**2 * _SIZE * (1 if self.kind == "forward" else 3)


def main() -> int:
    """Prints the table of times, then that of memory, and draws the times."""
    jax.config.update("jax_platforms", "cpu")
    cli.start_devices(_HEADS)
    torch = _timing.torch_version(_TORCH.value)
    say(f"{jax.device_count()} cores, jax {jax.__version__}, torch {torch}\n")
    say(f"| length | dtype | pass | | / {_OURS} | ms | share of product | off by |")
    say("|---|---|---|---|---|---|---|---|")
    both = [(length, kind) for length in _LENGTHS.value for kind in _KINDS]
    both += [(length, _KINDS[0]) for length in _FORWARD_LENGTHS.value]
    settings = [Setting(int(x), dtype, kind) for x, kind in both for dtype in _DTYPES.value]
    names = [name for name in _LINES if torch or name not in _IN_TORCH]
    fine, panels = True, {}
    for setting in settings:
        panel = panels.setdefault(f"{setting.kind}, {setting.dtype}", {})
        same, times = _compare(setting, [name for name in names if _serves(name, setting)])
        for name, milliseconds in times.items():
            panel.setdefault(name, []).append((setting.length, milliseconds))
        fine &= same
    _print_memory(names)
    _figure.draw(panels, _LINES, _FIGURE.value)
    say(f"\nwrote {_FIGURE.value}")
    return 0 if fine else 1


def _compare(setting: Setting, names: Sequence[str]) -> tuple[bool, dict[str, float]]:
    """Prints a line a candidate; whether all agree, and the median milliseconds of each."""
    runs: dict[str, Callable[[], float]] = {"": _timing.product_rate(setting.dtype)}
    samples: dict[str, np.ndarray] = {}
    with contextlib.ExitStack() as stack:
        peer = None
        for name in names:
            try:
                if name in _IN_TORCH:
                    peer = peer or stack.enter_context(_timing.Peer(_TORCH.value))
                    samples[name] = np.array(_ask(peer, name, setting), np.float32)
                    runs[name] = functools.partial(peer, "seconds", name=_IN_TORCH[name])
                else:
                    run = _prepare(name, setting)
                    samples[name] = _timing.sample([np.asarray(x, np.float32) for x in run()])
                    runs[name] = functools.partial(_timing.timed, run)
            except (OSError, MemoryError) as error:
                say(f"{setting} {name} | {error} | | | |")
        numbers = _timing.in_turns(runs, _ROUNDS.value)
    rates, fine = numbers.pop(""), True
    for name, seconds in numbers.items():
        off = np.abs(samples[name] - samples[_OURS]).max() / np.abs(samples[_OURS]).max()
        biased = "no bias" not in name
        # Not a number is not within it either.
        fine &= not biased or bool(off <= _TOLERANCE[setting.dtype])
        shares = [100 * setting.flops / x / rate for x, rate in zip(seconds, rates)]
        cells = [
            _timing.spread(_timing.ratios(seconds, numbers[_OURS])),
            _timing.spread([1000 * x for x in seconds], ".1f"),
            _timing.spread(shares, ".0f") + " %",
            f"{off:.0e}" if biased else "",
        ]
        say(f"{setting} {name} | {' | '.join(cells)} |")
    return fine, {name: 1000 * statistics.median(seconds) for name, seconds in numbers.items()}


def _prepare(name: str, setting: Setting) -> Callable[[], tuple[jax.Array, ...]]:
    """A call that waits for its results; MemoryError where it would not fit."""
    axes = ("batch", None, "heads", None)
    mesh = sharding.make_mesh(Mesh(data=1, tensor=-1)) if name == _OURS else None
    place = jax.devices()[0] if mesh is None else sharding.named_sharding(mesh, *axes)
    arrays = [
        jax.device_put(jnp.asarray(x, setting.dtype), place)
        for x in _timing.normal_arrays(4, setting.length, _HEADS, _SIZE)
    ]

    def attend(*inputs: jax.Array) -> jax.Array:
        split = sharding.map_over_shards(
            functools.partial(_attend, name), [*[axes] * 3, ("heads",)], axes
        )
        return split(*inputs, jnp.asarray(_slopes()))

    def results(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        *inputs, cotangent = arrays
        if setting.kind == "forward":
            return (attend(*inputs),)
        return jax.vjp(attend, *inputs)[1](cotangent)

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        compiled = jax.jit(results).lower(*arrays).compile()
    # Of one device, and only what runs on one takes much.
    _timing.check_room(compiled.memory_analysis().temp_size_in_bytes)
    return lambda: jax.block_until_ready(compiled(*arrays))


def _attend(
    name: str, query: jax.Array, key: jax.Array, value: jax.Array, slopes: jax.Array
) -> jax.Array:
    if name == "naive":
        scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
        scores = scores * _SIZE**-0.5 + alibi_bias(slopes, query.shape[1])
        seen = jnp.tri(query.shape[1], dtype=bool)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(value.dtype)
        out = jnp.einsum("bnts,bsnh->btnh", weights, value, preferred_element_type=jnp.float32)
        return out.astype(value.dtype)
    if name == "jax.nn, key bias":
        # A row's softmax does not change with m·i, so that a bias of m·j alone will do.
        bias = (slopes[:, None] * jnp.arange(key.shape[1]))[None, :, None]
        return jax.nn.dot_product_attention(query, key, value, bias, is_causal=True)
    tolerance = {"tolerance": 0.0} if name == "ours without reach" else {}
    return alibi_attention(query, key, value, slopes, implementation="blockwise", **tolerance)


def _slopes() -> np.ndarray:
    """Of the heads, those of each device one after the other: it has every so many-th."""
    slopes = np.asarray(alibi_slopes(_HEADS))
    return slopes.reshape(-1, jax.device_count()).T.ravel()


def _ask(peer: _timing.Peer, name: str, setting: Setting) -> list:
    """Makes PyTorch's candidate; some of its results. MemoryError where it would not fit."""
    if name == "torch mask":
        # Twice the mask, for what is made of it.
        _timing.check_room(2 * _HEADS * setting.length**2 * jnp.dtype(setting.dtype).itemsize)
    return peer(
        "attention",
        name=_IN_TORCH[name],
        **setting._asdict(),
        slopes=_slopes().tolist(),
        size=_SIZE,
    )


def _serves(name: str, setting: Setting) -> bool:
    if name == "torch flex" and setting.kind == "gradient":
        return False
    return setting.length <= _SQUARE_LENGTH or name not in _SQUARE


def _print_memory(names: Sequence[str]) -> None:
    """What each needs beyond its inputs, results included."""
    say(f"\nMiB above what is there before the call, at {_MEMORY_LENGTH.value}:\n")
    columns = [(dtype, kind) for dtype in _DTYPES.value for kind in _KINDS]
    say(f"| | {' | '.join(' '.join(column) for column in columns)} |")
    say("|---|" + "---|" * len(columns))
    for name in names:
        settings = [Setting(_MEMORY_LENGTH.value, *column) for column in columns]
        say(f"| {name} | {' | '.join(_memory(name, setting) for setting in settings)} |")


def _memory(name: str, setting: Setting) -> str:
    if not _serves(name, setting):
        return ""
    try:
        if name in _IN_TORCH:
            with _timing.Peer(_TORCH.value) as peer:
                _ask(peer, name, setting)
                size = peer("growth", name=_IN_TORCH[name])
        else:
            spawn = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, spawn) as fresh:
                size = fresh.submit(_growth, name, setting).result()
    except (OSError, MemoryError) as error:
        return str(error)
    return f"{size:,.0f}"


def _growth(name: str, setting: Setting) -> float:
    jax.config.update("jax_platforms", "cpu")
    sharding.use_cpu_cores(_HEADS)
    return _timing.growth(_prepare(name, setting))


if __name__ == "__main__":
    cli.run(main)
